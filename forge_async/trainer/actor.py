"""The trainer's actor: one rank's engine behind endpoints, and publishing to the weight store."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from monarch.actor import concurrent_endpoint

from forge_async.errors import ForgeError, RunFailed
from forge_async.mesh import ForgeActor
from forge_async.observability.clocks import BusyClock
from forge_async.observability.spans import SpanRing
from forge_async.store import FullTensor, TensorShard, WeightStore
from forge_async.trainer.config import TrainerConfig
from forge_async.types import StepStats, TrainingSequence

if TYPE_CHECKING:
    from forge_async.trainer.engine import TrainerEngine

Result = TypeVar("Result")


class TrainerActor(ForgeActor):
    """One rank of the trainer. Spawn on ``config.procs`` processes, call ``setup`` once, then the other endpoints.

    Every endpoint but ``status`` is collective: call it on all ranks with the same arguments. They run one after
    another, in a thread of their own, so that ``status`` answers at any time. Only publishing goes on beside them:
    ranks meet in the store for it, and no collective of theirs can get between those of a step.

    Args:
        config: the trainer's settings.
        model_path: Hugging Face folder that training starts from.
        store: where ``publish`` writes to; without one it is refused.
        total_steps: length of the run, for learning rate decay.
        seed: seeds torch.
    """

    def __init__(
        self,
        config: TrainerConfig,
        model_path: str | Path,
        store: WeightStore | None = None,
        total_steps: int = 1,
        seed: int = 0,
    ) -> None:
        self.config, self.model_path, self.store = config, str(model_path), store
        self.total_steps, self.seed = total_steps, seed
        self._engine: TrainerEngine | None = None
        self._lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        self._clock = BusyClock()
        self._spans = SpanRing()
        self._rank = int(os.environ["RANK"]) if config.procs > 1 else 0
        self._trained_tokens = 0
        self._publications: dict[int, asyncio.Task[dict[str, Any]]] = {}
        """By version, until :meth:`published` was asked for it."""
        self._newest: asyncio.Task[dict[str, Any]] | None = None
        self._copied: list[threading.Event] = []
        """Of publications that may still read the parameters."""
        self._publish_blocked_s = 0.0

    @concurrent_endpoint
    async def setup(self) -> dict[str, float]:
        """Import torchtitan, build the model and load its weights; returns ``{"build_s": seconds}``."""

        def build() -> TrainerEngine:
            from forge_async.trainer.engine import TrainerEngine

            engine = TrainerEngine(self.config, self.model_path, self.total_steps, self.seed)
            engine.before_update = self._until_copied
            engine.phases.note = lambda name, start, end: self._spans.note("step", name, start, end)
            return engine

        started = time.monotonic()
        async with self._lock:
            if self._engine is not None:
                raise ForgeError("setup was called before on this trainer")
            self._engine = await asyncio.get_running_loop().run_in_executor(self._thread, build)
        self._clock.start()
        return {"build_s": time.monotonic() - started}

    @concurrent_endpoint
    async def step(self, sequences: list[TrainingSequence]) -> StepStats:
        """One GRPO step; see ``TrainerEngine.step``."""
        stats = await self._run(lambda engine: engine.step(sequences), "train")
        self._trained_tokens += stats.trained_tokens
        return stats

    @concurrent_endpoint
    async def sft_step(self, sequences: list[TrainingSequence]) -> StepStats:
        """One supervised step; see ``TrainerEngine.sft_step``."""
        stats = await self._run(lambda engine: engine.sft_step(sequences), "train")
        self._trained_tokens += stats.trained_tokens
        return stats

    @concurrent_endpoint
    async def logprobs(self, sequences: list[TrainingSequence]) -> list[np.ndarray]:
        """Log-probs of every token under the current weights; see ``TrainerEngine.logprobs``."""
        return await self._run(lambda engine: engine.logprobs(sequences), "logprobs")

    @concurrent_endpoint
    async def publish(self) -> int:
        """Begin to publish the current weights; returns their version as soon as training may go on.

        Copying, casting and committing run beside the next forward and backward passes; the next optimizer step waits
        until this rank's weights are copied. :meth:`published` tells when the version is committed.
        """
        if self.store is None:
            raise ForgeError("publish: this trainer was spawned without a weight store")
        began = time.monotonic()
        async with self._lock:
            engine = self._ready()
            version = engine.version
            if version in self._publications:
                raise ForgeError(f"publish was called before for version {version}")
            with self._clock.busy(), self._spans.span("main", "publish", True, version=version):
                shards, layout = await self._in_thread(lambda: (engine.hf_shards(), engine.hf_layout))
                copied = threading.Event()
                self._copied.append(copied)
        self._publish_blocked_s += time.monotonic() - began
        task = asyncio.create_task(self._publish(version, self._newest, shards, layout, copied))
        self._publications[version] = self._newest = task
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # published() raises it
        return version

    @concurrent_endpoint
    async def published(self, version: int) -> dict[str, Any]:
        """Wait until ``version``, which :meth:`publish` began, is committed; ask once per version.

        Returns:
            ``version``, ``digest``, ``bytes`` (of the whole version, as published), ``wall_s`` (since ``publish``).
        Raises:
            ForgeError: nothing was committed; with the cause, on every rank.
        """
        if version not in self._publications:
            raise ForgeError(f"version {version} was not published, or was asked for before")
        return await asyncio.shield(self._publications.pop(version))

    async def _publish(
        self,
        version: int,
        former: asyncio.Task[dict[str, Any]] | None,
        shards: Sequence[TensorShard],
        layout: Sequence[FullTensor],
        copied: threading.Event,
    ) -> dict[str, Any]:
        """One version after the other, as each must be newer than the last committed one."""
        assert self.store is not None
        began = time.monotonic()
        try:
            if former is not None:
                await asyncio.wait({former})
                if former.cancelled() or former.exception() is not None:
                    raise ForgeError(f"version {version} is not published, since the one before it failed")
            with self._spans.span("publishing", "publish", version=version):
                committed = await self.store.publish(
                    version, self._ready().rank, self.config.procs, shards, layout, copied
                )
        finally:
            copied.set()
        wall_s = time.monotonic() - began
        return {"version": version, "digest": committed.digest, "bytes": committed.nbytes, "wall_s": wall_s}

    def _until_copied(self) -> None:
        """In the trainer's thread, before parameters change."""
        began = time.monotonic()
        for copied in self._copied:
            copied.wait()
        self._copied.clear()
        self._publish_blocked_s += time.monotonic() - began

    @concurrent_endpoint
    async def save_checkpoint(self, folder: str, extra: dict[str, Any] | None = None) -> None:
        """Write model, optimizer, schedule, version and ``extra`` (JSON) to ``folder``, atomically.

        Waits for the version in publication, so that what is saved is never newer than what readers can have.
        """
        await self._until_published()
        await self._run(lambda engine: engine.save_checkpoint(folder, extra or {}), "checkpoint")

    @concurrent_endpoint
    async def load_checkpoint(self, folder: str) -> dict[str, Any]:
        """Restore a checkpoint of any number of ranks; returns its ``extra``."""
        return await self._run(lambda engine: engine.load_checkpoint(folder), "checkpoint")

    @concurrent_endpoint
    async def set_learning_rate(self, peak: float) -> float:
        """Replace ``optimizer.lr`` between two steps; see ``TrainerEngine.set_learning_rate``."""
        return await self._run(lambda engine: engine.set_learning_rate(peak), "settings")

    @concurrent_endpoint
    async def export_hf(self, folder: str) -> None:
        """Write a folder that transformers and vLLM load, once the version in publication is committed."""
        await self._until_published()
        await self._run(lambda engine: engine.export_hf(folder), "checkpoint")

    @concurrent_endpoint
    async def token_logprobs(self, sequence_ids: list[str]) -> dict[str, np.ndarray]:
        """Of the last step: log-probs of these sequences' tokens before the update; see
        ``TrainerEngine.token_logprobs``. Each rank returns its own."""
        async with self._lock:
            return await self._in_thread(lambda: self._ready().token_logprobs(sequence_ids))

    @concurrent_endpoint
    async def status(self, spans_since: list[int] | None = None) -> dict[str, Any]:
        """``version``, ``busy_s`` and ``idle_s`` since setup, ``trained_tokens``, ``publish_blocked_s`` (seconds that
        training has waited for publishing); with a cursor per rank ``spans``, see ``SpanRing.since``."""
        busy, idle = self._clock.read()
        version = self._engine.version if self._engine is not None else 0
        return {
            "version": version,
            "busy_s": busy,
            "idle_s": idle,
            "trained_tokens": self._trained_tokens,
            "publish_blocked_s": self._publish_blocked_s,
            **({} if spans_since is None else {"spans": self._spans.since(spans_since[self._rank])}),
        }

    async def _until_published(self) -> None:
        if self._newest is not None:
            await asyncio.shield(self._newest)

    def _ready(self) -> TrainerEngine:
        if self._engine is None:
            raise ForgeError("the trainer is not set up: call setup first")
        return self._engine

    async def _run(self, work: Callable[[TrainerEngine], Result], name: str = "other") -> Result:
        async with self._lock:
            engine = self._ready()
            with self._clock.busy(), self._spans.span("main", name, True, version=engine.version):
                return await self._in_thread(lambda: work(engine))

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        """Run in the trainer's thread. A failure of this rank alone must not leave the others waiting in a collective:
        the process group is closed, which fails theirs."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except ForgeError:
            raise  # found out from the arguments, which are the same on every rank
        except Exception as error:
            if self._engine is not None and self._engine.world_size > 1:
                self._engine.close()
                raise RunFailed(f"trainer rank {self._engine.rank} failed, its group was closed: {error!r}") from error
            raise
