"""The run's own decisions, without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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
    run._events = SimpleNamespace(write=lambda *args, **fields: None)
    run._loop = SimpleNamespace(tally=SimpleNamespace(digests=digests))
    await run._on_respawn(Handle())
    assert calls == [("setup",), ("sync", 1), ("sync", 2)]
