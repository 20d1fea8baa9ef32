"""Steps by hand, in the background and for a caller's loop, between fakes: what waits, is cancelled, is told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from forge_async.errors import ForgeError, RunFailed, RunStateError
from forge_async.run.pace import Pace


class Loop:
    """Each step waits for a batch, then trains; both end when the test says so."""

    def __init__(self, total: int = 100) -> None:
        self.total, self.version, self.paused = total, 0, 0
        self.waiting, self.training = False, False
        self.failure: ForgeError | None = None
        self.batch, self.trained = asyncio.Event(), asyncio.Event()
        self.batch.set()
        self.trained.set()
        self.skip: set[int] = set()
        self.batches = 0
        self.logged: list[int] = []
        self.pace = Pace(
            self,
            self.take,
            lambda step: self.logged.append(step.stats.version),
            lambda error: RunFailed(f"{error} Resume with resume=there."),
            lambda: self.version == self.total,
        )

    async def take(self) -> Any:
        if self.version == self.total:
            return None
        self.waiting = True
        try:
            await self.batch.wait()
            await asyncio.sleep(0)
        finally:
            self.waiting = False
        self.training = True
        await self.trained.wait()
        self.training = False
        if self.failure is not None:
            raise self.failure
        self.batches += 1
        skipped = self.batches in self.skip
        self.version += not skipped
        return SimpleNamespace(stats=SimpleNamespace(version=self.version, skipped=skipped))

    async def pause(self) -> None:
        self.paused += 1

    async def until(self, name: str) -> None:
        async with asyncio.timeout(5):
            while not getattr(self, name):  # noqa: ASYNC110
                await asyncio.sleep(0)


async def test_step_takes_exactly_so_many_and_rests():
    loop = Loop()
    loop.skip = {2}
    assert [step.stats.version for step in await loop.pace.step(3)] == [1, 2, 3], "a skipped batch is no step"
    assert loop.batches == 4 and loop.logged == [1, 1, 2, 3]
    assert (loop.pace.state, loop.paused) == ("paused", 1)


async def test_step_at_the_end_gives_what_is_left_and_then_refuses():
    loop = Loop(total=2)
    assert len(await loop.pace.step(5)) == 2
    assert loop.pace.state == "ended"
    with pytest.raises(RunStateError, match="the run has trained all it was to.*resume="):
        await loop.pace.step(1)
    with pytest.raises(RunStateError, match="resume: the run has trained all"):
        loop.pace.resume()
    await loop.pace.pause()


async def test_a_running_run_is_not_stepped_and_pauses_after_the_step_being_trained():
    loop = Loop()
    loop.trained.clear()
    loop.pace.resume()
    await loop.until("training")
    for refused in (loop.pace.step(1), loop.pace.step(2)):
        with pytest.raises(RunStateError, match="step: the run is training. Call `await run.pause"):
            await refused
    with pytest.raises(RunStateError, match="resume: the run is training"):
        loop.pace.resume()
    pausing = asyncio.ensure_future(loop.pace.pause())
    await asyncio.sleep(0.01)
    assert not pausing.done() and loop.pace.state == "pausing"
    loop.trained.set()
    await pausing
    assert (loop.version, loop.pace.state, loop.paused, loop.logged) == (1, "paused", 1, [1])
    loop.pace.resume()
    await loop.pace.pause()
    assert loop.pace.state == "paused"


async def test_a_step_that_waits_for_its_batch_is_put_off_by_a_pause():
    loop = Loop()
    loop.batch.clear()
    loop.pace.resume()
    await loop.until("waiting")
    async with asyncio.timeout(5):
        await loop.pace.pause()
    assert (loop.version, loop.pace.state) == (0, "paused")
    loop.batch.set()
    assert len(await loop.pace.step(1)) == 1


async def test_held_steps_wait_whoever_takes_them_and_the_one_being_trained_ends():
    loop = Loop()
    loop.trained.clear()
    callers = asyncio.ensure_future(loop.pace.next())
    await loop.until("training")
    loop.pace.hold()
    assert loop.pace.state == "running"
    loop.trained.set()
    assert (await callers).stats.version == 1
    for take in (loop.pace.next, lambda: loop.pace.step(1)):
        version, waiting = loop.version, asyncio.ensure_future(take())
        await asyncio.sleep(0.01)
        assert (loop.pace.state, loop.version) == ("held", version) and not waiting.done()
        with pytest.raises(RunStateError, match="step: the run is training"):
            await loop.pace.step(1)
        loop.pace.let_go()
        await waiting
        assert loop.version == version + 1
        loop.pace.hold()
    loop.pace.let_go()
    assert loop.pace.state == "paused"


async def test_a_held_run_can_be_paused_and_a_step_put_off_is_none():
    loop = Loop()
    loop.pace.hold()
    loop.pace.resume()
    await asyncio.sleep(0.01)
    async with asyncio.timeout(5):
        await loop.pace.pause()
    assert (loop.version, loop.pace.state) == (0, "paused")
    callers = asyncio.ensure_future(loop.pace.next())
    await asyncio.sleep(0.01)
    loop.pace.put_off()
    async with asyncio.timeout(5):
        assert await callers is None
    loop.batch.clear()
    callers = asyncio.ensure_future(loop.pace.next())
    await loop.until("waiting")
    loop.pace.put_off()
    async with asyncio.timeout(5):
        assert await callers is None
    loop.batch.set()
    loop.trained.clear()
    callers = asyncio.ensure_future(loop.pace.next())
    await loop.until("training")
    loop.pace.put_off()
    await asyncio.sleep(0.01)
    loop.trained.set()
    assert (await callers).stats.version == 1, "what is being trained is never dropped"


async def test_an_interrupted_cell_leaves_the_step_being_trained_to_end_and_be_logged():
    loop = Loop()
    loop.trained.clear()
    cell = asyncio.ensure_future(loop.pace.step(5))
    await loop.until("training")
    cell.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cell
    assert loop.pace.state == "pausing"
    loop.trained.set()
    await loop.pace.wait()
    assert (loop.version, loop.logged, loop.pace.state) == (1, [1], "paused")


async def test_an_interrupted_loop_of_the_callers_own_loses_no_step():
    loop = Loop()
    loop.trained.clear()
    cell = asyncio.ensure_future(loop.pace.next())
    await loop.until("training")
    cell.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cell
    with pytest.raises(RunStateError, match="is training"):
        loop.pace.require_rest("steps")
    loop.trained.set()
    await loop.pace.wait()
    assert loop.logged == [1], "nobody else logs it"
    assert (await loop.pace.next()).stats.version == 2  # type: ignore[union-attr]
    assert loop.logged == [1], "the caller logs that one"


async def test_a_fault_in_the_background_is_told_by_whoever_waits_next_with_the_way_to_resume():
    loop = Loop()
    loop.trained.clear()
    loop.pace.resume()
    await loop.until("training")
    loop.failure = RunFailed("the trainer died.")
    loop.trained.set()
    for call in (loop.pace.wait, loop.pace.pause, lambda: loop.pace.step(1)):
        with pytest.raises(RunFailed, match="the trainer died. Resume with resume=there.$"):
            await call()
    assert loop.pace.state == "failed"


async def test_a_fault_while_nothing_is_trained_is_told_too():
    loop = Loop()
    loop.failure = RunFailed("the weight store died.")
    assert loop.pace.state == "failed"
    with pytest.raises(RunFailed, match="the weight store died"):
        loop.pace.resume()


async def test_a_defect_is_told_as_a_failed_run():
    loop = Loop()

    async def take() -> Any:
        raise ZeroDivisionError("oops")

    loop.pace._take = take
    with pytest.raises(RunFailed, match="ZeroDivisionError"):
        await loop.pace.step(1)
    assert loop.pace.state == "failed"


async def test_close_leaves_no_task():
    loop = Loop()
    loop.trained.clear()
    loop.pace.resume()
    await loop.until("training")
    async with asyncio.timeout(5):
        await loop.pace.close()
    assert len(asyncio.all_tasks()) == 1
