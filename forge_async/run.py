"""A run: meshes up, weights in sync, log-probs verified, then the loop; and whatever happens, everything down again.

::

    async with forge_async.launch(config) as run:
        async for step in run.steps():
            run.log(step)
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_async.buffer import Ledger, RolloutBuffer
from forge_async.checks import check_ratios, fresh_prompts, sampling_bias
from forge_async.config import Config, to_yaml
from forge_async.dashboard.monitor import Monitor
from forge_async.errors import ConfigError, ForgeError, RunFailed, prefix_errors
from forge_async.journal import FAULTS, Journal, turns_file
from forge_async.loop import AsyncLoop, Step
from forge_async.mesh import ActorHandle, MeshRuntime, Service, plan_placement
from forge_async.mesh.runtime import visible_gpus
from forge_async.mesh.service import Replica
from forge_async.observability import (
    Console,
    EpisodeRecorder,
    EventLog,
    IdleMeter,
    MetricsLogger,
    RateMeter,
    RunFolder,
    StepView,
    Summary,
    plot_run,
)
from forge_async.policy.actor import PolicyActor
from forge_async.policy.turns import Diverged
from forge_async.prepare import ensure_model, load_tokenizer, model_positions
from forge_async.rollout.datasets import PromptSource
from forge_async.rollout.environment import SingleTurnEnvironment
from forge_async.rollout.reward_worker import RewardPool
from forge_async.store import WeightStore
from forge_async.trainer.actor import TrainerActor
from forge_async.trainer.checkpoint import META_FILE

if TYPE_CHECKING:
    from forge_async.replay import Replay


@asynccontextmanager
async def launch(config: Config, replay: Replay | None = None) -> AsyncIterator[Run]:
    """Bring a run up and hand out its handle; on every way out it is shut down and its summary written.

    With ``replay`` it repeats a recorded run: see ``forge_async.replay``.

    Raises:
        ForgeError: a setting, a file, or the log-prob check is wrong; nothing was trained then.
    """
    await ensure_model(config.model)
    positions = model_positions(config.model.path)
    if positions is not None and config.policy.max_model_len > positions:
        allowed = f"at most {positions}, the max_position_embeddings of {config.model.path}"
        raise ConfigError("policy.max_model_len", config.policy.max_model_len, allowed)
    folder = RunFolder.open(config.resume) if config.resume else RunFolder.create(config.output_dir, config.name)
    run = Run(config, folder, replay)
    folder.write_config(to_yaml(config))
    outcome = "failed"
    try:
        async with MeshRuntime():
            try:
                await run._start()
                yield run
                await run._end()
                outcome = "finished"
            except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
                outcome = "interrupted"
                raise
            except Diverged:
                raise
            except RunFailed as error:
                resume = run._newest_checkpoint()
                hint = f" Resume with resume={folder.path}." if resume is not None else " There is no checkpoint yet."
                raise RunFailed(f"{error}{hint}") from error
            finally:
                await run._stop()
    finally:
        run._close(outcome)


class Run:
    """The handle of a run. Made by :func:`launch`."""

    def __init__(self, config: Config, folder: RunFolder, replay: Replay | None = None) -> None:
        self.config, self.folder, self.replay = config, folder, replay
        self.policy: Service
        self.trainer: ActorHandle
        self.store: WeightStore
        self.buffer: RolloutBuffer
        self._checkpoint_state = state = self._read_checkpoint()
        self.version: int = state["version"] if state else 0
        """Policy version at the start: more than 0 after a resume."""
        if self.version >= config.steps:
            raise ConfigError("steps", config.steps, f"more than the checkpoint's version, {self.version}")
        self.console = Console(config.steps, title=f"forge_async  {folder.path.name}", enabled=config.metrics.console)
        self._events = EventLog(folder.events)
        self._metrics = MetricsLogger(folder.path, config.metrics, self.console.warn)
        self._recorder = EpisodeRecorder(folder.episodes, config.metrics.episodes_per_step, config.seed)
        self._monitor = Monitor(folder, config, self._record, self.console)
        self._journal = replay or Journal(folder.schedule if config.metrics.record_schedule else None)
        self._tokenizer: Any = None
        self._idle, self._generated = IdleMeter(), RateMeter()
        self._discarded, self._recomputed = RateMeter(), RateMeter()
        self._loop: AsyncLoop | None = None
        self._source: PromptSource
        self.rewards: RewardPool | None = None
        self._began = self._stepped = time.monotonic()
        self._steps = 0
        self._wait_s = 0.0
        self._status: list[dict[str, Any]] = []
        self._aborted = 0
        self._warned_truncated = False

    async def steps(self) -> AsyncIterator[Step]:
        """Train; yields each optimizer step after it was trained and published. Generation goes on meanwhile."""
        assert self._loop is not None
        self._began = self._stepped = time.monotonic()
        await self._read_status()
        self._generation_rate()  # its first reading is where it counts from
        remaining = self.config.steps - self.version
        async for step in self._loop.steps(remaining):
            self._steps += 1
            self._wait_s += step.wait_s
            await self._read_status()
            await self._monitor.stepped(step, self._recorder.sample(step.stats.version, step.groups))
            self._note(step)
            yield step
            if not await self._monitor.may_go_on():
                break
            every = self.config.checkpoint.every_steps
            # The last one here, too: prompts open now are dropped when the loop ends, but a resume goes on with them.
            if self.replay is not None:
                continue
            if self._steps == remaining or (every and step.stats.version % every == 0):
                await self.checkpoint()
        if self._loop.ended_early is not None:
            self.console.warn(self._loop.ended_early)

    async def train(self) -> None:
        """Train to the end, logging every step."""
        async for step in self.steps():
            self.log(step)

    def log(self, step: Step, **more: float) -> None:
        """Show a step and record it: metrics, sampled episodes, console. ``more`` are metrics of the caller's own."""
        now = time.monotonic()
        elapsed, self._stepped = now - self._stepped, now
        index = step.stats.version
        generated = self._generation_rate()
        trained = step.stats.trained_tokens / elapsed
        idle = [self._idle.window(f"generator {i}") for i in range(len(self._status))]
        self._metrics.log(
            index,
            {
                "reward": step.reward,
                "reward_parts": step.reward_parts,
                "staleness_mean": step.staleness.mean,
                "staleness_max": step.staleness.max,
                "staleness": {
                    "histogram": list(step.staleness.histogram),
                    "kv_mean": step.kv_staleness.mean,
                    "kv_max": step.kv_staleness.max,
                },
                "episode": {"completion_length": step.completion_length, "truncated": step.truncated},
                "train": {k: v for k, v in asdict(step.stats).items() if k not in ("version", "skipped")},
                "tokens_per_s": {"generated": generated, "trained": trained},
                "buffer": {
                    "ready": self.buffer.depth,
                    "in_flight": self.buffer.in_flight,
                    "oldest_wait": self.buffer.oldest_wait,
                    "retried": self.buffer.retried,
                    "uniform": step.uniform,
                },
                "dropped": dict(self.buffer.ledger.dropped),
                "stale_episodes": dict(self.buffer.stale_episodes),
                "selection_bias": {
                    name: {"distance": selection.distance, "ratio": selection.ratios}
                    for name, selection in self.buffer.ledger.selection().items()
                },
                "idle": {
                    "trainer": step.wait_s / step.wall_s,
                    **{f"generator_{i}": x or 0.0 for i, x in enumerate(idle)},
                },
                "time": {"step": step.wall_s, "wait": step.wait_s, "publish": step.publish_s},
                **more,
            },
        )
        self._recorder.record(index, step.groups, self._tokenizer, step.sequences, self._monitor.token_logprobs)
        self.console.step(
            StepView(
                step=index,
                reward=step.reward,
                staleness_mean=step.staleness.mean,
                staleness_max=step.staleness.max,
                generated_tokens_per_s=generated,
                trained_tokens_per_s=trained,
                buffer_ready=self.buffer.depth,
                buffer_in_flight=self.buffer.in_flight,
                idle_trainer=step.wait_s / step.wall_s,
                idle_generators=idle,
                step_s=elapsed,
                note="skipped: no token had a loss" if step.stats.skipped else "",
            )
        )

    async def checkpoint(self) -> Path:
        """Save the trainer's state with the data position and the ledger; returns the folder. Old ones are deleted."""
        assert self._loop is not None
        version = self._loop.version
        folder = self.folder.checkpoints / f"version-{version:06d}"
        if not folder.exists():
            self.console.phase(f"saving {folder}")
            state = {"source": self._source.state(), "ledger": self.buffer.ledger.state()}
            await self._ask_trainer("save_checkpoint", str(folder), state)
            self._events.write("checkpoint", version=version, folder=str(folder))
        for old in self._checkpoints()[: -self.config.checkpoint.keep]:
            shutil.rmtree(old)
        self.console.phase("")
        return folder

    async def _ask_trainer(self, endpoint: str, *args: Any) -> None:
        try:
            await self.trainer.call(endpoint, *args)
        except ForgeError as error:
            raise RunFailed(f"the trainer failed in {endpoint!r}: {error}") from error

    def fail(self, error: ForgeError) -> None:
        """End the run with ``error``, whatever it waits for."""
        assert self._loop is not None
        self._loop.fail(error)

    # ---- start ----

    async def _start(self) -> None:
        config, began = self.config, time.monotonic()
        self.console.__enter__()
        self._monitor.open_page()
        self._events.write("start", name=self.folder.path.name, resume=bool(config.resume))
        state = self._checkpoint_state
        self._tokenizer = tokenizer = load_tokenizer(config.model.path)
        room = config.policy.max_model_len - config.policy.sampling.max_tokens
        with prefix_errors("dataset"):
            self._source = PromptSource(config.dataset, tokenizer, seed=config.seed, max_prompt_tokens=room)
        ledger = Ledger()
        if state:
            self._source.restore(state["source"], ledger.restore(state["ledger"]))
        samples = fresh_prompts(config, tokenizer, self._source.rows, room)
        replay = self.replay
        self.buffer = RolloutBuffer(config.buffer, ledger, self.version) if replay is None else replay.buffer(config)
        self.buffer.on_drop = lambda prompt, reason: self._record("dropped", prompt=prompt, reason=reason)
        gpus = config.trainer.device != "cpu" and bool(visible_gpus())
        ranks = config.policy.tensor_parallel_size
        placement = plan_placement(config.placement, config.trainer.procs, config.policy.num_replicas, ranks)

        threads = {"trainer": len(placement.trainer) / config.trainer.procs, "policy": len(placement.policy[0]) / ranks}
        self._journal.started("cuda" if gpus else "cpu", threads, to_yaml(config))
        if config.resume:
            self._journal.close()  # what was open at the checkpoint is not in the schedule

        self.console.phase("starting the weight store and the reward workers")
        dtype = config.policy.dtype if config.store.dtype == "auto" else config.store.dtype
        self.store = await WeightStore.create(replace(config.store, dtype=dtype))
        with prefix_errors("reward"):
            self.rewards = await RewardPool.create(config.reward)
        self.console.phase("starting the trainer and the policy service: imports take a while")
        self.trainer, self.policy = await _both(
            TrainerActor.options(procs=config.trainer.procs, cores=placement.trainer, with_gpus=gpus).spawn(
                config.trainer, config.model.path, store=self.store, total_steps=config.steps, seed=config.seed
            ),
            PolicyActor.options(procs=ranks, cores=placement.policy, with_gpus=gpus).as_service(
                config.policy,
                config.model.path,
                store=self.store,
                seed=config.seed,
                num_replicas=config.policy.num_replicas,
                on_respawn=self._on_respawn,
            ),
        )
        pids = [pid for replica in self.policy.replicas for pid in replica.pids]
        self._events.write("started", trainer=self.trainer.pids(), policy=pids)
        await _both(self._set_up_trainer(), self._set_up_policy())
        if state:
            self.console.phase(f"loading version {self.version}")
            await self.trainer.call("load_checkpoint", str(self._newest_checkpoint()))
        self.console.phase("publishing the first weights")
        version = (await self.trainer.call("publish"))[0]
        published = (await self.trainer.call("published", version))[0]
        self._journal.published(version, published["digest"])
        self._events.write("published", **published)
        for report in await self.policy.fan_out("sync", published["version"]):
            if isinstance(report, BaseException):
                raise report
        self._loop = AsyncLoop(
            config,
            self.policy,
            self.trainer,
            self.buffer,
            self._source,
            SingleTurnEnvironment(tokenizer),
            self.rewards,
            self._record,
            self.version,
            self._journal,
        )
        if replay is not None:
            replay.attach(self._loop, self.policy)
        self._loop.tally.digests[self.version] = published["digest"]
        # Told at once, also while nothing waits for them: a batch may take minutes to come.
        self.trainer.on_death(lambda: self._lost("the trainer failed", self.trainer.death_cause))
        self.store.on_death(lambda cause: self._lost("the weight store died", cause))
        if (bias := sampling_bias(config)) is not None:
            self.console.warn(bias)
        if samples:
            self.console.phase("checking that trainer and policy agree on log-probs")
            report = await check_ratios(config, self.policy, self.trainer, samples)
            self._events.write("ratio_check", **report)
            self.console.print(
                f"importance ratios of {report['tokens']} fresh tokens: |ratio - 1| at most {report['max_error']:.1e}"
            )
        self._monitor.start(self, self.buffer)
        self._events.write("ready", seconds=time.monotonic() - began, version=self.version)
        self.console.print(f"ready after {time.monotonic() - began:.0f} s")

    def _lost(self, what: str, cause: str | None) -> None:
        if self._loop is not None:
            self._loop.fail(RunFailed(f"{what} at version {self._loop.version}: {cause}"))

    async def _set_up_trainer(self) -> None:
        with prefix_errors("trainer"):
            await self.trainer.call("setup")

    async def _set_up_policy(self) -> None:
        async def set_up(replica: Replica) -> None:
            assert replica.handle is not None
            name = turns_file(replica.index)
            folder = self._journal.folder
            record = str((folder / name).resolve()) if folder is not None and not self.config.resume else None
            replay = str((self.replay.recorded.folder / name).resolve()) if self.replay is not None else None
            await replica.handle.call("setup", record=record, replay=replay)

        with prefix_errors("policy"):
            await asyncio.gather(*map(set_up, self.policy.replicas))

    def _record(self, kind: str, **fields: Any) -> None:
        self._events.write(kind, **fields)
        if kind in FAULTS:
            self._journal.fault(kind)

    async def _on_respawn(self, handle: ActorHandle) -> None:
        """A new replica builds its engine and takes the newest published version before it gets requests."""
        self._record("respawned", pids=handle.pids())
        await handle.call("setup")
        synced, held_at = -1, None
        # What the loop tells the replicas meanwhile does not reach it, as it is not healthy yet. Between the last
        # comparison and its becoming so there is no await: it has the newest version then, or is told of it, and it is
        # held exactly if the others are.
        while self._loop is not None:
            newest = max(self._loop.tally.digests, default=-1)
            if newest > synced:
                await handle.call("sync", newest)
                synced = newest
            elif self._loop.held_at != held_at:
                held_at = self._loop.held_at
                await (handle.call("release") if held_at is None else handle.call("hold", held_at))
            else:
                break

    # ---- the end ----

    async def _end(self) -> None:
        """After the last step of a run that went well."""
        assert self._loop is not None
        if not self._steps:
            return  # nothing was trained
        if self.replay is None:
            await self.checkpoint()
        if self.config.checkpoint.export_hf:
            target = self.folder.path / "model"
            self.console.phase(f"exporting the model to {target}")
            await self._ask_trainer("export_hf", str(target))

    async def _stop(self) -> None:
        await self._monitor.stop()
        if self._loop is not None:
            await self._loop.stop()  # where the caller left its `async for`, nothing else has done it
        if self.rewards is not None:
            with suppress(Exception):  # its processes are ended with the runtime in any case
                await self.rewards.stop()
        if hasattr(self, "store"):
            await self.store.close()

    def _close(self, outcome: str) -> None:
        self.console.close()
        self._monitor.close()
        self._events.write("end", outcome=outcome)
        self._events.close()
        self._metrics.close()
        self._recorder.close()
        self._journal.close()
        if self._loop is None or self.replay is not None:
            return
        plot = None
        if self.config.metrics.plot and self._steps:
            bound = self.config.buffer.token_bound
            plot = plot_run(self.folder.metrics, self.folder.plot, title=self.folder.path.name, staleness_bound=bound)
        summary = self.summary()
        summary.write(self.folder.summary)
        if self._steps or outcome != "finished":  # else nothing was to be trained
            summary.print(self.folder.summary, plot)

    def summary(self) -> Summary:
        """The figures of the run so far."""
        assert self._loop is not None
        tally, ledger = self._loop.tally, self.buffer.ledger.summary()
        wall_s = max(self._stepped - self._began, 1e-9)
        return Summary(
            steps=self._steps,
            wall_s=wall_s,
            rewards=tally.rewards,
            swaps=tally.swaps,
            swaps_in_flight=tally.swaps_in_flight,
            aborted_by_swap=self._aborted,
            trained_tokens=tally.trained_tokens,
            tokens_without_version=tally.tokens_without_version,
            discarded_tokens=int(self._discarded.total),
            recomputed_tokens=int(self._recomputed.total),
            staleness_bound=self.config.buffer.token_bound,
            staleness_max=tally.max_staleness,
            kv_staleness_max=tally.max_kv_staleness,
            staleness_histogram=[
                tally.staleness_histogram[age] for age in range(max(tally.staleness_histogram, default=-1) + 1)
            ],
            digest_mismatches=tally.digest_mismatches,
            admitted=ledger["admitted"],
            trained=ledger["trained"],
            dropped=ledger["dropped"],
            requeued_requests=tally.requeued,
            retried=self.buffer.retried,
            selection_bias={name: item.to_dict() for name, item in self.buffer.ledger.selection().items()},
            idle_trainer=self._wait_s / wall_s,
            idle_generators=[self._idle.share(f"generator {i}") for i in range(len(self._status))],
            generated_tokens_per_s=self._generated.total / wall_s,
            trained_tokens_per_s=tally.trained_tokens / wall_s,
        )

    # ---- small things ----

    async def _read_status(self) -> None:
        """Ask every replica for its counters; a replica that is being respawned keeps its last ones."""
        for index, status in enumerate(await self.policy.fan_out("status", timeout=30.0)):
            if not isinstance(status, dict):
                continue
            if index < len(self._status):
                self._status[index] = status
            else:
                self._status.append(status)
            self._idle.update(f"generator {index}", status["busy_s"], status["idle_s"])
            self._discarded.update(f"{index}", status["discarded_tokens"])
            self._recomputed.update(f"{index}", status["recomputed_tokens"])
        self._aborted = sum(status["aborted"] for status in self._status)

    def _generation_rate(self) -> float:
        """Tokens per second of all replicas since the last call."""
        return sum(self._generated.update(f"{i}", s["generated_tokens"]) for i, s in enumerate(self._status))

    def _note(self, step: Step) -> None:
        self._events.write(
            "step", index=step.index, version=step.stats.version, reward=step.reward, staleness=step.staleness.max
        )
        if step.truncated > self.config.rollout.truncation_warning and not self._warned_truncated:
            self._warned_truncated = True
            self.console.warn(
                f"{step.truncated:.0%} of the completions ended at policy.sampling.max_tokens "
                f"({self.config.policy.sampling.max_tokens}): the task may need longer ones"
            )

    def _checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first; ``version-*.partial`` is one whose saving was cut off."""
        return sorted(path.parent for path in self.folder.checkpoints.glob(f"version-*[0-9]/{META_FILE}"))

    def _newest_checkpoint(self) -> Path | None:
        checkpoints = self._checkpoints()
        return checkpoints[-1] if checkpoints else None

    def _read_checkpoint(self) -> dict[str, Any] | None:
        if not self.config.resume:
            return None
        newest = self._newest_checkpoint()
        if newest is None:
            raise ConfigError("resume", self.config.resume, "a run folder with a complete checkpoint")
        state = json.loads((newest / META_FILE).read_text(encoding="utf-8"))
        return state["extra"] | {"version": state["version"]}


async def _both(first: Any, second: Any) -> tuple[Any, Any]:
    """Await two at once; when one fails the other is cancelled and awaited, and the failure is raised."""
    tasks = [asyncio.ensure_future(first), asyncio.ensure_future(second)]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return tasks[0].result(), tasks[1].result()
