"""What a respawned replica is given, without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from forge_async.config import Config, changed
from forge_async.journal import Journal
from forge_async.run.engines import Engines


class Handle:
    """A new replica; ``meanwhile`` is called with each call that it gets."""

    def __init__(self, meanwhile: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.meanwhile = meanwhile

    def pids(self) -> list[int]:
        return [1]

    async def call(self, name: str, *args: Any) -> None:
        self.calls.append((name, *args))
        self.meanwhile(self.calls[-1])


def engines(digests: dict[int, str], held_at: int | None = None) -> Any:
    made = Engines(Config(), Journal(), lambda *args, **fields: None, lambda text: None)
    tally = SimpleNamespace(digests=digests)
    made.loop = SimpleNamespace(tally=tally, held_at=held_at, config=made.config)  # type: ignore[assignment]
    return made


async def test_a_respawned_replica_takes_what_is_published_while_it_starts():
    digests = {0: "a", 1: "b"}
    handle = Handle(lambda call: call == ("sync", 1) and digests.update({2: "c"}))
    await engines(digests).catch_up(handle)
    assert handle.calls == [("setup",), ("sync", 1), ("sync", 2)]


async def test_a_respawned_replica_is_held_exactly_if_the_others_are():
    made = engines({3: "a"}, held_at=3)

    def meanwhile(call: tuple[Any, ...]) -> None:
        if call == ("hold", 3):
            made.loop.held_at = None  # the step was skipped meanwhile
        elif call == ("release",):
            made.loop.tally.digests[4], made.loop.held_at = "b", 4  # the next one is trained, and the one after begins

    handle = Handle(meanwhile)
    await made.catch_up(handle)
    assert handle.calls == [("setup",), ("sync", 3), ("hold", 3), ("release",), ("sync", 4), ("hold", 4)]


async def test_a_respawned_replica_gets_the_update_mode_that_was_set_by_hand():
    made = engines({0: "a"})
    made.loop.config = changed(made.config, {"policy.update.mode": "drain"})
    handle = Handle(lambda call: None)
    await made.catch_up(handle)
    assert handle.calls == [("setup",), ("set_mode", "drain", "keep"), ("sync", 0)]
