"""The run's own decisions, without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from forge_async.config import Config
from forge_async.errors import RunFailed
from forge_async.journal import Journal
from forge_async.mesh import ActorDied
from forge_async.run import Run


async def test_a_respawned_replica_takes_what_is_published_while_it_starts():
    digests, calls = {0: "a", 1: "b"}, []

    class Handle:
        def pids(self) -> list[int]:
            return [1]

        async def call(self, name: str, *args: Any) -> None:
            calls.append((name, *args))
            if calls[-1] == ("sync", 1):
                digests[2] = "c"  # published meanwhile

    run = object.__new__(Run)
    run._events, run._journal = SimpleNamespace(write=lambda *args, **fields: None), Journal()
    run._loop = SimpleNamespace(tally=SimpleNamespace(digests=digests), held_at=None)
    await run._on_respawn(Handle())
    assert calls == [("setup",), ("sync", 1), ("sync", 2)]


async def test_a_respawned_replica_is_held_exactly_if_the_others_are():
    calls, loop = [], SimpleNamespace(tally=SimpleNamespace(digests={3: "a"}), held_at=3)

    class Handle:
        def pids(self) -> list[int]:
            return [1]

        async def call(self, name: str, *args: Any) -> None:
            calls.append((name, *args))
            if calls[-1] == ("hold", 3):
                loop.held_at = None  # the step was skipped meanwhile
            elif calls[-1] == ("release",):
                loop.tally.digests[4], loop.held_at = "b", 4  # the next one is trained, and the one after it begins

    run = object.__new__(Run)
    run._events, run._journal = SimpleNamespace(write=lambda *args, **fields: None), Journal()
    run._loop = loop
    await run._on_respawn(Handle())
    assert calls == [("setup",), ("sync", 3), ("hold", 3), ("release",), ("sync", 4), ("hold", 4)]


async def test_a_trainer_that_dies_while_it_saves_ends_the_run_as_failed():
    """``launch`` adds the resume command to a RunFailed."""

    async def call(name: str, *args: Any) -> None:
        raise ActorDied(f"traineractor-2.{name}: process 7 ended")

    run = object.__new__(Run)
    run.trainer = SimpleNamespace(call=call)
    with pytest.raises(RunFailed, match=r"the trainer failed in 'save_checkpoint': .*process 7 ended"):
        await run._ask_trainer("save_checkpoint", "folder", {})


def test_an_answer_cap_below_what_the_task_needs_is_named_within_the_first_step():
    """CASES: 97% truncated."""
    warnings: list[str] = []
    run = object.__new__(Run)
    run.config = Config()
    run._warned_truncated = False
    run._events = SimpleNamespace(write=lambda *args, **fields: None)
    run.console = SimpleNamespace(warn=warnings.append)
    step = SimpleNamespace(
        index=1, stats=SimpleNamespace(version=1), reward=0.0, truncated=0.97, staleness=SimpleNamespace(max=0)
    )
    for _ in range(3):
        run._note(step)
    (warning,) = warnings
    assert "97% of the completions ended at policy.sampling.max_tokens" in warning
