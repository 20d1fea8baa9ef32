"""The policy service's actor: one engine replica, and the follower which brings it each new version of the weights."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from monarch.actor import concurrent_endpoint

from forge_async.errors import ForgeError
from forge_async.mesh import ForgeActor
from forge_async.policy.attestation import DigestMismatchError, attest, attest_parts
from forge_async.policy.config import PolicyConfig, SamplingConfig
from forge_async.policy.turns import TurnLog, TurnSchedule, read_turns
from forge_async.policy.weight_plan import WeightMismatchError
from forge_async.store.digest import tensor_digest
from forge_async.types import Completion

if TYPE_CHECKING:
    import torch

    from forge_async.policy.engine import PolicyEngine
    from forge_async.policy.live_weights import Prepared
    from forge_async.store import Manifest, Pulled, WeightStore

DRAINED = (
    "generated_tokens",
    "prompt_tokens",
    "finished",
    "aborted",
    "swaps",
    "swaps_in_flight",
    "discarded_tokens",
    "recomputed_tokens",
    "busy_s",
    "idle_s",
    "held_s",
    "swap_ms",
)
"""Counters that :meth:`PolicyActor.drain_stats` reports since its last call."""


SHORT_WORK_BYTES = 32 << 20
"""Versions up to this size are prepared in the time of a forward pass or two: no need to yield to those."""

SWITCH_INTERVAL_S = 0.0005
"""How long the engine's thread keeps the interpreter's lock when another thread of the process waits for it."""

AGREED = (WeightMismatchError, DigestMismatchError)
"""Errors of an update that every rank of a replica raises when one has found them."""

T = TypeVar("T")


class PolicyActor(ForgeActor):
    """A vLLM engine in a process of its own. Spawn it, then call ``setup`` once, then the other endpoints.

    With ``config.tensor_parallel_size`` above 1 spawn it on as many processes, and call ``setup`` on all of them.
    Rank 0 takes requests and follows the store for all; ``follow`` and ``sync`` return at once on the others.

    Args:
        config: the engine's settings.
        model_path: HF folder that the engine is built from.
        store: where versions come from; without one there is nothing to follow.
        seed: of the engine's draws, see :meth:`setup`.
        version: what the folder's weights are labelled with.
    """

    def __init__(
        self,
        config: PolicyConfig,
        model_path: str | Path,
        store: WeightStore | None = None,
        seed: int = 0,
        version: int = 0,
    ) -> None:
        self.config, self.model_path, self.store, self.seed = config, str(model_path), store, seed
        self._rank = int(os.environ["RANK"]) if config.tensor_parallel_size > 1 else 0
        self._first_version = version
        self._engine: PolicyEngine | None = None
        self._follower: asyncio.Task[None] | None = None
        self._told = asyncio.Event()
        self._wanted = version
        """The newest version that follow() or sync() named."""
        self._weights_lock = asyncio.Lock()
        """Held while live parameters are written or read back."""
        self._applied = asyncio.Condition()
        self._last_update: dict[str, Any] = {"version": version - 1, "digest": None}
        """What :meth:`sync` reports; the folder's own weights count as older, so that its version is attested too."""
        self._background = ThreadPoolExecutor(1, "weights", lower_priority, (config.update.pull_nice,))
        self._digest_mismatches = 0
        self._swaps: list[tuple[int, bool]] = []
        """Of a replay: the versions still to be swapped in, and whether their layers are to be packed."""
        self._drained: dict[str, Any] = {}

    @concurrent_endpoint
    async def setup(
        self, stream: int | None = None, record: str | None = None, replay: str | None = None
    ) -> dict[str, float]:
        """Build the engine (tens of seconds), prove the weight plan, warm up, and start to follow the store.

        Where the store holds a version already, as for a replica that replaces a dead one, the newest is live when this
        returns.

        Args:
            stream: number of this replica's random stream. None takes the process id (of several processes the port
                they met at), since replicas must not draw the same samples; pass a number, or a seed with each
                request, where draws are to be repeatable.
            record: file that the engine's turns are written to (``turns.py``).
            replay: such a file, whose turns are repeated.
        Returns:
            Seconds per phase: ``build_s``, ``plan_s``, ``warm_up_s``.
        """
        from forge_async.policy.engine import PolicyEngine

        if self._engine is not None:
            raise ForgeError("setup was called before on this replica")
        if stream is None:
            stream = int(os.environ["MASTER_PORT"]) if self.config.tensor_parallel_size > 1 else os.getpid()
        seed = (self.seed * 1_000_003 + stream) % 2**31
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        engine = PolicyEngine(self.config, self.model_path, self._first_version, seed)
        if replay is not None:
            schedule = TurnSchedule(read_turns(Path(replay)))
            self._swaps = schedule.swaps
        if self._rank == 0 and replay is not None:
            engine.use(schedule)  # whoever replays is told of an engine's end, and needs no other engine
        else:
            engine.on_death = _end_process
        if self._rank == 0 and record is not None:
            engine.use(TurnLog(Path(record)))
        self._engine = engine
        if self._rank > 0:
            loop = asyncio.get_running_loop()
            engine.on_announced = lambda version: loop.call_soon_threadsafe(self._want, version)
        seconds = await asyncio.to_thread(engine.start)
        if self.store is not None:
            self._follower = asyncio.create_task(self._follow())
            latest = await self.store.latest()
            if self._rank == 0 and latest is not None and latest >= engine.version:
                await self._until_live(latest)
        return seconds

    @concurrent_endpoint
    async def generate(
        self,
        prompt_token_ids: np.ndarray | list[int],
        sampling: SamplingConfig | None = None,
        request_id: str | None = None,
        seed: int | None = None,
    ) -> Completion:
        """Sample one completion; the arguments are those of :meth:`PolicyEngine.submit`."""
        engine = self._ready()
        if self._rank > 0:
            raise ForgeError(f"generate: called on rank {self._rank} of a replica; rank 0 takes its requests")
        request_id = request_id or uuid.uuid4().hex
        future = engine.submit(prompt_token_ids, sampling, request_id, seed)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            engine.abort(request_id)
            raise

    @concurrent_endpoint
    async def abort(self, request_id: str) -> None:
        """End a request; its ``generate`` returns what there is, with finish reason ``abort``."""
        if self._rank == 0:
            self._ready().abort(request_id)

    @concurrent_endpoint
    async def follow(self, version: int) -> None:
        """Tell that ``version`` is committed, or being published; returns at once.

        It is pulled beside generation, while it is written where the store is on this host, and swapped in once it is
        committed.

        Of several versions told meanwhile only the newest is applied. Raises what ended the follower, if it has ended.
        """
        if self._rank == 0:
            self._tell(version)

    @concurrent_endpoint
    async def sync(self, version: int) -> dict[str, Any]:
        """As :meth:`follow`, but returns when ``version`` (or a newer one) is live.

        Returns:
            ``version``, ``digest`` (of the live parameters, read back and equal to the published one), ``pause_ms``
            (between two forward passes), ``in_flight`` (requests running when the swap came), ``nbytes``, ``pull_s``
            (from the commit until all was prepared), ``attest_s``, ``swap`` and ``layers`` (the ways taken). Empty on
            ranks other than 0, which has them all live when it returns.
        """
        if self._rank > 0:
            return {}
        return await self._until_live(version)

    @concurrent_endpoint
    async def reached(self, version: int) -> None:
        """In a replay: returns once all versions up to ``version`` that this replica has to take are in its hands."""
        async with self._applied:
            await self._applied.wait_for(
                lambda: not self._swaps or self._swaps[0][0] > version or self._follower_error() is not None
            )

    @concurrent_endpoint
    async def hold(self, version: int) -> None:
        """Start no request until a version newer than ``version`` is live; returns when none runs any more.

        Mode blocking calls this when the trainer takes a batch. A swap ends it, and so does :meth:`release`.
        """
        if self._rank == 0:
            await asyncio.wrap_future(self._ready().hold(version))

    @concurrent_endpoint
    async def release(self) -> None:
        """End :meth:`hold` without a new version, as after a skipped step."""
        if self._rank == 0:
            self._ready().release()

    @concurrent_endpoint
    async def status(self, spans_since: int | None = None) -> dict[str, Any]:
        """Version, queue lengths and counters, as of now; with a cursor ``spans``, see ``SpanRing.since``."""
        status = self._ready().status()
        if spans_since is not None:
            status["spans"] = self._ready().spans.since(spans_since)
        follower_error = self._follower_error()
        return status | {
            "digest": self._last_update["digest"],
            "digest_mismatches": self._digest_mismatches,
            "update_failed": None if follower_error is None else str(follower_error),
        }

    @concurrent_endpoint
    async def drain_stats(self) -> dict[str, Any]:
        """The counters of :data:`DRAINED` since the last call of this endpoint."""
        status = self._ready().status()
        since: dict[str, Any] = {"version": status["version"]}
        for name in DRAINED:
            if name == "swap_ms":
                since[name] = status[name][self._drained.get(name, 0) :]
                self._drained[name] = len(status[name])
            else:
                since[name] = status[name] - self._drained.get(name, 0)
                self._drained[name] = status[name]
        return since

    @concurrent_endpoint
    async def weights(self) -> tuple[int, dict[str, str]]:
        """The live version and each HF tensor's digest, read back from the live parameters.

        Raises:
            ForgeError: with tensor parallelism, where no process has whole tensors.
        """
        if self.config.tensor_parallel_size > 1:
            raise ForgeError("weights: the processes of a tensor-parallel replica hold parts of tensors only")
        engine = self._ready()
        async with self._weights_lock:
            return engine.version, await asyncio.to_thread(_live_digests, engine)

    async def __cleanup__(self, exc: Exception | None) -> None:
        """Monarch calls this when the actor stops."""
        if self._follower is not None:
            self._follower.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._follower
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop)
        self._background.shutdown(wait=False)

    # ---- the follower ----

    def _ready(self) -> PolicyEngine:
        if self._engine is None:
            raise ForgeError("this policy replica has no engine yet: call setup first")
        return self._engine

    def _tell(self, version: int) -> None:
        self._ready()
        if self._follower is None:
            raise ForgeError("this policy replica was made without a weight store: there is nothing to follow")
        error = self._follower_error()
        if error is not None:
            raise error
        self._want(version)

    def _want(self, version: int) -> None:
        self._wanted = max(self._wanted, version)
        self._told.set()

    def _follower_error(self) -> ForgeError | None:
        task = self._follower
        if task is None or not task.done() or task.cancelled() or task.exception() is None:
            return None
        cause = task.exception()
        return cause if isinstance(cause, ForgeError) else ForgeError(f"a weight update failed: {cause!r}")

    async def _until_live(self, version: int) -> dict[str, Any]:
        self._tell(version)
        async with self._applied:
            await self._applied.wait_for(
                lambda: self._last_update["version"] >= version or self._follower_error() is not None
            )
        error = self._follower_error()
        if error is not None:
            raise error
        return dict(self._last_update)

    async def _follow(self) -> None:
        """Consumes versions named by follow() and sync(); makes the newest committed one live, one update at a time.

        Waits for the next name; ends by cancellation or by the first failed update, which later calls raise.
        """
        engine = self._ready()
        try:
            while True:
                await self._told.wait()
                self._told.clear()
                while (self._swaps[0][0] if self._swaps else self._last_update["version"] + 1) <= self._wanted:
                    await self._pull_and_swap(engine)
        except BaseException as error:
            if self._rank > 0 and isinstance(error, Exception) and not isinstance(error, AGREED):
                _end_process(error)  # rank 0 would wait for ever for this rank to swap
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self._wake_waiters()))
            raise

    async def _wake_waiters(self) -> None:
        async with self._applied:
            self._applied.notify_all()

    async def _pull_and_swap(self, engine: PolicyEngine) -> None:
        """One update. The lease is held until the swap is done, since the tensors may be views of shared memory."""
        assert self.store is not None
        packs = None
        if self._swaps:
            await self.store.wait_for_newer(self._swaps[0][0] - 1)
            lease = await self.store.acquire(self._swaps[0][0])
            packs = self._swaps.pop(0)[1]
            await self._wake_waiters()
        elif self._rank == 0:
            lease = await self.store.acquire_next(self._wanted)
        else:
            lease = await self.store.acquire(self._wanted)
        began, digests = engine.spans.now(), engine.lockstep is None
        preparing = asyncio.ensure_future(self._beside(lambda: engine.prepare(lease, lease.shapes, digests, packs)))
        try:
            update = await self._swap(engine, lease, preparing, began)
            async with self._applied:
                self._last_update = update
                self._applied.notify_all()
            await self._beside(engine.weights.discard)
        finally:
            await lease.release()  # which ends preparing too, where that still waits for the writer
            await asyncio.gather(preparing, return_exceptions=True)

    async def _swap(
        self, engine: PolicyEngine, lease: Pulled, preparing: asyncio.Future[Prepared], began: float
    ) -> dict[str, Any]:
        """Attest and swap a version, which is being prepared since ``began``, once it is committed.

        A flip is attested before it is made: where that fails, the old weights stay live. A copy can be attested only
        when the old weights are gone: the published tensors are checked before, and the engine ends if that fails.
        """
        weights, prepared = engine.weights, None
        manifest = await lease.committed()
        committed = time.perf_counter()
        if self._rank == 0:
            engine.announce(lease.version)

        def check_before() -> None:
            if weights.flips:
                self._attest(engine, manifest, lease, prepared)
            else:
                held = ((name, tensor.dtype, tensor_digest(tensor)) for name, tensor in lease.items())
                attest(manifest.version, manifest.digests, lease, held, weights.plan.aliases)

        async with self._agreeing(engine):  # then no rank will wait for another between two forward passes
            prepared = await preparing
            pulled = time.perf_counter()
            engine.spans.note("weights", "pull", began, pulled, version=lease.version)
            await self._beside(check_before)
        assert prepared is not None
        attested = time.perf_counter()
        engine.spans.note("weights", "attest", pulled, attested, version=lease.version)
        async with self._weights_lock:
            report = await asyncio.wrap_future(engine.swap(manifest.version, prepared))
            swapped = time.perf_counter()
            try:
                async with self._agreeing(engine):
                    if weights.flips:
                        weights.check_live(prepared)
                    else:
                        await self._beside(lambda: self._attest(engine, manifest, lease))
            except ForgeError as error:
                await asyncio.to_thread(engine.condemn, error)
                raise
        return {
            "version": report.version,
            "digest": manifest.digest,
            "pause_ms": report.pause_ms,
            "in_flight": report.in_flight,
            "nbytes": report.nbytes,
            "pull_s": pulled - committed,
            "attest_s": attested - pulled + time.perf_counter() - swapped,
            "swap": "flip" if weights.flips else "copy",
            "layers": "packed" if prepared.packs else "live",
        }

    @contextlib.asynccontextmanager
    async def _agreeing(self, engine: PolicyEngine) -> AsyncIterator[None]:
        """Weights that do not fit, or differ, are raised; with several ranks on all what any has found. Collective."""
        own: ForgeError | None = None
        try:
            yield
        except AGREED as error:
            own = error
            self._digest_mismatches += isinstance(error, DigestMismatchError)
        outcomes = [own]
        if engine.lockstep is not None:
            outcomes = await asyncio.to_thread(engine.lockstep.gather, own)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def _beside(self, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread, beside generation; with a low priority where it is long."""
        long = self._ready().weights.plan.nbytes > SHORT_WORK_BYTES
        return await asyncio.get_running_loop().run_in_executor(self._background if long else None, work)

    def _attest(
        self,
        engine: PolicyEngine,
        manifest: Manifest,
        published: Mapping[str, torch.Tensor],
        prepared: Prepared | None = None,
    ) -> None:
        """Compare what the engine holds (``prepared`` or, if None, live) with what was published.

        A rank of several has no whole tensors, which could be digested: their parts are compared.

        Raises:
            DigestMismatchError: naming the first tensor that differs.
        """
        weights = engine.weights
        if engine.lockstep is None:
            attest(manifest.version, manifest.digests, published, weights.digests(prepared), weights.plan.aliases)
        else:
            attest_parts(manifest.version, self._rank, weights.compare(published, prepared))


def lower_priority(nice: int) -> None:
    """Of the calling thread alone, for good; only Linux has threads of their own priority."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + nice, 19))


def _end_process(error: BaseException) -> None:
    """A replica without an engine must not get requests: its process ends, and the service respawns it."""
    traceback.print_exception(error)
    print(f"policy replica {os.getpid()}: its engine died: {error!r}", file=sys.stderr, flush=True)
    os._exit(70)


def _live_digests(engine: PolicyEngine) -> dict[str, str]:
    return {name: tensor_digest(tensor) for name, tensor in engine.weights.tensors()}
