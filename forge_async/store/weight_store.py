"""The weight store: a trainer publishes versions, policy replicas pull them.

A version is a few packed buckets per trainer rank and a manifest. It becomes visible as a whole, when rank 0 commits it
after every rank has put its part; readers hold it by a lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from monarch.actor import ActorError

from forge_async.errors import ForgeError
from forge_async.mesh import ActorHandle, current_runtime
from forge_async.mesh.actor import translate
from forge_async.mesh.monarch_compat import SupervisionError
from forge_async.store import torchstore_compat
from forge_async.store.config import StoreConfig
from forge_async.store.digest import tensor_digest
from forge_async.store.errors import StoreError
from forge_async.store.layout import Manifest, PartManifest, Piece, TensorShard, assemble, plan_buckets
from forge_async.store.registry import Lease, Registry, bucket_key
from forge_async.store.shared_memory import Segment, attach, forget_segments

_store_numbers = itertools.count()
_reachable: dict[str, bool] = {}
"""Whether this process shares memory with a store, by store name."""

POLL_S = 10.0
"""Seconds one ``wait_for_newer`` request waits in the store before it is asked again."""


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

    async def put_part(self, version: int, rank: int, tensors: Sequence[TensorShard]) -> PartManifest:
        """Write one rank's shards of ``version``; invisible until committed.

        The tensors are copied: they may change once this has returned. Replicated tensors come from one rank only;
        shards of no element are skipped. If cancelled, it ends when the copy at hand has ended.

        Raises:
            StoreError: the version is committed already.
        """
        shards = [shard for shard in tensors if shard.tensor.numel()]
        slots, sizes = plan_buckets([shard.tensor.nbytes for shard in shards], self.config.bucket_mib << 20)
        shares_memory = self._shares_memory()
        grant = await self._request("begin", version, rank, sizes, shares_memory)
        forget_segments(grant.live_segments)
        keys = [bucket_key(version, rank, grant.attempt, index) for index in range(len(sizes))]

        def pack() -> tuple[list[torch.Tensor], list[Piece]]:
            if grant.segments is None:
                buckets = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in sizes]
            else:
                buckets = [attach(segment)[:nbytes] for segment, nbytes in zip(grant.segments, sizes, strict=True)]
            pieces = [
                write_shard(shard, keys[slot.bucket], slot.start, buckets[slot.bucket])
                for shard, slot in zip(shards, slots, strict=True)
            ]
            return buckets, pieces

        buckets, pieces = await finish_in_thread(pack)
        with torchstore_compat.segment_transport(shares_memory):
            client = await torchstore_compat.client(self.name)
            for key, bucket in zip(keys, buckets, strict=True):
                await client.put(key, bucket)
        return PartManifest(version, rank, grant.attempt, dict(zip(keys, sizes, strict=True)), tuple(pieces))

    async def commit(self, version: int, parts: Sequence[PartManifest]) -> Manifest:
        """Make ``version`` visible: all ranks' parts, checked to cover each tensor exactly.

        Raises:
            StoreError: naming the tensor with a hole, an overlap or a disagreement; the version stays invisible.
        """
        manifest: Manifest = await self._request("commit", version, list(parts))
        return manifest

    async def latest(self) -> int | None:
        """The newest committed version; None before the first."""
        version: int | None = await self._request("latest")
        return version

    async def wait_for_newer(self, version: int) -> int:
        """Wait until a version above ``version`` is committed; the newest."""
        while True:
            newest: int | None = await self._request("wait_for_newer", version, POLL_S)
            if newest is not None:
                return newest

    async def acquire(self, version: int | None = None) -> Pulled:
        """Pull ``version`` (None: the newest) and hold it until :meth:`Pulled.release`.

        Raises:
            VersionGone: it was deleted, or never committed.
        """
        lease: Lease = await self._request("acquire", version)
        pulled = Pulled(self, lease)
        try:
            forget_segments(lease.live_segments)
            with torchstore_compat.segment_transport(self._shares_memory()):
                client = await torchstore_compat.client(self.name)
                for key in lease.manifest.buckets:
                    pulled._buckets[key] = await client.get(key)
        except BaseException:
            await pulled.release()
            raise
        return pulled

    async def stats(self) -> dict[str, Any]:
        """Versions, leases and shared memory held: see ``Registry.stats``."""
        result: dict[str, Any] = await self._request("stats")
        return result

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

    def _shares_memory(self) -> bool:
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

    async def _request(self, name: str, *args: Any) -> Any:
        if self._handle is not None:
            return await self._handle.call_one(name, *args)
        try:
            return await getattr(self._registry, name).call_one(*args)
        except (ActorError, SupervisionError) as error:
            raise translate(f"store.{name}", error) from error


class Pulled:
    """A version held by a reader. Its tensors are read-only views of shared memory, valid until :meth:`release`."""

    def __init__(self, store: WeightStore, lease: Lease) -> None:
        self.manifest: Manifest = lease.manifest
        self.version: int = lease.manifest.version
        self._store = store
        self._lease_id = lease.lease_id
        self._buckets: dict[str, torch.Tensor] = {}
        self._released = False
        self._renewal = asyncio.ensure_future(self._renew())

    async def __aenter__(self) -> Pulled:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.release()

    def tensor(self, name: str) -> torch.Tensor:
        """One full tensor by HF name: a view where one rank published it whole, else assembled."""
        self._check()
        pieces = self.manifest.tensors[name].pieces
        if pieces[0].is_whole:
            return pieces[0].view(self._buckets[pieces[0].bucket])
        return assemble(pieces, self._buckets)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, full tensor) of every tensor, by name; tensors in shards are assembled one at a time."""
        for name in self.manifest.tensors:
            yield name, self.tensor(name)

    def copy_into(self, name: str, destination: torch.Tensor) -> None:
        """Copy one full tensor into ``destination`` of the same shape, shard by shard, without assembling it first."""
        self._check()
        entry = self.manifest.tensors[name]
        if tuple(destination.shape) != entry.shape:
            raise StoreError(
                f"{name} has shape {entry.shape} in version {self.version}, not {tuple(destination.shape)}"
            )
        assemble(entry.pieces, self._buckets, into=destination)

    async def release(self) -> None:
        """Give the version back; its tensors must not be used any more. Safe to call again.

        Raises:
            StoreError: the lease had expired before, so that what was read may be torn.
        """
        if self._released:
            return
        self._released = True
        self._renewal.cancel()
        await asyncio.wait({self._renewal})
        self._buckets.clear()
        if not await self._store._request("release", self._lease_id):
            raise StoreError(
                f"the lease of version {self.version} expired before it was released: what was read may be torn. "
                "Raise store.lease_ttl_s"
            )

    def _check(self) -> None:
        if self._released:
            raise StoreError(f"version {self.version} was released: its tensors may hold another version by now")

    async def _renew(self) -> None:
        """Renews the lease until cancelled by ``release``; ends when the lease or the store has."""
        while True:
            await asyncio.sleep(self._store.config.lease_ttl_s / 4)
            try:
                if not await self._store._request("renew", self._lease_id):
                    return
            except ForgeError:  # the store is gone: whoever reads next is told
                return


def write_shard(shard: TensorShard, key: str, start: int, bucket: torch.Tensor) -> Piece:
    """Copy one shard to its place in ``bucket``; digests it there where it is the whole tensor."""
    dtype = str(shard.tensor.dtype).removeprefix("torch.")
    shape = tuple(shard.tensor.shape)
    piece = Piece(shard.name, dtype, tuple(shard.global_shape), tuple(shard.offsets), shape, key, start)
    view = piece.view(bucket)
    view.copy_(shard.tensor.detach())
    if not piece.is_whole:
        return piece
    return replace(piece, digest=tensor_digest(view))


async def finish_in_thread(function: Any) -> Any:
    """Run ``function`` in a thread; a cancellation waits for its end, since it writes shared memory."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise
