"""The trainer's actor: one rank's engine behind endpoints, and publishing to the weight store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from monarch.actor import concurrent_endpoint

from forge_async.errors import ForgeError, RunFailed
from forge_async.mesh import ForgeActor
from forge_async.observability.clocks import BusyClock
from forge_async.store import TensorShard, WeightStore
from forge_async.trainer.config import TrainerConfig
from forge_async.types import StepStats, TrainingSequence

if TYPE_CHECKING:
    from forge_async.trainer.engine import TrainerEngine

Result = TypeVar("Result")


class TrainerActor(ForgeActor):
    """One rank of the trainer. Spawn on ``config.procs`` processes, call ``setup`` once, then the other endpoints.

    Every endpoint but ``status`` is collective: call it on all ranks with the same arguments. They run one after
    another, in a thread of their own, so that ``status`` answers at any time.

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
        self._trained_tokens = 0

    @concurrent_endpoint
    async def setup(self) -> dict[str, float]:
        """Import torchtitan, build the model and load its weights; returns ``{"build_s": seconds}``."""

        def build() -> TrainerEngine:
            from forge_async.trainer.engine import TrainerEngine

            return TrainerEngine(self.config, self.model_path, self.total_steps, self.seed)

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
        stats = await self._run(lambda engine: engine.step(sequences))
        self._trained_tokens += stats.trained_tokens
        return stats

    @concurrent_endpoint
    async def sft_step(self, sequences: list[TrainingSequence]) -> StepStats:
        """One supervised step; see ``TrainerEngine.sft_step``."""
        stats = await self._run(lambda engine: engine.sft_step(sequences))
        self._trained_tokens += stats.trained_tokens
        return stats

    @concurrent_endpoint
    async def logprobs(self, sequences: list[TrainingSequence]) -> list[np.ndarray]:
        """Log-probs of every token under the current weights; see ``TrainerEngine.logprobs``."""
        return await self._run(lambda engine: engine.logprobs(sequences))

    @concurrent_endpoint
    async def publish(self) -> dict[str, Any]:
        """Write the current weights to the store and commit them as the current version.

        Every rank writes its part; when all are done, rank 0 commits, and the version is visible as a whole. If a rank
        fails, nothing is committed and every rank raises.

        Returns:
            ``version``, ``digest`` (rank 0; None elsewhere), ``bytes`` of this rank's part, ``wall_s``.
        """
        if self.store is None:
            raise ForgeError("publish: this trainer was spawned without a weight store")
        started = time.monotonic()
        async with self._lock:
            engine = self._ready()
            with self._clock.busy():
                shards = [
                    TensorShard(shard.name, shard.tensor, shard.global_shape, shard.offsets)
                    for shard in await self._in_thread(lambda: engine.hf_shards())
                ]
                part, failure = None, None
                try:
                    part = await self.store.put_part(engine.version, engine.rank, shards)
                except Exception as error:  # told to the other ranks, which wait in the gather below
                    failure = f"rank {engine.rank}: {error!r}"
                outcomes = await self._in_thread(lambda: engine.gather((part, failure)))
                failures = [message for _, message in outcomes if message]
                if failures:
                    raise ForgeError(f"publishing version {engine.version} failed: {'; '.join(failures)}")
                digest = None
                if engine.rank == 0:
                    manifest = await self.store.commit(engine.version, [item for item, _ in outcomes])
                    digest = manifest.digest
        nbytes = sum(shard.tensor.nbytes for shard in shards)
        return {"version": engine.version, "digest": digest, "bytes": nbytes, "wall_s": time.monotonic() - started}

    @concurrent_endpoint
    async def save_checkpoint(self, folder: str, extra: dict[str, Any] | None = None) -> None:
        """Write model, optimizer, schedule, version and ``extra`` (JSON) to ``folder``, atomically."""
        await self._run(lambda engine: engine.save_checkpoint(folder, extra or {}))

    @concurrent_endpoint
    async def load_checkpoint(self, folder: str) -> dict[str, Any]:
        """Restore a checkpoint of any number of ranks; returns its ``extra``."""
        return await self._run(lambda engine: engine.load_checkpoint(folder))

    @concurrent_endpoint
    async def export_hf(self, folder: str) -> None:
        """Write a folder that transformers and vLLM load."""
        await self._run(lambda engine: engine.export_hf(folder))

    @concurrent_endpoint
    async def status(self) -> dict[str, Any]:
        """``version``, ``busy_s`` and ``idle_s`` since setup, ``trained_tokens``."""
        busy, idle = self._clock.read()
        version = self._engine.version if self._engine is not None else 0
        return {"version": version, "busy_s": busy, "idle_s": idle, "trained_tokens": self._trained_tokens}

    def _ready(self) -> TrainerEngine:
        if self._engine is None:
            raise ForgeError("the trainer is not set up: call setup first")
        return self._engine

    async def _run(self, work: Callable[[TrainerEngine], Result]) -> Result:
        async with self._lock:
            engine = self._ready()
            with self._clock.busy():
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
