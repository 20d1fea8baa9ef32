"""Steps by hand, in the background and for a caller's loop, between fakes: what waits, is cancelled, is told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

import forge_async
from forge_async.config import Config
from forge_async.errors import ForgeError, RunFailed, RunStateError
from forge_async.run.controls import PageControl
from forge_async.run.pace import Pace
from forge_async.run.parts import Parts


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
        self.ended_early = ""
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

    async def next(self) -> Any:
        """One step of a caller's own iteration."""
        with self.pace.iteration() as iteration:
            return await self.pace.next(iteration)

    async def pause(self) -> None:
        self.paused += 1

    def fail(self, error: ForgeError) -> None:
        self.failure = self.failure or error

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
    assert (loop.version, loop.pace.state, loop.paused > 0, loop.logged) == (1, "paused", True, [1])
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
    callers = asyncio.ensure_future(loop.next())
    await loop.until("training")
    loop.pace.hold()
    assert loop.pace.state == "running"
    loop.trained.set()
    assert (await callers).stats.version == 1
    for take in (loop.next, lambda: loop.pace.step(1)):
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
    callers = asyncio.ensure_future(loop.next())
    await asyncio.sleep(0.01)
    loop.pace.put_off()
    async with asyncio.timeout(5):
        assert await callers is None
    loop.batch.clear()
    callers = asyncio.ensure_future(loop.next())
    await loop.until("waiting")
    loop.pace.put_off()
    async with asyncio.timeout(5):
        assert await callers is None
    loop.batch.set()
    loop.trained.clear()
    callers = asyncio.ensure_future(loop.next())
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


async def test_steps_after_an_interrupted_wait_are_not_held_up():
    loop = Loop(total=3)
    loop.batch.clear()
    cell = asyncio.ensure_future(loop.next())
    await loop.until("waiting")
    cell.cancel()
    await asyncio.gather(cell, return_exceptions=True)
    loop.batch.set()
    assert len(await loop.pace.step(3)) == 3
    assert loop.paused == 1, "at the end, not after each of them"


async def test_an_interrupted_loop_of_the_callers_own_loses_no_step():
    loop = Loop()
    loop.trained.clear()
    cell = asyncio.ensure_future(loop.next())
    await loop.until("training")
    cell.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cell
    with pytest.raises(RunStateError, match="is training"):
        loop.pace.require_rest("steps")
    loop.trained.set()
    await loop.pace.wait()
    assert loop.logged == [1], "nobody else logs it"
    assert loop.paused == 1, "nothing is admitted after it"
    assert (await loop.next()).stats.version == 2  # type: ignore[union-attr]
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
    assert loop.pace.state == "failed" and loop.failure is not None, "the loop generates nothing for it any more"


async def test_a_step_that_cannot_be_logged_is_told_as_a_failed_run():
    loop = Loop()

    def log(step: Any) -> None:
        raise ZeroDivisionError("oops")

    loop.pace._log = log
    loop.pace.resume()
    for call in (loop.pace.wait, loop.pace.pause, lambda: loop.pace.step(1)):
        with pytest.raises(RunFailed, match="ZeroDivisionError.* Resume with resume=there.$"):
            await call()
    assert loop.pace.state == "failed" and loop.version == 1 and loop.failure is not None


class Caller:
    """A loop of a caller's own in a task of its own; between two steps it is busy until the test says otherwise."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.seen, self.idle, self.between = loop, [], asyncio.Event(), asyncio.Event()
        self.task = asyncio.ensure_future(self.main())

    async def main(self) -> None:
        pace = self.loop.pace
        with pace.iteration() as iteration:
            while (step := await pace.next(iteration)) is not None:
                self.seen.append(step.stats.version)
                self.between.set()
                await self.idle.wait()
                self.between.clear()


@pytest.mark.parametrize("where", ["held", "waiting", "between", "training"])
async def test_a_pause_ends_the_iteration_of_another_task_wherever_that_is(where: str):
    loop = Loop()
    if where == "held":
        loop.pace.hold()
    if where == "waiting":
        loop.batch.clear()
    if where == "training":
        loop.trained.clear()
    caller = Caller(loop)
    if where == "between":
        await caller.between.wait()
    elif where == "held":
        await asyncio.sleep(0.01)
    else:
        await loop.until(where)
    pausing = asyncio.ensure_future(loop.pace.pause())
    await asyncio.sleep(0.01)
    assert pausing.done() == (where != "training")
    loop.trained.set()
    caller.idle.set()
    async with asyncio.timeout(5):
        await pausing
        await caller.task
    assert caller.seen == ([1] if where in ("between", "training") else [])
    assert (loop.version, loop.pace.state, loop.pace.iterates) == (len(caller.seen), "paused", False)
    loop.pace.let_go()
    loop.batch.set()
    assert len(await loop.pace.step(1)) == 1, "and it can go on"


async def test_an_iteration_that_was_ended_does_not_go_on_after_others_took_steps():
    loop = Loop()
    caller = Caller(loop)
    await caller.between.wait()
    await loop.pace.pause()
    assert len(await loop.pace.step(1)) == 1
    loop.pace.resume()
    caller.idle.set()
    async with asyncio.timeout(5):
        await caller.task
    assert caller.seen == [1] and loop.pace.state == "running", "the run is the other's now"
    await loop.pace.pause()


async def test_a_pause_before_a_held_step_came_to_wait_does_not_wait_for_it():
    loop = Loop()
    loop.pace.hold()
    caller = Caller(loop)
    while loop.pace._step is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert loop.pace.state == "running", "it is not held yet"
    async with asyncio.timeout(5):
        await loop.pace.pause()
        await caller.task
    assert loop.version == 0


async def test_a_caller_that_pauses_between_its_own_steps_goes_on_by_the_next():
    loop = Loop(total=3)
    seen = []
    with loop.pace.iteration() as iteration:
        while (step := await loop.pace.next(iteration)) is not None:
            seen.append(step.stats.version)
            await loop.pace.pause()
            assert loop.paused == len(seen), "nothing is admitted meanwhile"
    assert seen == [1, 2, 3]


async def test_an_iteration_that_is_closed_late_does_not_end_the_next_one():
    loop = Loop()
    first, second = loop.pace.iteration(), loop.pace.iteration()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert loop.pace.iterates
    second.__exit__(None, None, None)
    assert not loop.pace.iterates


async def test_nothing_is_begun_after_the_end():
    loop = Loop()
    with loop.pace.iteration() as iteration:
        assert await loop.pace.next(iteration) is not None
        await loop.pace.close()  # as a stop in the body of the loop does
        assert await loop.pace.next(iteration) is None
    assert loop.version == 1


@pytest.mark.parametrize("busy", [True, False])
async def test_the_pages_resume_takes_steps_only_where_nobody_iterates(busy: bool):
    loop = Loop(total=3)
    run = forge_async.launch(Config())
    run._pace, run._phase = loop.pace, "up"
    page, caller = PageControl(run), None
    if busy:
        caller = Caller(loop)
        await caller.between.wait()
        assert (loop.pace.state, page.state) == ("paused", "running")
        page.hold()
        assert page.state == "paused"
    page.let_go()
    if caller is not None:
        assert page.state == "running"
        caller.idle.set()
        await caller.task
        assert caller.seen == [1, 2, 3] and loop.logged == []
    else:
        await loop.pace.wait()
        assert loop.logged == [1, 2, 3]


@pytest.mark.parametrize("where", ["held", "waiting"])
async def test_a_run_stopped_from_its_page_says_so_also_where_a_step_is_put_off(where: str):
    loop, said = Loop(), []
    loop.pace._is_over = lambda: bool(loop.ended_early)
    parts: Any = Parts(Config(), None, None, PageControl(forge_async.launch(Config())))
    parts.loop, parts.recording = loop, SimpleNamespace(console=SimpleNamespace(warn=said.append))
    assert parts.outcome == "stopped", "steps are left"
    page = PageControl(SimpleNamespace(require_up=lambda what: loop.pace, parts=parts))  # type: ignore[arg-type]
    if where == "held":
        page.hold()
    else:
        loop.batch.clear()
    loop.pace.resume()
    await asyncio.sleep(0.01)
    assert loop.waiting == (where == "waiting")
    page.end()
    async with asyncio.timeout(5):
        await loop.pace.wait()
    assert parts.outcome == "stopped", "none is taken any more, and yet it is not finished"
    assert said == ["The run was stopped from its page."] and loop.pace.state == "ended" and loop.version == 0


async def test_close_leaves_no_task():
    loop = Loop()
    loop.trained.clear()
    loop.pace.resume()
    await loop.until("training")
    async with asyncio.timeout(5):
        await loop.pace.close()
    assert len(asyncio.all_tasks()) == 1
