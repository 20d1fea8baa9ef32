"""When steps are taken: one for a caller's ``async for``, so many, or on and on until someone says pause.

Every step is taken in a task of its own. Whoever waits for it may be cancelled, as a notebook's cell is by an
interrupt: a step that is being trained ends all the same, and one that still waits for its batch has not begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, Protocol

from forge_async.errors import ForgeError, RunFailed, RunStateError
from forge_async.steps import Step


class Stepping(Protocol):
    """The part of the loop that is used here; see ``AsyncLoop``."""

    waiting: bool

    @property
    def failure(self) -> ForgeError | None: ...
    async def pause(self) -> None: ...
    def fail(self, error: ForgeError) -> None: ...


@dataclass(frozen=True, eq=False)
class Iteration:
    """A caller's own: see :meth:`Pace.iteration`."""

    task: asyncio.Task | None


class Pace:
    """Takes steps one at a time.

    Args:
        loop: rests between them by its ``pause``.
        take: takes one step and looks after what is due after it; None when there will be no further one.
        log: gets each step that no caller's ``async for`` gets.
        explain: makes the error that callers see of one that ended a step.
        is_over: there will be no further step.
    """

    def __init__(
        self,
        loop: Stepping,
        take: Callable[[], Awaitable[Step | None]],
        log: Callable[[Step], None],
        explain: Callable[[ForgeError], ForgeError],
        is_over: Callable[[], bool],
    ) -> None:
        self._loop, self._take, self._log, self._explain, self._is_over = loop, take, log, explain, is_over
        self._failure: ForgeError | None = None
        self._step: asyncio.Task[Step | None] | None = None
        self._many: asyncio.Task[list[Step]] | None = None
        self._pausing = self._orphaned = self._held = self._closed = False
        self._begun = False
        """The step under way is more than one that waits to be let go."""
        self._iteration: Iteration | None = None
        """That of a caller who iterates, until another task ends it."""
        self._free = asyncio.Event()
        """Not set while steps are to be held; then ``_held`` says that one is."""
        self._free.set()

    @property
    def failure(self) -> ForgeError | None:
        """What has ended the run, as callers see it."""
        if self._failure is None and self._loop.failure is not None:
            self._failure = self._explain(self._loop.failure)
        return self._failure

    @property
    def state(self) -> str:
        """``failed``, ``ended``, ``held``, ``pausing``, ``running`` or ``paused``."""
        if self.failure is not None:
            return "failed"
        if self._held:
            return "held"
        if self._busy(self._many):
            return "pausing" if self._pausing else "running"
        if self._busy(self._step):
            return "running"
        return "ended" if self._is_over() else "paused"

    def require_rest(self, what: str) -> None:
        """Raise unless a step may be taken: the failure, or a RunStateError that says what to do."""
        if self.failure is not None:
            raise self.failure
        if self.state in ("running", "pausing", "held"):
            raise RunStateError(f"{what}: the run is training. Call `await run.pause()` first.")
        if self._is_over():
            raise RunStateError(
                f"{what}: the run has trained all it was to. Stop it, and go on with a larger `steps` by "
                "`resume=<its folder>`."
            )

    @contextmanager
    def iteration(self) -> Iterator[Iteration]:
        """A caller takes steps by :meth:`next`, one after the other, until it has enough, the end, or :meth:`rest`."""
        self.require_rest("steps")
        iteration = self._iteration = Iteration(asyncio.current_task())
        self._pausing = False
        try:
            yield iteration
        finally:
            if self._iteration is iteration:  # one that is closed late does not end the next
                self._iteration = None

    @property
    def iterates(self) -> bool:
        """A caller is within an :meth:`iteration`, though it may be busy between two steps."""
        return self._iteration is not None

    @property
    def holds(self) -> bool:
        """The next step will be held, see :meth:`hold`."""
        return not self._free.is_set()

    async def next(self, iteration: Iteration) -> Step | None:
        """The next step, for a caller that logs it; None at the end, or where :meth:`rest` has ended the iteration."""
        if self._is_over() or self._closed or iteration is not self._iteration:
            return None
        step = self._begin(logged=False)
        try:
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            if step.cancelled():
                return None  # it was put off by another task
            if step.done():  # in the same turn
                if step.exception() is None and (ended := step.result()) is not None:
                    self._log(ended)
                raise
            self._orphaned = True
            self._drop_waiting()
            raise

    async def step(self, count: int) -> list[Step]:
        """``count`` optimizer steps, then rest; fewer where the run ends before. Skipped ones do not count."""
        self.require_rest("step")
        task = self._start(count)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._ask()
            raise

    def resume(self) -> None:
        """Take steps from now on, until :meth:`pause` or the end."""
        self.require_rest("resume")
        self._start(None)

    async def pause(self) -> None:
        """Rest, and return when the weights of the last step are live in every replica."""
        await self.rest()
        try:
            await self._loop.pause()
        except ForgeError as error:
            self._fail(error)

    async def rest(self) -> None:
        """Return once the step that is being trained has ended; one that has not begun is put off.

        Ends the iteration of another task. A caller that rests between two steps of its own goes on by the next one.
        """
        others = self._iteration is not None and asyncio.current_task() is not self._iteration.task
        if others:
            self._iteration = None
        if others or self._busy(self._many) or self._busy(self._step):
            self._ask()
        await self.wait()

    def hold(self) -> None:
        """Let whoever takes steps wait, from the next one on, until :meth:`let_go`; a step under way ends first."""
        self._free.clear()

    def let_go(self) -> None:
        """End :meth:`hold`."""
        self._free.set()

    def put_off(self) -> None:
        """End a step that has not begun: whoever waits for it is told that there is none. Ends :meth:`hold`, too."""
        self._drop_waiting()
        self._free.set()

    async def wait(self) -> None:
        """Return when no step is being taken in the background; raises what has ended the run."""
        if self._many is not None:
            await asyncio.wait({self._many})
        if self._busy(self._step):
            assert self._step is not None
            await asyncio.wait({self._step})
        self._raise_failure()

    async def close(self) -> None:
        """Cancel whatever is under way; nothing is begun any more."""
        self._closed = True
        tasks = [task for task in (self._many, self._step) if task is not None and not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, count: int | None) -> asyncio.Task[list[Step]]:
        self._pausing = False
        self._many = asyncio.ensure_future(self._take_many(count))
        self._many.add_done_callback(lambda task: task.cancelled() or task.exception())  # told by `failure`
        return self._many

    async def _take_many(self, count: int | None) -> list[Step]:
        """Steps until ``count`` of them were trained, :meth:`pause`, or the end; then rests."""
        trained: list[Step] = []
        while not (self._is_over() or self._pausing) and (count is None or len(trained) < count):
            task = self._begin(logged=True)
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                task.cancel()
                raise
            if task.cancelled():
                break
            step = task.result()
            if step is None:
                break
            if not step.stats.skipped:
                trained.append(step)
        try:
            await self._loop.pause()
        except ForgeError as error:
            self._fail(error)
        return trained

    def _begin(self, logged: bool) -> asyncio.Task[Step | None]:
        if self._busy(self._step):
            raise RunStateError("a step is being taken already: `await run.wait()` returns when it is done.")
        self._begun = self._orphaned = False
        self._step = asyncio.ensure_future(self._one(logged))
        self._step.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._step

    async def _one(self, logged: bool) -> Step | None:
        try:
            if not self._free.is_set():
                await self._wait_until_free()
            self._begun = True
            step = await self._take()
            if step is not None and (logged or self._orphaned):
                self._log(step)
            if self._orphaned:
                await self._loop.pause()
            return step
        except ForgeError as error:
            self._fail(error)
        except Exception as error:  # a defect; the run cannot go on
            self._fail(RunFailed(f"a step failed: {error!r}"))

    async def _wait_until_free(self) -> None:
        self._held = True
        try:
            await self._loop.pause()
            await self._free.wait()
        finally:
            self._held = False

    def _fail(self, error: ForgeError) -> NoReturn:
        if self._failure is None:
            self._failure = self._explain(error)
        self._loop.fail(error)  # nothing is generated for it any more
        raise self._failure

    def _ask(self) -> None:
        self._pausing = True
        self._drop_waiting()

    def _drop_waiting(self) -> None:
        """End a step that has not begun."""
        if self._step is not None and (self._loop.waiting or not self._begun):
            self._step.cancel()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    @staticmethod
    def _busy(task: asyncio.Task | None) -> bool:
        return task is not None and not task.done()
