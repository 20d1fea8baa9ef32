"""The handle of a run: start it, let it train, poke at it, stop it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from forge_async.buffer import RolloutBuffer
from forge_async.config import Config, changed
from forge_async.errors import ForgeError, RunStateError
from forge_async.observability import RunFolder, Summary
from forge_async.observability.frames import RunMetrics
from forge_async.observability.seen import SeenEpisode
from forge_async.observability.tables import Listing
from forge_async.rollout.environment import EnvironmentMaker
from forge_async.run.controls import PageControl, PolicyControl, TrainerControl
from forge_async.run.engines import Engines
from forge_async.run.pace import Pace
from forge_async.run.parts import Parts
from forge_async.run.status import ReplicaStatus, Status
from forge_async.steps import Step
from forge_async.store import WeightStore

if TYPE_CHECKING:
    from forge_async.replay import Replay


def launch(
    config: Config,
    replay: Replay | None = None,
    environment: EnvironmentMaker | None = None,
) -> Run:
    """The handle of a run that is yet to start: by ``async with``, or by :meth:`Run.start`.

    Args:
        replay: repeat a recorded run: see ``forge_async.replay``.
        environment: instead of what ``rollout.environment`` names: a class of your own, or anything that makes an
            ``Environment`` of the tokenizer.
    """
    return Run(config, replay, environment)


class Run:
    """A run, from nothing to its summary. Made by :func:`launch`; belongs to one event loop.

    ``async with`` starts it and stops it however the block is left. By hand: :meth:`start`, at last :meth:`stop`.

    In between :meth:`step`, :meth:`resume` and :meth:`pause` train, or ``async for step in run.steps()``;
    :meth:`status`, :meth:`episodes`, :meth:`summary`, ``run.metrics``, ``run.buffer`` and ``run.weights`` show what
    there is; ``run.policy`` and ``run.trainer`` answer, and change their settings.
    """

    def __init__(
        self,
        config: Config,
        replay: Replay | None = None,
        environment: EnvironmentMaker | None = None,
    ) -> None:
        self.policy, self.trainer = PolicyControl(self), TrainerControl(self)
        self.parts = Parts(config, replay, environment, PageControl(self))
        self._pace: Pace | None = None
        self._phase = "new"
        """``new``, ``starting``, ``up``, or ``stopped``."""
        self._starting: asyncio.Task[Any] | None = None
        """What :meth:`start` runs in."""
        self._stopping = False
        """:meth:`stop` was called."""
        self._down = asyncio.Event()
        """Everything has ended."""

    # ---- start and stop ----

    async def __aenter__(self) -> Run:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.stop()
            if self._pace is not None and self._pace.failure is not None:
                raise self._pace.failure
            return
        if self._stopping:  # by another task, which sees to the rest
            await self._down.wait()
        elif self._phase == "up":
            await self._shut_down(_outcome(error))
        self._raise_explained(error)

    async def start(self) -> Run:
        """Bring the engines up, put their weights in sync, and verify log-probs; returns this. The run is paused then.

        Nothing is generated before the first :meth:`step`, :meth:`resume` or :meth:`steps`.

        Raises:
            ForgeError: a setting, a file, or the log-prob check is wrong; nothing was trained then.
            RunStateError: it was started before, or is stopped meanwhile.
        """
        if self._phase != "new":
            raise RunStateError(f"start: the run was started before (it is {self.state}). Launch another one.")
        self._phase, parts = "starting", self.parts
        self._starting = starting = asyncio.current_task()
        assert starting is not None
        try:
            await parts.open()
            await parts.bring_up()
        except BaseException as error:
            await self._shut_down(_outcome(error))
            if self._stopping and isinstance(error, asyncio.CancelledError) and not starting.uncancel():
                raise RunStateError("start: the run was stopped before it was up. Launch another one.") from None
            self._raise_explained(error)
            raise
        self._pace = Pace(parts.loop, parts.take, self.log, parts.explain, lambda: not parts.left)
        self._phase = "up"
        return self

    async def stop(self, save: bool = True) -> None:
        """End the run: pause, save a checkpoint, export the model, end every process, write the summary.

        Clean after a fault, too; nothing is saved then. The run's ``end`` event says ``stopped`` where steps were left
        to take, ``finished`` where none were. A run that is starting is given up. A second call returns when
        everything has ended.

        Args:
            save: False leaves the checkpoint and the exported model out.
        """
        if self._phase == "new":
            self._phase = "stopped"
            self._down.set()
        again, self._stopping = self._stopping, True
        if self._phase != "up" or again:
            if self._starting is not None and self._phase == "starting" and not again:
                self._starting.cancel()
            await self._down.wait()
            return
        pace, outcome = self._up("stop"), "failed"
        try:
            if pace.failure is None:
                try:
                    await pace.rest()
                    if save:
                        await self.parts.save()
                    outcome = self.parts.outcome
                except ForgeError:
                    if pace.failure is None:  # else it is the run's, which its status tells
                        raise
        except BaseException as error:
            outcome = _outcome(error)
            raise
        finally:
            await self._shut_down(outcome)

    async def _shut_down(self, outcome: str) -> None:
        self._phase = "stopped"
        try:
            if self._pace is not None:
                await self._pace.close()
        finally:
            try:
                await self.parts.take_apart(outcome)
            finally:
                self._down.set()

    def _raise_explained(self, error: BaseException) -> None:
        """Raise what says how to go on after ``error``, where there is more to say."""
        if isinstance(error, ForgeError) and (explained := self.parts.explain(error)) is not error:
            raise explained from error

    # ---- training ----

    async def steps(self) -> AsyncIterator[Step]:
        """Train; yields each optimizer step after it was trained and published. Generation goes on meanwhile.

        :meth:`log` each one. However the iteration is left, the run is paused then. It ends after the present step when
        another task calls :meth:`pause` or :meth:`stop`.

        Raises:
            RunStateError: the run is not up, trains already, or has trained all its steps.
            RunFailed: what ended the run.
        """
        pace = self._up("steps")
        with pace.iteration() as iteration:
            try:
                while (step := await pace.next(iteration)) is not None:
                    yield step
            finally:
                if pace.state != "running":
                    self.parts.buffer.pause()

    async def train(self) -> None:
        """Train to the end, logging every step. Raises as :meth:`steps` does."""
        async for step in self.steps():
            self.log(step)

    async def step(self, count: int = 1) -> list[Step]:
        """Train ``count`` optimizer steps, and pause; fewer where the run ends before. Every step is logged.

        Interrupted (as a notebook's cell is), it leaves the run paused after the step that is being trained.

        Returns:
            The steps: reward, staleness, ``stats`` of the trainer, and the ``groups`` that were trained.
        Raises:
            RunStateError: the run is not up, trains already, or has trained all its steps.
            RunFailed: what ended the run.
        """
        if not isinstance(count, int) or count < 1:
            raise RunStateError(f"step: {count!r} steps cannot be taken; give a whole number, 1 or more.")
        pace = self._up("step")
        steps = await pace.step(count)
        await self.parts.recording.look(self.engines.policy)
        return steps

    async def resume(self) -> None:
        """Train in the background, logging every step, until :meth:`pause` or the end; returns at once.

        What ends the run meanwhile is in :meth:`status`, and raised by the next call that waits for it.

        Raises:
            RunStateError: the run is not up, trains already, or has trained all its steps.
            RunFailed: what has ended the run.
        """
        self._up("resume").resume()

    async def pause(self) -> None:
        """Stop training; returns when the step being trained has ended and its weights are live in every replica.

        A step that still waits for its batch is put off. No prompt is admitted any more; completions under way are
        finished and wait in the buffer, so nothing is lost. Ends the :meth:`steps` of another task.

        Raises:
            RunFailed: what ended the run.
        """
        await self._up("pause").pause()
        await self.parts.recording.look(self.engines.policy)

    async def wait(self) -> None:
        """Return when training in the background has ended or was paused.

        Raises:
            RunFailed: what ended the run.
        """
        await self._up("wait").wait()

    def log(self, step: Step, **more: float) -> None:
        """Show a step and record it: metrics, sampled episodes, console. ``more`` are metrics of the caller's own."""
        self._require_started("log")
        self.parts.recording.log(step, self.parts.buffer, more)

    async def checkpoint(self) -> Path:
        """Save the trainer's state with the data position and the ledger; returns the folder. Old ones are deleted.

        Raises:
            RunStateError: it is training. The run saves by itself every ``checkpoint.every_steps``.
        """
        pace = self._up("checkpoint")
        if pace.failure is not None:
            raise pace.failure
        if pace.state in ("running", "pausing"):
            raise RunStateError("checkpoint: the run is training. Call `await run.pause()` first.")
        return await self.parts.save_checkpoint()

    # ---- what there is to see ----

    @property
    def state(self) -> str:
        """See :attr:`Status.state`."""
        return self._pace.state if self._phase == "up" and self._pace is not None else self._phase

    @property
    def name(self) -> str:
        """That of its folder, once there is one."""
        return self.config.name if self._pace is None else self.parts.folder.path.name

    def status(self) -> Status:
        """How the run is, at any time, also before its start and after its end. Prints itself; ``repr(run)`` is it."""
        config, failure = self.config, self._pace.failure if self._pace is not None else None
        settings: dict[str, Any] = dict(
            state=self.state,
            steps=config.steps,
            learning_rate=config.trainer.optimizer.lr,
            temperature=config.policy.sampling.temperature,
            update_mode=config.policy.update.mode,
            failure=None if failure is None else str(failure),
        )
        if self._pace is None:
            return Status(self.name, **settings)
        parts, buffer = self.parts, self.parts.buffer
        last, told, ledger, now = parts.recording.last, parts.recording.told, buffer.ledger, time.monotonic()
        replicas = []
        for index, replica in enumerate(parts.engines.policy.replicas):
            at, known = told.get(index, (now, {"version": None, "running": None}))
            replicas.append(
                ReplicaStatus(replica.state, known["version"], known["running"], now - at, replica.respawns)
            )
        return Status(
            name=self.name,
            folder=parts.folder.path,
            version=parts.loop.version,
            reward=None if last is None else last.reward,
            staleness=None if last is None else last.staleness.max,
            ready=buffer.depth,
            in_flight=buffer.in_flight,
            admitted=ledger.admitted,
            trained=ledger.trained,
            dropped=dict(ledger.dropped),
            replicas=tuple(replicas),
            **settings,
        )

    def episodes(self, last: int | None = 10) -> Listing[SeenEpisode]:
        """The episodes trained last, oldest first, with their tokens: a list that shows itself as a table.

        Args:
            last: how many; None takes all that are remembered.
        Raises:
            RunStateError: the run was not started.
        """
        self._require_started("episodes")
        return self.parts.recording.episodes(last)

    @property
    def metrics(self) -> RunMetrics:
        """``run.metrics.frame()`` is a pandas DataFrame of what was logged."""
        self._require_started("metrics")
        return RunMetrics(self.folder.metrics)

    @property
    def weights(self) -> WeightStore:
        """``await run.weights.versions()`` shows what the store holds."""
        self._up("weights")
        return self.engines.store

    def summary(self) -> Summary:
        """The figures of the run so far, as ``summary.json`` has them at its end. Prints itself.

        Raises:
            RunStateError: the run was not started.
        """
        self._require_started("summary")
        return self.parts.summary()

    def __repr__(self) -> str:
        return repr(self.status())

    def _repr_html_(self) -> str:
        return self.status()._repr_html_()

    def __rich__(self) -> Any:
        return self.status().__rich__()

    # ---- what it is made of ----

    @property
    def config(self) -> Config:
        """As it is now: see ``run.policy.set_sampling`` and its like."""
        return self.parts.config

    @property
    def folder(self) -> RunFolder:
        """Where everything of the run lies."""
        self._require_started("folder")
        return self.parts.folder

    @property
    def engines(self) -> Engines:
        """The processes themselves: ``policy``, ``trainer``, ``store`` and ``rewards``."""
        self._up("engines")
        return self.parts.engines

    @property
    def buffer(self) -> RolloutBuffer:
        """``run.buffer.peek()`` shows what is open in it."""
        self._require_started("buffer")
        return self.parts.buffer

    def fail(self, error: ForgeError) -> None:
        """End the run with ``error``, whatever it waits for."""
        self.parts.loop.fail(error)

    def require_up(self, what: str) -> Pace:
        """Raise RunStateError unless the engines are there."""
        return self._up(what)

    def changed(self, settings: dict[str, Any]) -> Config:
        """The config with these settings, by dotted key, for :meth:`Parts.apply`.

        Raises:
            RunStateError, RunFailed: the run is not up, or has failed.
            ConfigError: a setting is wrong.
        """
        pace = self._up(f"changing {', '.join(settings)}")
        if pace.failure is not None:
            raise pace.failure
        return changed(self.config, settings)

    def _up(self, what: str) -> Pace:
        if self._phase != "up" or self._pace is None:
            helps = {
                "new": "Call `await run.start()` first.",
                "starting": "Wait for `await run.start()`.",
                "stopped": "Launch another one; `resume=<its folder>` goes on from its last checkpoint.",
            }
            raise RunStateError(f"{what}: the run is {self._phase}. {helps.get(self._phase, '')}")
        return self._pace

    def _require_started(self, what: str) -> None:
        if self._pace is None:
            raise RunStateError(f"{what}: the run is {self._phase}. Call `await run.start()` first.")


def _outcome(error: BaseException) -> str:
    stopped = isinstance(error, asyncio.CancelledError | KeyboardInterrupt | GeneratorExit)
    return "interrupted" if stopped else "failed"
