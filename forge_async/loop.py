"""The asynchronous RL loop: produce scored groups, train on them, publish weights; generation goes on meanwhile.

::

    source ──admit──▶ rollout_group ──finish──▶ buffer ──batch──▶ trainer.step ──▶ trainer.publish
                          ▲ policy.generate                                             │
                          └────────────── replicas pull and swap by themselves ◀─follow─┘

Three kinds of tasks run at once, and each is awaited or cancelled by :meth:`AsyncLoop.stop`:

* *admission* takes prompts from the source while the buffer has room and starts one *rollout* per prompt;
* a *rollout* generates and scores the episodes of its prompt and gives the group to the buffer, which decides its fate;
* a *follower* per version waits until it is committed and every replica is on it, compares digests, and opens admission
  further.

The train loop itself is the caller's: each call of :meth:`AsyncLoop.next_step` is one step. Between two of them it may
:meth:`~AsyncLoop.pause`: nothing new is admitted then, what runs is finished and waits in the buffer.

In ``policy.update.mode: blocking`` the train loop *holds* the replicas once it has a batch. No event leaves them held:
a hold names the trainer's version, and the swap to a newer one ends it in the engine itself; a step that was skipped
publishes none, so it is followed by a release. Nothing between a hold and its end needs a new group, since the step has
its batch; and what runs when the hold comes is finished on the old weights, within its rollout's time.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import numpy as np

from forge_async.buffer.ages import ages, kv_versions
from forge_async.buffer.buffer import EQUAL_REWARDS, RolloutBuffer
from forge_async.config import Config
from forge_async.errors import ForgeError, RunFailed
from forge_async.journal import Journal, request_seed
from forge_async.mesh.actor import ActorHandle
from forge_async.mesh.errors import ReplicaDied, ServiceGaveUp
from forge_async.mesh.service import Service
from forge_async.policy.config import SamplingConfig
from forge_async.rollout.datasets import PromptSource
from forge_async.rollout.environment import Environment
from forge_async.rollout.reward_worker import RewardPool
from forge_async.rollout.rollout import Limits, rollout_group
from forge_async.steps import Step, Tally, batch_sequences
from forge_async.types import Completion, Episode, Group, Prompt, StepStats

T = TypeVar("T")
Record = Callable[..., None]
"""``record(kind, **fields)``: one line of the event log."""


class AsyncLoop:
    """Runs the tasks of one run over meshes that are already up and in sync.

    Args:
        config: the run's config.
        policy: service of ``PolicyActor`` replicas, all on version ``version``.
        trainer: mesh of ``TrainerActor``.
        record: writes an event.
        version: the policy version at the start.
        journal: takes what a replay needs.
    """

    def __init__(
        self,
        config: Config,
        policy: Service,
        trainer: ActorHandle,
        buffer: RolloutBuffer,
        source: PromptSource,
        environment: Environment,
        rewards: RewardPool,
        record: Record,
        version: int = 0,
        journal: Journal | None = None,
    ) -> None:
        self.config = config
        """Read anew for every prompt, request and step: what is replaced between two steps counts from then on."""
        self.policy, self.trainer = policy, trainer
        self.buffer, self.source, self.environment, self.rewards = buffer, source, environment, rewards
        self.record, self.version, self.journal = record, version, journal or Journal()
        self.tally = Tally()
        self.steps_done = 0
        """Batches trained by this loop, skipped ones included."""
        self.ended_early: str | None = None
        """Why there will be no further step, once the dataset has ended."""
        self.waiting = False
        """:meth:`next_step` waits for a batch: it may be cancelled, and nothing is lost."""
        self._last = 0.0
        """When the previous step ended, or the pause after it."""
        self._admission: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._followers: set[asyncio.Task[None]] = set()
        self.held_at: int | None = None
        """The trainer's version at the last hold that was not released; void once a newer one is live."""
        self._stopping = False
        self._failed: asyncio.Future[ForgeError] = asyncio.get_running_loop().create_future()
        self._requests: Counter[str] = Counter()
        """Sent so far, by episode of an open prompt."""
        buffer.on_drop = self._dropped
        # Requests beyond what the engines decode at once wait here, where the next free replica can still be chosen.
        self.seats = asyncio.Semaphore(config.policy.num_replicas * config.policy.max_num_seqs)

    async def next_step(self) -> Step | None:
        """One optimizer step; None when the dataset has ended.

        Consumes a batch from the buffer, which waits for ``groups_per_step`` finished groups within the staleness
        bound; returns when it is trained and its weights are handed over to be published. Admission and rollouts go on
        until :meth:`pause`. Cancel it only while it is :attr:`waiting`, or to end the run.

        Raises:
            RunFailed: the trainer died or raised, a digest differed, no policy replica is left, no rollout succeeds, or
                the dataset ended before anything was trained.
        """
        began = time.monotonic()
        if self._admission is None:
            self._admission, self._last = self._start(self._admit()), began
        if self.buffer.paused:
            self._last = began
            self.buffer.resume()
        self.waiting = True
        try:
            batch = await self._batch()
        finally:
            self.waiting = False
        if batch is not None:
            self.steps_done += 1
            step = await self._train(self.steps_done, batch, time.monotonic() - began, self._last)
            self._last = time.monotonic()
            return step
        await self.settle()
        if self.ended_early is None:
            self.ended_early = f"{self.buffer.ended} after {self.steps_done} steps"
            self.record("dataset_ended", steps=self.steps_done, reason=self.buffer.ended)
        if self.version == 0:
            raise RunFailed(f"nothing was trained: {self.buffer.ended}; prompts: {self.buffer.ledger.summary()}.")
        return None

    async def _batch(self) -> list[Group] | None:
        async with aclosing(self.buffer.batches(lambda: self.version)) as batches:  # type: ignore[type-var]
            async for batch in batches:
                return batch
        return None

    async def pause(self) -> None:
        """Admit nothing until the next step; returns when the last version is live in every replica."""
        self.buffer.pause()
        await self.settle()

    async def settle(self) -> None:
        """Wait until what was published is live in every replica; raises what :meth:`fail` was given."""
        while self._followers and not self._failed.done():
            either: set[asyncio.Future[Any]] = {*self._followers, self._failed}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            raise self._failed.result()

    @property
    def failure(self) -> ForgeError | None:
        """What :meth:`fail` was given first."""
        return self._failed.result() if self._failed.done() else None

    def fail(self, error: ForgeError) -> None:
        """End the loop with ``error``, whatever it waits for; the first error given stays."""
        self.buffer.fail(error)
        if not self._failed.done():
            self._failed.set_result(error)

    async def _admit(self) -> None:
        """Start one rollout per admitted prompt; waits for room in the buffer, ends with the source."""
        while (prompt := await self.buffer.admit(self.source)) is not None:
            kept = self.buffer.kept(prompt.prompt_id)
            self.journal.admitted(prompt.prompt_id, kept)
            self._start(self._rollout(prompt, kept))

    async def _rollout(self, prompt: Prompt, kept: Sequence[Episode]) -> None:
        """Turn one prompt into a group for the buffer. Never raises for the rollout's own faults: they are its fate."""
        settings = self.config.rollout
        group = await rollout_group(
            prompt,
            self._generate,
            self.environment,
            self.rewards,
            n=settings.group_size,
            sampling=self.config.policy.sampling,
            timeout_s=settings.timeout_s,
            truncated=settings.truncated,
            on_failure=self._episode_failed,
            kept=kept,
            limits=Limits(settings.max_turns, self.config.policy.max_model_len),
            environment_weight=self.config.reward.environment_weight,
        )
        self.buffer.finish(group)

    def _dropped(self, prompt_id: str, reason: str) -> None:
        self._forget(prompt_id)
        self.record("dropped", prompt=prompt_id, reason=reason)

    def _forget(self, prompt_id: str) -> None:
        """Of a prompt that is no longer open."""
        for index in range(self.config.rollout.group_size):
            self._requests.pop(f"{prompt_id}.{index}", None)

    def _episode_failed(self, episode_id: str, reason: str, message: str) -> None:
        self.tally.failed_episodes[reason] += 1
        self.journal.failed(episode_id, reason, message)
        self.record("episode_failed", episode=episode_id, reason=reason, message=message)

    async def _generate(
        self, prompt_token_ids: np.ndarray, sampling: SamplingConfig, session: str, episode_id: str
    ) -> Completion:
        """One completion; sent again when its replica dies, within its rollout's time. Cancelled, it is aborted.

        Its draws depend on the run's seed, the prompt, the number of the episode and that of the request alone.
        """
        request_id = ""
        try:
            while True:
                request_id = f"{episode_id}~{self._requests[episode_id]}"
                self._requests[episode_id] += 1
                self.journal.asked(request_id)
                seed = request_seed(self.config.seed, request_id)
                try:
                    async with self.seats:
                        completion: Completion = await self.policy.call(
                            "generate", prompt_token_ids, sampling, request_id, seed, session=session
                        )
                    self.journal.completed(request_id, completion)
                    return completion
                except ReplicaDied as error:
                    self.tally.requeued += 1
                    self.record("requeued", session=session, cause=str(error))
                except ServiceGaveUp as error:  # or every prompt to come would be dropped as failed
                    raise RunFailed(f"no policy replica is left: {error}") from error
        except asyncio.CancelledError:
            if not self._stopping:  # the engine goes on with a request whose caller has left
                self._start(self._abort(request_id))
            raise

    async def _abort(self, request_id: str) -> None:
        await self.policy.fan_out("abort", request_id, timeout=30.0)

    async def _train(self, index: int, batch: list[Group], wait_s: float, last: float) -> Step:
        sequences = batch_sequences(self.config, batch)
        # All episodes may be masked: then there is no sequence, and the trainer skips the step.
        # A token without a finite log-prob is not trained either.
        versions = [s.policy_versions[s.loss_mask & np.isfinite(s.logprobs)] for s in sequences]
        staleness = ages(self.version, versions)
        kv_staleness = ages(self.version, kv_versions(batch, self.config.rollout.truncated))
        if staleness.max > self.config.buffer.token_bound:
            raise RunFailed(
                f"a token of staleness {staleness.max} was about to be trained at version {self.version}, the bound is "
                f"{self.config.buffer.token_bound}: a defect of the buffer's gate."
            )
        self.journal.batch(index, batch, sequences)
        if self.config.policy.update.rules.holds:
            await self._hold()
        stats: StepStats = (await self._trainer("step", sequences))[0]
        self.journal.trained(index, stats)
        publish_s = 0.0
        self.buffer.trained(batch, stats.version)
        for group in batch:
            self._forget(group.prompt.prompt_id)
        self.version = stats.version
        if stats.skipped:
            self.record("step_skipped", step=index, reason="no token had a loss")
            await self._release()
        else:
            await self.journal.before_publish(stats.version)
            began = time.monotonic()
            await self._trainer("publish")  # the weights are handed over; the next step runs beside the rest
            publish_s = time.monotonic() - began
            follower = self._start(self._announce(self.version))
            self._followers.add(follower)
            follower.add_done_callback(self._followers.discard)
            self.tally.trained_tokens += int(stats.trained_tokens)
            self.tally.tokens_without_version += sum(int((own < 0).sum()) for own in versions)
            self.tally.max_staleness = max(self.tally.max_staleness, staleness.max)
            self.tally.max_kv_staleness = max(self.tally.max_kv_staleness, kv_staleness.max)
            self.tally.staleness_histogram.update(dict(enumerate(staleness.histogram)))
        episodes = [episode for group in batch for episode in group.episodes]
        parts = sorted({name for episode in episodes for name in episode.reward_parts})
        step = Step(
            index=index,
            stats=stats,
            groups=tuple(batch),
            sequences=tuple(sequences),
            reward=float(np.mean([episode.reward for episode in episodes])),
            reward_parts={name: float(np.mean([e.reward_parts.get(name, 0.0) for e in episodes])) for name in parts},
            staleness=staleness,
            kv_staleness=kv_staleness,
            uniform=float(np.mean([np.ptp([e.reward for e in group.episodes]) <= EQUAL_REWARDS for group in batch])),
            completion_length=float(np.mean([sum(len(t.completion.token_ids) for t in e.turns) for e in episodes])),
            truncated=float(np.mean([episode.truncated for episode in episodes])),
            wait_s=wait_s,
            publish_s=publish_s,
            wall_s=time.monotonic() - last,
        )
        if not stats.skipped:
            self.tally.rewards.append(step.reward)
        return step

    async def _announce(self, version: int) -> None:
        """Let the replicas read ``version`` while it is written; wait until it is committed, and until they have it."""
        await self._ask_replicas("follow", version)
        published = (await self._trainer("published", version))[0]
        self.tally.digests[version] = published["digest"]
        self.journal.published(version, published["digest"])
        self.record("published", **published)
        await self._follow(version, published["digest"])

    async def _follow(self, version: int, digest: str) -> None:
        """Wait until every replica is on ``version`` (or a newer one), then let the buffer admit for it."""
        reports = await self._ask_replicas("sync", version)
        for index, report in reports:
            if report["version"] == version:
                self.tally.swaps += 1
                self.tally.swaps_in_flight += report["in_flight"] > 0
                self.tally.digest_mismatches += report["digest"] != digest
                self.record("swapped", replica=index, **report)
                if report["digest"] != digest:
                    raise RunFailed(
                        f"version {version}: replica {index} holds weights with digest {report['digest']}, the trainer "
                        f"published {digest}; training on would correct with wrong ratios."
                    )
        self.buffer.advance(version)

    async def _hold(self) -> None:
        """Return when no replica generates: what runs has ended, and nothing starts before the next version is live."""
        self.held_at = self.version
        await self._unless_failed(self._ask_replicas("hold", self.version))

    async def _release(self) -> None:
        """End a hold whose step made no version."""
        if self.held_at is not None:
            self.held_at = None
            await self._unless_failed(self._ask_replicas("release"))

    async def _ask_replicas(self, endpoint: str, *args: object) -> list[tuple[int, Any]]:
        """Call every replica; (index, answer) of those that live. One that does not answer in time is replaced."""
        reports = await self.policy.fan_out(endpoint, *args, timeout=self.config.policy.update.timeout_s)
        answers = []
        for index, report in enumerate(reports):
            if isinstance(report, TimeoutError):
                self.record("replica_hung", replica=index, cause=str(report))
                try:
                    await self.policy.replace(index)
                except ForgeError as error:  # the others go on; the next call says so if there are none
                    self.record("replica_lost", replica=index, cause=str(error))
            elif report is None or isinstance(report, ReplicaDied):
                continue  # its successor starts from the newest version, and held if the others are
            elif isinstance(report, BaseException):
                raise report
            else:
                answers.append((index, report))
        return answers

    async def _trainer(self, endpoint: str, *args: object) -> list:
        """Call every trainer rank; a dead or failing trainer ends the run, and so does :meth:`fail` meanwhile."""

        async def call() -> list:
            try:
                return await self.trainer.call(endpoint, *args)
            except ForgeError as error:
                raise RunFailed(f"the trainer failed in {endpoint!r} at version {self.version}: {error}") from error

        return await self._unless_failed(call())

    async def _unless_failed(self, work: Awaitable[T]) -> T:
        """The result of ``work``; when :meth:`fail` comes first, ``work`` is cancelled and that error raised."""
        call = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {call, self._failed}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise self._failed.result()
            return call.result()
        finally:
            call.cancel()  # nothing to a call that is done

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            failure = error if isinstance(error, ForgeError) else RunFailed(f"a task of the loop failed: {error!r}")
            failure.__cause__ = failure.__cause__ or (error if failure is not error else None)
            self.fail(failure)

    async def stop(self) -> None:
        """Cancel and await all tasks, and drop the open prompts. Safe to call again."""
        self._stopping = True
        self.buffer.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
