"""What a run shows and writes down of each step: metrics, sampled episodes, events, the console, and the summary."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from forge_async.buffer import RolloutBuffer
from forge_async.config import Config
from forge_async.mesh import Service
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
from forge_async.observability.advice import Advice, Measured, Resources, advise
from forge_async.observability.seen import SeenEpisode, listing, of_groups
from forge_async.observability.tables import Listing
from forge_async.steps import Step, Tally
from forge_async.types import Episode, Group

REMEMBERED_GROUPS = 256
"""Trained groups that can be looked at in a live run; older ones are in ``episodes.jsonl``, as far as sampled."""


class Recording:
    """The files, meters and the console of one run. Times of pauses count nowhere."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self.config, self.folder = config, folder
        self.console = Console(config.steps, title=f"forge_async  {folder.path.name}", enabled=config.metrics.console)
        self.events = EventLog(folder.events, self.console.warn)
        self.tokenizer: Any = None
        self.steps = 0
        """Optimizer steps noted by :meth:`note`."""
        self._batches = 0
        """The same with those that were skipped."""
        self.last: Step | None = None
        self.replicas: dict[int, dict[str, Any]] = {}
        """Each replica's last status, by its index, as counted; one that was never asked is not there."""
        self.told: dict[int, tuple[float, Mapping[str, Any]]] = {}
        """The same for a person to see, also from between two steps, with the time it came (monotonic)."""
        self._metrics = MetricsLogger(folder.path, config.metrics, self.console.warn)
        per_step = config.metrics.episodes_per_step
        self._recorder = EpisodeRecorder(folder.episodes, per_step, config.seed, self.console.warn)
        self.token_logprobs: dict[str, np.ndarray] = {}
        """Of the newest step's :meth:`sample`, by sequence: the trainer's log-probs before the step, float32 [T]."""
        self._seen: deque[tuple[int, Group]] = deque(maxlen=REMEMBERED_GROUPS)
        self._idle, self._generated = IdleMeter(), RateMeter()
        self._discarded, self._recomputed = RateMeter(), RateMeter()
        self._mark = time.monotonic()
        """When the last step was noted, or the last pause ended."""
        self._step_s = self._wall_s = self._wait_s = self._rate = 0.0
        self._phase_s: Counter[str] = Counter()
        self._warned_truncated = False

    async def begin(self, policy: Service) -> None:
        """Count from now on: at the first step, and after a pause."""
        await self.look(policy)
        for index, status in self.replicas.items():
            self._idle.skip(f"generator {index}", status["busy_s"], status["idle_s"])
        self._read_counters()
        self._mark = time.monotonic()

    async def note(self, step: Step, policy: Service) -> None:
        """Take the figures of a step that was just trained, or skipped (of which the loop has written an event)."""
        now = time.monotonic()
        self._step_s, self._mark = now - self._mark, now
        self._wall_s += self._step_s
        self._wait_s += step.wait_s
        self._phase_s.update(step.stats.phase_s)
        self._batches += 1
        await self.look(policy)
        for index, status in self.replicas.items():
            self._idle.update(f"generator {index}", status["busy_s"], status["idle_s"])
        self._rate = self._read_counters()
        self.warn_truncated(step.truncated)
        if step.stats.skipped:
            return
        self.steps += 1
        self.last = step
        self._seen.extend((step.stats.version, group) for group in step.groups)
        self.events.write(
            "step", index=step.index, version=step.stats.version, reward=step.reward, staleness=step.staleness.max
        )

    def sample(self, step: Step) -> list[Episode]:
        """The episodes that :meth:`log` will record of ``step``."""
        return [episode for _, episode in self._recorder.sample(step.stats.version, step.groups)]

    def warn_truncated(self, share: float) -> None:
        """Warn once if too large a share of the episodes was cut off."""
        if share > self.config.rollout.truncation_warning and not self._warned_truncated:
            self._warned_truncated = True
            config = self.config
            what, limits = "completions", f"policy.sampling.max_tokens ({config.policy.sampling.max_tokens})"
            if config.rollout.environment:
                turns, context = config.rollout.max_turns, config.policy.max_model_len
                what = "episodes"
                limits += f", rollout.max_turns ({turns}) or policy.max_model_len ({context})"
            self.console.warn(f"{share:.0%} of the {what} ended at {limits}: the task may need longer ones")

    async def look(self, policy: Service) -> None:
        """Ask the replicas how they are, without counting anything; one that is being respawned keeps its last word."""
        for index, status in enumerate(await policy.fan_out("status", timeout=30.0)):
            if isinstance(status, dict):
                self.replicas[index] = status
                self.tell(index, status)

    def tell(self, index: int, status: Mapping[str, Any]) -> None:
        """Show this of a replica from now on; counts nothing."""
        self.told[index] = time.monotonic(), status

    def _read_counters(self) -> float:
        """Tokens per second of all replicas since the last call."""
        for index, status in self.replicas.items():
            self._discarded.update(f"{index}", status["discarded_tokens"])
            self._recomputed.update(f"{index}", status["recomputed_tokens"])
        return sum(self._generated.update(f"{i}", s["generated_tokens"]) for i, s in self.replicas.items())

    def _of_generators(self, share: Callable[[str], float | None]) -> list[float | None]:
        """``share`` of every generator, by its name in the meter."""
        return [share(f"generator {index}") for index in range(self.config.policy.num_replicas)]

    def log(self, step: Step, buffer: RolloutBuffer, more: dict[str, float]) -> None:
        """Show a noted step and record it: sampled episodes, metrics, console. ``more`` are metrics of the caller's.

        A skipped one made no version, and has no metrics: theirs would stand in the place of the step's before it.
        """
        index, skipped = step.stats.version, step.stats.skipped
        trained = step.stats.trained_tokens / max(self._step_s, 1e-9)
        idle = self._of_generators(self._idle.window)
        dropped = "skipped_step" if skipped else ""
        # Before the metrics: whoever sees the step there finds its episodes.
        self._recorder.record(index, step.groups, self.tokenizer, step.sequences, self.token_logprobs, dropped)
        if not skipped:
            self._log_metrics(step, buffer, trained, idle, more)
        self.console.step(
            StepView(
                step=index,
                reward=step.reward,
                staleness_mean=step.staleness.mean,
                staleness_max=step.staleness.max,
                generated_tokens_per_s=self._rate,
                trained_tokens_per_s=trained,
                buffer_ready=buffer.depth,
                buffer_in_flight=buffer.in_flight,
                idle_trainer=step.wait_s / step.wall_s,
                idle_generators=idle,
                step_s=self._step_s,
                note="skipped: no token had a loss" if skipped else "",
            )
        )

    def _log_metrics(
        self, step: Step, buffer: RolloutBuffer, trained: float, idle: Sequence[float | None], more: dict[str, float]
    ) -> None:
        """A row of ``metrics.jsonl``; ``trained`` is in tokens per second."""
        self._metrics.log(
            step.stats.version,
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
                "tokens_per_s": {"generated": self._rate, "trained": trained},
                "buffer": {
                    "ready": buffer.depth,
                    "in_flight": buffer.in_flight,
                    "oldest_wait": buffer.oldest_wait,
                    "retried": buffer.retried,
                    "uniform": step.uniform,
                },
                "dropped": dict(buffer.ledger.dropped),
                "stale_episodes": dict(buffer.stale_episodes),
                "selection_bias": {
                    name: {"distance": selection.distance, "ratio": selection.ratios}
                    for name, selection in buffer.ledger.selection().items()
                },
                "idle": {
                    "trainer": step.wait_s / step.wall_s,
                    **{f"generator_{i}": share for i, share in enumerate(idle) if share is not None},
                },
                "time": {"step": step.wall_s, "wait": step.wait_s, "publish": step.publish_s},
                **more,
            },
        )

    def episodes(self, last: int | None) -> Listing[SeenEpisode]:
        """The last trained episodes, oldest first, of the last ``REMEMBERED_GROUPS`` groups; None takes all."""
        found: list[SeenEpisode] = []
        for step, group in reversed(self._seen):
            if last is not None and len(found) >= last:
                break
            found = of_groups(step, [group], self.tokenizer) + found
        return listing(found if last is None else found[max(0, len(found) - last) :])

    def summary(self, tally: Tally, buffer: RolloutBuffer, resources: Resources | None = None) -> Summary:
        """The figures of the run so far; ``resources`` are what the two sides run on."""
        ledger, wall_s = buffer.ledger.summary(), max(self._wall_s, 1e-9)
        ages: Sequence[int] = range(max(tally.staleness_histogram, default=-1) + 1)
        return Summary(
            steps=self.steps,
            wall_s=wall_s,
            rewards=tally.rewards,
            swaps=tally.swaps,
            swaps_in_flight=tally.swaps_in_flight,
            aborted_by_swap=sum(status["aborted"] for status in self.replicas.values()),
            trained_tokens=tally.trained_tokens,
            tokens_without_version=tally.tokens_without_version,
            discarded_tokens=int(self._discarded.total),
            recomputed_tokens=int(self._recomputed.total),
            staleness_bound=self.config.buffer.token_bound,
            staleness_max=tally.max_staleness,
            kv_staleness_max=tally.max_kv_staleness,
            staleness_histogram=[tally.staleness_histogram[age] for age in ages],
            digest_mismatches=tally.digest_mismatches,
            admitted=ledger["admitted"],
            trained=ledger["trained"],
            dropped=ledger["dropped"],
            in_flight=buffer.ledger.in_flight,
            requeued_requests=tally.requeued,
            retried=buffer.retried,
            selection_bias={name: item.to_dict() for name, item in buffer.ledger.selection().items()},
            idle_trainer=self._wait_s / wall_s,
            idle_generators=self._of_generators(self._idle.share),
            generated_tokens_per_s=self._generated.total / wall_s,
            trained_tokens_per_s=tally.trained_tokens / wall_s,
            phase_s=dict(self._phase_s),
            advice=self._advice(resources),
        )

    def _advice(self, resources: Resources | None) -> Advice | None:
        idle = [share for share in self._of_generators(self._idle.share) if share is not None]
        if not (self._batches and idle and self._wall_s > 0):
            return None
        step_s = self._wall_s / self._batches
        fixed = sum(self._phase_s[name] for name in ("clip", "publish", "optimizer"))
        return advise(
            Measured(
                step_s=step_s,
                trainer_busy_s=step_s - self._wait_s / self._batches,
                generators_busy_s=step_s * (1 - sum(idle) / len(idle)),
                fixed_s=fixed / self._batches,
                groups_per_step=self.config.buffer.groups_per_step,
                max_staleness=self.config.buffer.max_staleness,
                max_open_groups=self.config.buffer.max_open_groups,
                resources=resources,
                steps=self._batches,
            )
        )

    def close(self, outcome: str) -> None:
        """End the live view and the files."""
        self.console.close()
        self.events.write("end", outcome=outcome)
        self.events.close()
        self._metrics.close()
        self._recorder.close()

    def conclude(self, summary: Summary, outcome: str) -> None:
        """Draw the plot, write and print the summary; what cannot be written (a full disk) costs a warning."""
        plot = None
        try:
            summary.write(self.folder.summary)
            if self.config.metrics.plot and self.steps:
                bound, title = self.config.buffer.token_bound, self.folder.path.name
                plot = plot_run(self.folder.metrics, self.folder.plot, title=title, staleness_bound=bound)
        except OSError as error:
            self.console.warn(f"the summary or the plot could not be written: {error}")
        if self.steps or outcome not in ("finished", "stopped"):  # else nothing was to be trained
            summary.print(self.folder.summary, plot)
