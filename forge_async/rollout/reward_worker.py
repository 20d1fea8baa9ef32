"""Reward functions in worker processes, with a time limit: the controller never runs a user's scoring code."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from monarch.actor import concurrent_endpoint

from forge_async.errors import ConfigError, ForgeError, RunFailed
from forge_async.mesh.actor import ForgeActor
from forge_async.mesh.errors import ActorDied
from forge_async.mesh.service import Service
from forge_async.observability.spans import SpanRing
from forge_async.rollout.config import RewardConfig, RewardSpec
from forge_async.rollout.rewards import RewardFailure, RewardFunction, load_functions, score_completion
from forge_async.types import Message, Prompt

logger = logging.getLogger(__name__)

Scores = list[dict[str, float] | RewardFailure]
Conversations = Sequence[Sequence[Message]]


class Scorer(Protocol):
    """What a rollout needs for rewards."""

    @property
    def specs(self) -> tuple[RewardSpec, ...]: ...

    async def score(self, prompt: Prompt, completions: list[str], conversations: Conversations = ()) -> Scores:
        """Values by function name, or a failure, for each completion. Raises RunFailed when scoring is hopeless.

        Args:
            conversations: the messages of each, for functions that take them; none where a completion is all there is.
        """
        ...


def score_all(
    specs: Sequence[RewardSpec],
    functions: Sequence[RewardFunction],
    prompt: Prompt,
    completions: list[str],
    conversations: Conversations,
) -> Scores:
    return [
        score_completion(specs, functions, prompt, text, messages)
        for text, messages in zip(completions, conversations or [()] * len(completions), strict=True)
    ]


class RewardActor(ForgeActor):
    """Runs reward functions in its own process."""

    def __init__(self, config: RewardConfig, folder: str) -> None:
        self.specs = config.specs
        self.folder = folder
        self.functions: list[RewardFunction] = []

    @concurrent_endpoint
    async def load(self) -> tuple[str, object, str, str] | None:
        """Import the functions; the parts of a ConfigError when one is not there (an error is a value here, as a worker
        that fails to start would be replaced again and again)."""
        try:
            self._load()
        except ConfigError as error:
            return (error.key, error.value, error.allowed, error.remedy)
        return None

    @concurrent_endpoint
    async def score(self, prompt: Prompt, completions: list[str], conversations: Conversations = ()) -> Scores:
        """In a thread, so that the actor answers while a slow function runs."""

        def work() -> Scores:
            self._load()
            return score_all(self.specs, self.functions, prompt, completions, conversations)

        return await asyncio.to_thread(work)

    def _load(self) -> None:
        self.functions = self.functions or load_functions(self.specs, self.folder)


class _FailureCount:
    """Ends a run whose rewards never work, and tells a person about the first failures."""

    def __init__(self, config: RewardConfig) -> None:
        self.limit = config.max_initial_failures
        self.scored = 0
        self.failed: Counter[str] = Counter()

    def record(self, scores: Scores) -> None:
        for score in scores:
            if not isinstance(score, RewardFailure):
                self.scored += 1
                continue
            self.failed[score.reason] += 1
            count = self.failed.total()
            if count & (count - 1) == 0:  # 1, 2, 4, 8, ...: loud at first, never a flood
                logger.warning("%s (%d such failures so far)", score.message, count)
            if self.scored == 0 and count >= self.limit:
                raise RunFailed(f"none of the first {count} episodes could be scored. The last one: {score.message}")


class RewardPool:
    """Workers that score one request each at a time; a worker that exceeds the time limit is killed and replaced.

    Made by :meth:`create` inside a ``MeshRuntime``.
    """

    def __init__(self, config: RewardConfig, workers: list[Service]) -> None:
        self.config = config
        self.specs = config.specs
        self.replaced = 0
        """Workers killed because they exceeded the time limit."""
        self.spans = SpanRing()
        """What each worker scored."""
        self._workers = workers
        self._idle: asyncio.Queue[Service] = asyncio.Queue()
        for worker in workers:
            self._idle.put_nowait(worker)
        self._abandoned: set[Service] = set()
        """Workers that may still run the function of a cancelled call."""
        self._lost: list[str] = []
        self._replacing: set[asyncio.Task[None]] = set()
        self._count = _FailureCount(config)

    @property
    def failed(self) -> dict[str, int]:
        """Episodes that could not be scored, by reason."""
        return dict(self._count.failed)

    @classmethod
    async def create(cls, config: RewardConfig, cores: list[int] | None = None) -> RewardPool:
        """Spawn ``num_workers`` workers on ``cores`` (None: not pinned), none where there is no function. Imports every
        function in each of them.

        Raises:
            ConfigError: a function cannot be imported.
        """
        builder = RewardActor.options(name="reward", num_replicas=1, cores=cores)
        spawned = await asyncio.gather(
            *(builder.as_service(config, os.getcwd()) for _ in range(config.num_workers if config.functions else 0)),
            return_exceptions=True,
        )
        workers = [worker for worker in spawned if isinstance(worker, Service)]
        failures = [worker for worker in spawned if isinstance(worker, BaseException)]
        if not failures:
            loaded = await asyncio.gather(*(worker.call("load") for worker in workers), return_exceptions=True)
            failures = [ConfigError(*parts) for parts in loaded if isinstance(parts, tuple)]
            failures += [error for error in loaded if isinstance(error, BaseException)]
        if failures:
            await asyncio.gather(*(worker.stop() for worker in workers))
            raise failures[0]
        return cls(config, workers)

    @property
    def busy(self) -> int:
        """Workers that score now."""
        return len(self._workers) - len(self._lost) - self._idle.qsize()

    def pids(self) -> list[int]:
        """Of the worker processes."""
        return [pid for worker in self._workers for replica in worker.replicas for pid in replica.pids]

    async def score(self, prompt: Prompt, completions: list[str], conversations: Conversations = ()) -> Scores:
        """Score on an idle worker; waits for one. A worker's death is tried again once, on whichever is idle then.

        The time limit of the whole request is ``timeout_s`` per completion, from when a worker took it.
        """
        if not self.specs:
            return [{} for _ in completions]
        scores = await self._score(prompt, completions, conversations)
        self._count.record(scores)
        return scores

    async def _score(self, prompt: Prompt, completions: list[str], conversations: Conversations) -> Scores:
        names = ", ".join(spec.function for spec in self.specs)
        death = ""
        for _ in range(2):
            worker = await self._take()
            limit = self.config.timeout_s * len(completions)
            broken = True
            try:
                with self.spans.span(f"worker {self._workers.index(worker)}", "reward"):
                    scores: Scores = await worker.call("score", prompt, completions, conversations, timeout=limit)
                broken = False
                return scores
            except TimeoutError:
                message = (
                    f"rewards {names} did not score prompt {prompt.prompt_id} within {limit:g} s (reward.timeout_s)"
                )
                return [RewardFailure("", "timeout", message)] * len(completions)
            except asyncio.CancelledError:
                self._abandoned.add(worker)  # replaced when it is needed again: not at the end of a run
                broken = False
                raise
            except ActorDied as error:
                death = str(error)
                broken = False  # the service respawns it by itself; its next call waits for that
            finally:
                if broken:
                    self._replace(worker)
                else:
                    self._idle.put_nowait(worker)
        message = f"the worker of rewards {names} died twice on prompt {prompt.prompt_id}: {death}"
        return [RewardFailure("", "worker_died", message)] * len(completions)

    async def _take(self) -> Service:
        if len(self._lost) == len(self._workers):
            raise RunFailed(f"no reward worker is left: {self._lost[-1]}")
        while (worker := await self._idle.get()) in self._abandoned:
            self._abandoned.discard(worker)
            self._replace(worker)
        if len(self._lost) == len(self._workers):
            self._idle.put_nowait(worker)  # for the next one that waits
            raise RunFailed(f"no reward worker is left: {self._lost[-1]}")
        return worker

    def _replace(self, worker: Service) -> None:
        self.replaced += 1
        task = asyncio.ensure_future(self._replace_and_return(worker))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace_and_return(self, worker: Service) -> None:
        try:
            await worker.replace(0)
        except ForgeError as error:
            logger.warning("a reward worker could not be replaced: %s", error)
            self._lost.append(str(error))
            if len(self._lost) < len(self._workers):
                return
        self._idle.put_nowait(worker)

    async def stop(self) -> None:
        """End the workers, busy ones too."""
        for task in list(self._replacing):
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self._workers))


class LocalScorer:
    """Scores in a thread of this process, without a time limit: for notebooks, tests and warm-ups."""

    def __init__(self, config: RewardConfig) -> None:
        self.specs = config.specs
        self._functions = load_functions(self.specs)
        self._count = _FailureCount(config)

    async def score(self, prompt: Prompt, completions: list[str], conversations: Conversations = ()) -> Scores:
        def work() -> Scores:
            return score_all(self.specs, self._functions, prompt, completions, conversations)

        scores = await asyncio.to_thread(work)
        self._count.record(scores)
        return scores
