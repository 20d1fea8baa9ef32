"""The weight store: a trainer publishes versions, policy replicas pull them.

A version is a few packed buckets and a manifest. It becomes visible as a whole, when every rank has put its part;
readers hold it by a lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monarch.actor import ActorError

from forge_async.errors import ForgeError
from forge_async.mesh import ActorDied, ActorHandle, current_runtime
from forge_async.mesh.actor import translate
from forge_async.mesh.monarch_compat import SupervisionError
from forge_async.observability.tables import Listing
from forge_async.store import torchstore_compat
from forge_async.store.config import StoreConfig
from forge_async.store.errors import StoreError
from forge_async.store.layout import FullTensor, Ranges, TensorShard, buckets_of
from forge_async.store.messages import Committed, Lease, VersionInfo
from forge_async.store.pulled import Pulled
from forge_async.store.registry import Registry
from forge_async.store.shared_memory import Segment, attach, forget_segments
from forge_async.store.writer import PartWriter

_store_numbers = itertools.count()
_reachable: dict[str, bool] = {}
"""Whether this process shares memory with a store, by store name."""

POLL_S = 10.0
"""Seconds that a request waits in the store before it is asked again."""


class WeightStore:
    """Handle of a store: made in the controller by :meth:`create`, passed to actors as an argument."""

    def __init__(self, config: StoreConfig, name: str, registry: Any, probe: Segment, token: bytes) -> None:
        self.config = config
        self.name = name
        self._registry = registry
        self._probe = probe
        self._token = token
        self._handle: ActorHandle | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<weight store {self.name}: await versions() shows what it holds>"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_handle": None}

    @classmethod
    async def create(cls, config: StoreConfig | None = None, cores: list[int] | None = None) -> WeightStore:
        """Spawn the store's process (pinned to ``cores`` where given); needs an open ``MeshRuntime``."""
        config = config if config is not None else StoreConfig()
        name = f"forge-async-{os.getpid()}-{next(_store_numbers)}"
        builder = Registry.options(name="store", cores=cores)
        handle = await builder.spawn(name, config.keep_versions, config.lease_ttl_s)
        await torchstore_compat.initialize(name, handle.proc_mesh)
        probe, token = await handle.call_one("probe")
        store = cls(config, name, handle.raw, probe, token)
        store._handle = handle
        current_runtime().adopt(store)
        return store

    @property
    def client(self) -> WeightStore:
        """The handle without the controller's rights (it cannot close the store)."""
        return WeightStore(self.config, self.name, self._registry, self._probe, self._token)

    async def publish(
        self,
        version: int,
        rank: int,
        ranks: int,
        tensors: Sequence[TensorShard],
        layout: Sequence[FullTensor] | None = None,
        copied: threading.Event | None = None,
    ) -> Committed:
        """One rank's share of publishing ``version``: write its part, wait for the others', commit.

        Every one of ``ranks`` calls it, in any order and at its own pace. If one of them fails, nothing is committed
        and all raise; then, or when one was killed, all may try again.

        Floating-point tensors are cast to ``store.dtype`` on the way. The tensors may change once ``copied`` is set, or
        this has returned, however it ended. Replicated tensors come from one rank only; shards of no element are
        skipped. If cancelled, it ends when the copy at hand has ended.

        Args:
            tensors: this rank's shards. On CUDA they must be complete: see ``torch.cuda.synchronize``.
            layout: every tensor of the version in full, the same on every rank. With it, ranks that share memory with
                the store write to common buckets, where each full tensor lies in one piece. Without it, every rank has
                buckets of its own, and readers put tensors in shards together.
            copied: set when the tensors are no longer read.
        Raises:
            StoreError: naming the rank that failed with its cause, or the tensor that the parts do not cover exactly.
        """
        if not 0 <= rank < ranks:
            raise StoreError(f"rank {rank} of {ranks} cannot publish: ranks count from 0 to {ranks - 1}")
        part = PartWriter(self, version, rank)
        digests = b""
        failure: str | None = None
        try:
            digests = await part.write(ranks, tensors, layout)
        except ActorDied:
            raise  # the store's process: there is nobody to tell the others
        except Exception as error:  # told to the other ranks, which wait for this one's part
            failure = str(error) if isinstance(error, ForgeError) else repr(error)
        finally:
            if copied is not None:
                copied.set()
        committed: Committed = await self.request("finish", version, rank, ranks, part.attempt, failure, digests)
        return committed

    async def latest(self) -> int | None:
        """The newest committed version; None before the first."""
        version: int | None = await self.request("latest")
        return version

    async def wait_for_newer(self, version: int) -> int:
        """Wait until a version above ``version`` is committed; the newest."""
        while True:
            newest: int | None = await self.request("wait_for_newer", version, POLL_S)
            if newest is not None:
                return newest

    async def acquire(self, version: int | None = None, regions: Mapping[str, Ranges | None] | None = None) -> Pulled:
        """Pull ``version`` (None: the newest) and hold it until :meth:`Pulled.release`.

        Args:
            regions: what the reader needs, by HF name: a region, or None for the full tensor. On the store's host that
                makes no difference, since nothing is copied; elsewhere only the buckets that hold it are fetched.
        Raises:
            VersionGone: it was deleted, or never committed.
        """
        return await self._pull(await self.request("acquire", version, self.shares_memory()), regions)

    async def acquire_next(self, version: int) -> Pulled:
        """As :meth:`acquire` for the newest version, as soon as that is at least ``version``.

        On the store's host that may be before it is committed: then a tensor that is not written yet keeps the thread
        that asks for it waiting, and what was read counts only if :meth:`Pulled.committed` returns.

        Raises:
            StoreError: ``version`` could not be published.
        """
        while True:
            lease: Lease | None = await self.request("acquire_next", version, self.shares_memory(), POLL_S)
            if lease is not None:
                return await self._pull(lease, None)

    async def _pull(self, lease: Lease, regions: Mapping[str, Ranges | None] | None) -> Pulled:
        pulled = Pulled(self, lease)
        try:
            forget_segments(lease.live_segments)
            wanted = buckets_of(pulled.manifest.layout, regions)
            near = set(lease.segments) if self.shares_memory() else set()
            pulled.buckets.update({bucket: attach(lease.segments[bucket]) for bucket in wanted if bucket in near})
            far = [bucket for bucket in wanted if bucket not in near]
            if far:
                client = await torchstore_compat.client(self.name)
                found = await asyncio.gather(*(client.get(lease.keys[bucket]) for bucket in far))
                pulled.buckets.update(zip(far, found, strict=True))
        except BaseException:
            await pulled.release()
            raise
        return pulled

    async def stats(self) -> dict[str, Any]:
        """Versions, leases and shared memory held: see ``Registry.stats``."""
        result: dict[str, Any] = await self.request("stats")
        return result

    async def versions(self) -> Listing[VersionInfo]:
        """Every version that is held, or being written, oldest first."""
        return Listing(await self.request("versions"), "versions in the store", VersionInfo.COLUMNS)

    def on_death(self, listener: Callable[[str], None]) -> None:
        """Call ``listener(cause)`` in the event loop when the store's process dies; in the controller."""
        handle = self._handle
        if handle is not None:
            handle.on_death(lambda: listener(handle.death_cause or "unknown"))

    async def close(self) -> None:
        """End the store and free its memory; in the controller. Safe to call again."""
        if self._closed or self._handle is None:
            return
        self._closed = True
        if self._handle.healthy:
            with contextlib.suppress(ActorError, SupervisionError):  # the process is about to end anyway
                await torchstore_compat.shutdown(self.name)
        await self._handle.stop()

    async def stop(self) -> None:
        """For the runtime that owns it: end the process, whatever state it is in."""
        self._closed = True
        if self._handle is not None:
            await self._handle.stop()

    def shares_memory(self) -> bool:
        """Whether this process maps the store's segments."""
        if self.config.transport == "rpc":
            return False
        if self.name not in _reachable:
            try:
                _reachable[self.name] = bytes(attach(self._probe)[: len(self._token)].numpy()) == self._token
            except OSError:
                _reachable[self.name] = False
        if self.config.transport == "shared_memory" and not _reachable[self.name]:
            raise StoreError(
                "store.transport = shared_memory, but this process is not on the store's host (or may not open its "
                "files under /proc); use auto or rpc"
            )
        return _reachable[self.name]

    async def request(self, name: str, *args: Any) -> Any:
        """Ask the registry."""
        if self._handle is not None:
            return await self._handle.call_one(name, *args)
        try:
            return await getattr(self._registry, name).call_one(*args)
        except (ActorError, SupervisionError) as error:
            raise translate(f"store.{name}", error) from error
