"""How a replica follows the store: each new version is pulled and prepared beside generation, attested, swapped in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from forge_async.errors import ForgeError
from forge_async.mesh.processes import stand_back
from forge_async.policy.attestation import DigestMismatchError, attest, attest_parts
from forge_async.policy.weight_plan import WeightMismatchError
from forge_async.store.digest import tensor_digest
from forge_async.store.errors import LeaseExpired, Superseded

if TYPE_CHECKING:
    import torch

    from forge_async.policy.engine import PolicyEngine
    from forge_async.policy.live_weights import Prepared
    from forge_async.store import Manifest, Pulled, WeightStore

logger = logging.getLogger(__name__)

SHORT_WORK_BYTES = 32 << 20
"""Versions up to this size are prepared in the time of a forward pass or two: no need to yield to those."""

AGREED = (WeightMismatchError, DigestMismatchError)
"""Errors of an update that every rank of a replica raises when one has found them."""

T = TypeVar("T")


class Follower:
    """Brings an engine the versions that it is told of, one update at a time; of several only the newest.

    Args:
        engine: which is started after this is made, and before :meth:`start`.
        store: where versions come from.
        rank: of this process in its replica. The others take the versions that rank 0 announces.
        swaps: of a replay: the versions to be swapped in, and whether their layers are to be packed.
    """

    def __init__(
        self, engine: PolicyEngine, store: WeightStore, rank: int = 0, swaps: list[tuple[int, bool]] | None = None
    ) -> None:
        self.engine, self.store, self.rank = engine, store, rank
        self.weights_lock = asyncio.Lock()
        """Held while live parameters are written or read back."""
        self._swaps, self._repeats = swaps or [], swaps is not None
        self._task: asyncio.Task[None] | None = None
        self._told = asyncio.Event()
        self._wanted = engine.version
        """The newest version that was named."""
        self._applied = asyncio.Condition()
        self._last_update: dict[str, Any] = {"version": engine.version - 1, "digest": None}
        """What :meth:`until_live` reports; the folder's own weights count as older, so that they are attested too."""
        nice = engine.config.update.pull_nice
        self._background = ThreadPoolExecutor(1, "weights", stand_back, (nice,))
        self._digest_mismatches = 0

    async def start(self) -> None:
        """Begin; returns when the newest version of a store that holds one is live."""
        self._task = asyncio.create_task(self._follow())
        latest = await self.store.latest()
        if self.rank == 0 and latest is not None and latest >= self.engine.version:
            await self.until_live(latest)

    async def stop(self) -> None:
        """End at once; an update that has begun is left."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._task
        self._background.shutdown(wait=False)

    def status(self) -> dict[str, Any]:
        """Digest of the live weights, mismatches so far, and what has ended the follower, if anything."""
        error = self._error()
        return {
            "digest": self._last_update["digest"],
            "digest_mismatches": self._digest_mismatches,
            "update_failed": None if error is None else str(error),
        }

    def tell(self, version: int) -> None:
        """``version`` is committed, or being published. Raises what ended the follower, if it has ended."""
        error = self._error()
        if error is not None:
            raise error
        self.want(version)

    def want(self, version: int) -> None:
        """As :meth:`tell`, of ranks that another one leads: what has ended the follower is not raised."""
        self._wanted = max(self._wanted, version)
        self._told.set()

    def _error(self) -> ForgeError | None:
        task = self._task
        if task is None or not task.done() or task.cancelled() or task.exception() is None:
            return None
        cause = task.exception()
        return cause if isinstance(cause, ForgeError) else ForgeError(f"a weight update failed: {cause!r}")

    async def reached(self, version: int) -> None:
        """In a replay: returns once all versions up to ``version`` that are to be swapped in have been taken."""
        async with self._applied:
            await self._applied.wait_for(
                lambda: not self._swaps or self._swaps[0][0] > version or self._error() is not None
            )

    async def until_live(self, version: int) -> dict[str, Any]:
        """:meth:`tell`, and wait until ``version`` or a newer one is live; returns the report of the last update."""
        self.tell(version)
        async with self._applied:
            await self._applied.wait_for(lambda: self._last_update["version"] >= version or self._error() is not None)
        error = self._error()
        if error is not None:
            raise error
        return dict(self._last_update)

    async def _follow(self) -> None:
        """Consumes the versions that were named; makes the newest committed one live, one update at a time.

        Waits for the next name; ends by cancellation or by the first failed update, which later calls raise. A lease
        that has expired, as where this process was paused for long, is no failure, nor is a version that is begun anew,
        as by the successor of a trainer that was killed: what is live is attested, and what was torn is pulled anew.
        """
        try:
            while True:
                await self._told.wait()
                self._told.clear()
                while (self._swaps[0][0] if self._swaps else self._last_update["version"] + 1) <= self._wanted:
                    try:
                        await self._pull_and_swap()
                    except (LeaseExpired, Superseded) as void:
                        if self.engine.lockstep is not None or self._repeats:  # others rely on this very attempt
                            raise
                        logger.warning("%s", void)
        except BaseException as error:
            self._digest_mismatches += isinstance(error, DigestMismatchError)
            if self.rank > 0 and isinstance(error, Exception) and not isinstance(error, AGREED):
                assert self.engine.on_death is not None
                self.engine.on_death(error)  # rank 0 would wait for ever for this rank to swap
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self._wake_waiters()))
            raise

    async def _wake_waiters(self) -> None:
        async with self._applied:
            self._applied.notify_all()

    async def _pull_and_swap(self) -> None:
        """One update. The lease is held until the swap is done, since the tensors may be views of shared memory."""
        packs = None
        if self._swaps:
            await self.store.wait_for_newer(self._swaps[0][0] - 1)
            lease = await self.store.acquire(self._swaps[0][0])
            packs = self._swaps.pop(0)[1]
            await self._wake_waiters()
        elif self.rank == 0:
            lease = await self.store.acquire_next(self._wanted)
        else:
            lease = await self.store.acquire(self._wanted)
        began, digests = self.engine.spans.now(), self.engine.lockstep is None
        preparing = asyncio.ensure_future(
            self._beside(lambda: self.engine.prepare(lease, lease.shapes, digests, packs))
        )
        try:
            update = await self._swap(lease, preparing, began)
            async with self._applied:
                self._last_update = update
                self._applied.notify_all()
            await self._beside(self.engine.weights.discard)
        finally:
            try:
                await lease.release()  # which ends preparing too, where that still waits for the writer
            finally:  # the next version is prepared in the same places
                await asyncio.gather(preparing, return_exceptions=True)

    async def _swap(self, lease: Pulled, preparing: asyncio.Future[Prepared], began: float) -> dict[str, Any]:
        """Attest and swap a version, which is being prepared since ``began``, once it is committed.

        A flip is attested before it is made: where that fails, the old weights stay live. A copy can be attested only
        when the old weights are gone: the published tensors are checked before, and the engine ends if that fails.
        """
        weights, prepared = self.engine.weights, None
        manifest = await lease.committed()
        committed = time.perf_counter()
        if self.rank == 0:
            self.engine.announce(lease.version)

        def check_before() -> None:
            if weights.flips:
                self._attest(manifest, lease, prepared)
            else:
                held = ((name, tensor.dtype, tensor_digest(tensor)) for name, tensor in lease.items())
                attest(manifest.version, manifest.digests, lease, held, weights.plan.aliases)

        async with self._agreeing():  # then no rank will wait for another between two forward passes
            prepared = await preparing
            pulled = time.perf_counter()
            self.engine.spans.note("weights", "pull", began, pulled, version=lease.version)
            if prepared.digests and all(map(lease.lies_whole, lease)):  # what is left takes less than a thread's start
                check_before()
            else:
                await self._beside(check_before)
        assert prepared is not None
        attested = time.perf_counter()
        self.engine.spans.note("weights", "attest", pulled, attested, version=lease.version)
        async with self.weights_lock:
            report = await asyncio.wrap_future(self.engine.swap(manifest.version, prepared))
            swapped = time.perf_counter()
            try:
                async with self._agreeing():
                    if weights.flips:
                        weights.check_live(prepared)
                    else:
                        await self._beside(lambda: self._attest(manifest, lease))
            except ForgeError as error:
                await asyncio.to_thread(self.engine.condemn, error)
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
    async def _agreeing(self) -> AsyncIterator[None]:
        """Weights that do not fit, or differ, are raised; with several ranks on all what any has found. Collective."""
        own: ForgeError | None = None
        try:
            yield
        except AGREED as error:
            own = error
        outcomes = [own]
        if self.engine.lockstep is not None:
            outcomes = await asyncio.to_thread(self.engine.lockstep.gather, own)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def _beside(self, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread, beside generation; with a low priority where it is long."""
        long = self.engine.weights.plan.nbytes > SHORT_WORK_BYTES
        return await asyncio.get_running_loop().run_in_executor(self._background if long else None, work)

    def _attest(
        self,
        manifest: Manifest,
        published: Mapping[str, torch.Tensor],
        prepared: Prepared | None = None,
    ) -> None:
        """Compare what the engine holds (``prepared`` or, if None, live) with what was published.

        A rank of several has no whole tensors, which could be digested: their parts are compared.

        Raises:
            DigestMismatchError: naming the first tensor that differs.
        """
        weights = self.engine.weights
        if self.engine.lockstep is None:
            attest(manifest.version, manifest.digests, published, weights.digests(prepared), weights.plan.aliases)
        else:
            attest_parts(manifest.version, self.rank, weights.compare(published, prepared))
