"""Pausing admission, and what a person sees in the buffer."""

from __future__ import annotations

import asyncio

import numpy as np

from forge_async.buffer import BufferConfig, RolloutBuffer
from forge_async.types import Completion, Episode, Group, Prompt, Turn


def group_of(prompt: Prompt) -> Group:
    ids, versions = np.array([7], np.int32), np.array([0], np.int32)
    turn = Turn(Completion(ids, ids, np.zeros(1, np.float32), versions, versions, "stop"))
    return Group(prompt, tuple(Episode(f"{prompt.prompt_id}.{i}", prompt.prompt_id, (turn,), float(i)) for i in (0, 1)))


async def test_while_paused_nothing_is_admitted_and_what_runs_may_end_and_be_trained() -> None:
    buffer = RolloutBuffer(BufferConfig(groups_per_step=1, max_staleness=2))
    source = iter([Prompt(f"p{i}", (), np.zeros(1, np.int32)) for i in range(9)])
    first = await buffer.admit(source)
    assert first is not None
    buffer.pause()
    waiting = asyncio.ensure_future(buffer.admit(source))
    buffer.finish(group_of(first))
    batch = buffer.take()
    assert [entry.state for entry in buffer.peek()] == ["training"]
    buffer.trained(batch, 1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done() and buffer.room == 0 and buffer.open == 0
    buffer.resume()
    second = await asyncio.wait_for(waiting, 5)
    assert second is not None
    (shown,) = buffer.peek()
    assert (shown.prompt_id, shown.state, shown.stamp, shown.age, shown.attempt) == ("p1", "generating", 0, 1, 1)
    buffer.finish(group_of(second))
    assert (buffer.peek()[0].state, buffer.peek()[0].rewards) == ("ready", (0.0, 1.0))
    assert "p1" in repr(buffer.peek()) and "open prompts (1)" in repr(buffer.peek())
