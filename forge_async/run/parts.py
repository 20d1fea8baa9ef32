"""What a run is made of: put together in order, looked after from step to step, and taken apart again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_async.buffer import Ledger, RolloutBuffer
from forge_async.checks import check_ratios, fresh_prompts
from forge_async.config import Config, differences, to_yaml
from forge_async.dashboard.monitor import Handle as PageHandle
from forge_async.dashboard.monitor import Monitor
from forge_async.errors import ConfigError, ForgeError, RunFailed, prefix_errors
from forge_async.journal import FAULTS, Journal
from forge_async.loop import AsyncLoop
from forge_async.mesh import MeshRuntime
from forge_async.observability import RunFolder, Summary
from forge_async.observability.alive import this_process
from forge_async.policy.turns import Diverged
from forge_async.prepare import ensure_model, load_tokenizer, model_positions
from forge_async.rollout.datasets import PromptSource
from forge_async.rollout.environment import Environment, EnvironmentMaker, environment_maker, own_rows
from forge_async.rollout.names import check_names
from forge_async.rollout.rollout import CLOSE_S
from forge_async.run.checkpoints import Checkpoints, mark_exported
from forge_async.run.engines import Engines
from forge_async.run.recording import Recording
from forge_async.steps import Step

if TYPE_CHECKING:
    from forge_async.replay import Replay


class Parts:
    """Files, data, processes and the loop of one run: :meth:`open`, then :meth:`bring_up`; :meth:`take_apart` any time.

    Args:
        config: as it is now; :meth:`apply` replaces it.
        environment: makes the rollouts' environment of the tokenizer; None: as ``rollout.environment`` says.
        page: does what the run's page asks for.
    """

    def __init__(
        self,
        config: Config,
        replay: Replay | None,
        environment: EnvironmentMaker | None,
        page: PageHandle,
    ) -> None:
        self.config, self.replay, self._given_environment, self._page = config, replay, environment, page
        self.first_version = 0
        """Policy version at the start: more than 0 after a resume."""
        self.runtime = MeshRuntime()
        self._entered = False
        self._explained: RunFailed | None = None
        self._stopped = False
        """By :meth:`end_early`."""
        # Made by open():
        self.folder: RunFolder
        self.checkpoints: Checkpoints
        self.recording: Recording
        self.monitor: Monitor
        self.journal: Journal
        self.tokenizer: Any
        self.environment: Environment
        self.source: PromptSource
        self.buffer: RolloutBuffer
        # Made by bring_up():
        self.engines: Engines
        self.loop: AsyncLoop

    # ---- before the first step ----

    async def open(self) -> None:
        """Everything that can be refused before a process is started.

        Raises:
            ForgeError: a setting or a file is wrong.
        """
        config = self.config
        if not (config.reward.functions or config.rollout.environment or self._given_environment):
            allowed = "at least one module:function where rollout.environment is empty"
            raise ConfigError("reward.functions", config.reward.functions, allowed)
        check_names(config.reward, "" if self._given_environment else config.rollout.environment)
        await ensure_model(config.model)
        positions = model_positions(config.model.path)
        if positions is not None and config.policy.max_model_len > positions:
            allowed = f"at most {positions}, the max_position_embeddings of {config.model.path}"
            raise ConfigError("policy.max_model_len", config.policy.max_model_len, allowed)
        folder = RunFolder.open(config.resume) if config.resume else RunFolder.create(config.output_dir, config.name)
        self.folder, self.checkpoints = folder, Checkpoints(folder, config.checkpoint.keep)
        state = self.checkpoints.read() if config.resume else None
        self.first_version = state["version"] if state else 0
        if self.first_version >= config.steps:
            raise ConfigError("steps", config.steps, f"more than the checkpoint's version, {self.first_version}")
        folder.forget_end()
        self.recording = Recording(config, folder)
        recorded = folder.schedule if config.metrics.record_schedule else None
        self.journal = self.replay or Journal(recorded, self.recording.console.warn)
        folder.write_config(to_yaml(config))
        self.recording.console.__enter__()
        self.monitor = Monitor(folder, config, self.record, self.recording.tell, self.recording.console, self._page)
        self.monitor.open_page()
        process = this_process()
        self.recording.events.write("start", name=folder.path.name, resume=bool(config.resume), process=process)
        self.tokenizer = self.recording.tokenizer = load_tokenizer(config.model.path)
        room = config.policy.max_model_len - config.policy.sampling.max_tokens
        with prefix_errors("rollout"):
            self.environment = (self._given_environment or environment_maker(config.rollout))(self.tokenizer)
        with prefix_errors("dataset"):
            rows = own_rows(self.environment, config.dataset)
            self.source = PromptSource(config.dataset, self.tokenizer, config.seed, room, rows)
        ledger = Ledger()
        if state:
            self.source.restore(state["source"], ledger.restore(state["ledger"]))
        if self.replay is None:
            self.buffer = RolloutBuffer(config.buffer, ledger, self.first_version)
        else:
            self.buffer = self.replay.buffer(config)
        self._samples = fresh_prompts(config, self.tokenizer, self.source.rows, room)
        from forge_async.doctor.at_rest import check_at_rest  # whose package imports this one

        for finding in check_at_rest(config, self.tokenizer, self._samples):
            if not finding.passed:
                self.recording.console.warn(str(finding))

    async def bring_up(self) -> None:
        """Start the processes, put their weights in sync, and verify log-probs.

        Raises:
            ForgeError: something did not start, or the two sides disagree.
        """
        await self.runtime.__aenter__()
        self._entered = True
        await self.monitor.open_monarch()
        config, began, console = self.config, time.monotonic(), self.recording.console
        self.engines = engines = Engines(config, self.journal, self.record, console.phase)
        checkpoint = self.checkpoints.newest() if config.resume else None
        published = await engines.start(checkpoint, self.replay)
        self.loop = engines.loop = loop = AsyncLoop(
            config,
            engines.policy,
            engines.trainer,
            self.buffer,
            self.source,
            self.environment,
            engines.rewards,
            self.record,
            self.first_version,
            self.journal,
        )
        if self.replay is not None:
            self.replay.attach(loop, engines.policy)
        if self._given_environment is not None:
            self.journal.by_hand(f"the environment {type(self.environment).__name__} was given")
        loop.tally.digests[self.first_version] = published["digest"]
        # Told at once, also while nothing waits for them: a batch may take minutes to come.
        engines.trainer.on_death(lambda: self._lost("the trainer failed", engines.trainer.death_cause))
        engines.store.on_death(lambda cause: self._lost("the weight store died", cause))
        if self._samples:
            console.phase("checking that trainer and policy agree on log-probs")
            report = await check_ratios(config, engines.policy, engines.trainer, self._samples)
            self.recording.events.write("ratio_check", **report)
            console.print(
                f"importance ratios of {report['tokens']} fresh tokens: |ratio - 1| at most {report['max_error']:.1e}"
            )
        self.monitor.start(engines, self.buffer)
        seconds = time.monotonic() - began
        self.recording.events.write("ready", seconds=seconds, version=self.first_version)
        console.print(f"ready after {seconds:.0f} s")
        console.phase("")

    def record(self, kind: str, **fields: Any) -> None:
        """One line of the event log; the schedule notes faults, too."""
        self.recording.events.write(kind, **fields)
        if kind in FAULTS:
            self.journal.fault(kind)

    def _lost(self, what: str, cause: str | None) -> None:
        self.loop.fail(RunFailed(f"{what} at version {self.loop.version}: {cause}"))

    # ---- from step to step ----

    @property
    def left(self) -> int:
        """Steps yet to be taken; a skipped one is none of them."""
        return 0 if self.loop.ended_early else self.config.steps - self.loop.version

    @property
    def outcome(self) -> str:
        """Of a run that ends now without a fault: ``finished``, or ``stopped`` before its steps were over."""
        return "stopped" if self._stopped or self.left else "finished"

    def end_early(self, why: str) -> None:
        """Let there be no further step, because a person says so."""
        self._stopped, self.loop.ended_early = True, why
        self.recording.console.warn(why)

    async def take(self) -> Step | None:
        """One step, and what is due after it; None at the end."""
        loop, recording, config = self.loop, self.recording, self.config
        if not self.left:
            return None
        if self.buffer.paused or not loop.steps_done:
            loop.waiting = True  # nothing has begun that could not be put off
            try:
                await recording.begin(self.engines.policy)
            finally:
                loop.waiting = False
        step = await loop.next_step()
        if step is None:
            assert loop.ended_early is not None
            recording.console.warn(loop.ended_early)
            return None
        await recording.note(step, self.engines.policy)
        recording.token_logprobs = await self.monitor.token_logprobs(step, recording.sample(step))
        every, last = config.checkpoint.every_steps, not self.left
        if last:
            await loop.settle()
        # At the last one here, too: prompts open now are dropped when the run stops, but a resume goes on with them.
        if self.replay is None and (last or (every and step.stats.version % every == 0)):
            await self.save_checkpoint()
        return step

    def apply(self, config: Config) -> None:
        """Let ``config`` count from the next step on, and write down what is new in it."""
        for key, (old, new) in differences(self.config, config).items():
            self.recording.events.write("changed", key=key, old=old, new=new, version=self.loop.version)
            self.journal.by_hand(f"{key} was changed")
        self.config = self.loop.config = self.recording.config = config

    @contextmanager
    def by_hand(self, what: str, **fields: Any) -> Iterator[None]:
        """Write down what no config says, done inside: in the schedule before it, as no replay can repeat what came of
        it, even if it fails; and in the event log once it is done."""
        self.journal.by_hand(what)
        yield
        self.recording.events.write("by_hand", what=what, version=self.loop.version, **fields)

    async def save_checkpoint(self) -> Path:
        """The trainer's state with the data position and the ledger; returns the folder. Old ones are deleted."""
        version = self.loop.version
        folder, console = self.checkpoints.place(version), self.recording.console
        if not folder.exists():
            console.phase(f"saving {folder}")
            state = {"source": self.source.state(), "ledger": self.buffer.ledger.state()}
            await self.ask_trainer("save_checkpoint", str(folder), state)
            self.recording.events.write("checkpoint", version=version, folder=str(folder))
        self.checkpoints.delete_old()
        console.phase("")
        return folder

    async def save(self) -> None:
        """What is left of a run that went well."""
        if not self.recording.steps:
            return  # nothing was trained
        if self.replay is None:
            await self.save_checkpoint()
        await self.loop.stop()
        if self.config.checkpoint.export_hf:
            target = self.folder.model
            self.recording.console.phase(f"exporting the model to {target}")
            await self.ask_trainer("export_hf", str(target))
            try:
                mark_exported(target, self.loop.version)
            except OSError as error:
                self.recording.console.warn(f"{target}: its version could not be noted: {error}")

    def explain(self, error: ForgeError) -> ForgeError:
        """A RunFailed that says how to go on, where the run has a folder; any other error as it is."""
        if not isinstance(error, RunFailed) or isinstance(error, Diverged) or not hasattr(self, "checkpoints"):
            return error
        if error is self._explained:
            return error
        resume = f" Resume with resume={self.folder.path}."
        explained = RunFailed(
            f"{str(error).rstrip('.')}.{resume if self.checkpoints.newest() else ' There is no checkpoint yet.'}"
        )
        explained.__cause__ = error
        self._explained = explained
        return explained

    async def ask_trainer(self, endpoint: str, *args: Any) -> list[Any]:
        """Call every rank; a failure there ends the run."""
        try:
            return await self.engines.trainer.call(endpoint, *args)
        except ForgeError as error:
            raise RunFailed(f"the trainer failed in {endpoint!r}: {error}") from error

    def summary(self) -> Summary:
        return self.recording.summary(self.loop.tally, self.buffer, self.engines.resources)

    async def _close_environment(self) -> None:
        try:
            await asyncio.wait_for(self.environment.close(), CLOSE_S)
        except Exception as error:  # user code: no reason to leave anything else behind
            self.recording.console.warn(f"the environment did not close: {error!r}")

    async def take_apart(self, outcome: str) -> None:
        """End all that there is, whatever state it is in, and write the summary of a run that got as far as a loop."""
        runs = hasattr(self, "loop")
        try:
            try:
                if runs:
                    await self.monitor.stop()
                    await self.loop.stop()
                if hasattr(self, "environment"):
                    await self._close_environment()
                if hasattr(self, "engines"):
                    await self.engines.stop()
            finally:
                if self._entered:
                    await self.runtime.__aexit__(None, None, None)
        finally:
            try:
                if hasattr(self, "monitor"):
                    self.monitor.close()
                if hasattr(self, "recording"):
                    self.recording.close(outcome)
                if hasattr(self, "journal"):
                    self.journal.close()
                if runs and self.replay is None:
                    self.recording.conclude(self.summary(), outcome)
            finally:
                if hasattr(self, "folder"):
                    self.folder.release()
