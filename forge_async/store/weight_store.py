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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from monarch.actor import ActorError

from forge_async.errors import ForgeError
from forge_async.mesh import ActorDied, ActorHandle, current_runtime
from forge_async.mesh.actor import translate
from forge_async.mesh.monarch_compat import SupervisionError
from forge_async.store import torchstore_compat
from forge_async.store.config import StoreConfig
from forge_async.store.digest import tensor_digest
from forge_async.store.errors import StoreError
from forge_async.store.layout import (
    FullTensor,
    Manifest,
    Part,
    Piece,
    Ranges,
    Slot,
    TensorShard,
    assemble,
    lies_in_full,
    narrow,
    overlap,
    plan_buckets,
    ranges_of,
)
from forge_async.store.registry import Committed, Grant, Lease, Registry
from forge_async.store.shared_memory import Segment, attach, forget_segments

_store_numbers = itertools.count()
_reachable: dict[str, bool] = {}
"""Whether this process shares memory with a store, by store name."""

DELIVERIES = 4
"""Messages in which a rank reports what it has written: the store digests the first while it writes the last."""

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

    async def publish(
        self,
        version: int,
        rank: int,
        ranks: int,
        tensors: Sequence[TensorShard],
        layout: Sequence[FullTensor] | None = None,
        copied: threading.Event | None = None,
    ) -> Committed:
        """One rank's share of publishing ``version``: put its part, wait for the others', commit.

        Every one of ``ranks`` calls it, in any order and at its own pace. If one of them fails, nothing is committed
        and all raise. The other arguments are those of :meth:`put_part`.

        Raises:
            StoreError: naming the rank that failed with its cause, or the tensor that the parts do not cover exactly.
        """
        attempt, failure = None, None
        try:
            attempt = (await self.put_part(version, rank, tensors, layout, copied)).attempt
        except ActorDied:
            raise  # the store's process: there is nobody to tell the others
        except Exception as error:  # told to the other ranks, which wait for this one's part
            failure = str(error) if isinstance(error, ForgeError) else repr(error)
        committed: Committed = await self._request("finish", version, rank, ranks, attempt, failure)
        return committed

    async def put_part(
        self,
        version: int,
        rank: int,
        tensors: Sequence[TensorShard],
        layout: Sequence[FullTensor] | None = None,
        copied: threading.Event | None = None,
    ) -> Part:
        """Write one rank's shards of ``version``; invisible until committed.

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
            StoreError: the version is committed already, or a shard does not fit ``layout``.
        """
        try:
            return await self._put_part(version, rank, tensors, layout, copied)
        finally:
            if copied is not None:
                copied.set()

    async def _put_part(
        self,
        version: int,
        rank: int,
        tensors: Sequence[TensorShard],
        layout: Sequence[FullTensor] | None,
        copied: threading.Event | None,
    ) -> Part:
        shards = [shard for shard in tensors if shard.tensor.numel()]
        shares_memory = self._shares_memory()
        common = layout is not None and shares_memory
        whole = layout if layout is not None and common else [self._as_full(shard) for shard in shards]
        nbytes = [full._replace(dtype=self._published_dtype(full.dtype)).nbytes for full in whole]
        slots, sizes = plan_buckets(nbytes, self.config.bucket_mib << 20)
        grant: Grant = await self._request("begin", version, rank, sizes, shares_memory, common)
        forget_segments(grant.live_segments)
        if grant.segments is not None:
            buckets = [attach(segment)[:size] for segment, size in zip(grant.segments, sizes, strict=True)]
        else:
            buckets = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        if layout is not None and common:
            places = {full.name: (full, slot) for full, slot in zip(layout, slots, strict=True)}
            slots = [place_of(shard, places) for shard in shards]
        pieces = [
            self._piece(shard, grant.keys[slot.bucket], slot.start, common)
            for shard, slot in zip(shards, slots, strict=True)
        ]
        memory = dict(zip(grant.keys, buckets, strict=True))
        deliveries: list[asyncio.Future[None]] = []

        async def deliver(written: list[Piece]) -> None:
            await self._request("deliver", version, rank, grant.attempt, written)

        try:
            for first, last in even_runs([piece.numel for piece in pieces], DELIVERIES):
                run, sources = pieces[first:last], shards[first:last]
                await finish_in_thread(lambda run=run, sources=sources: write_shards(run, sources, memory))
                if shares_memory:
                    deliveries.append(asyncio.ensure_future(deliver(run)))
            if copied is not None:
                copied.set()
            if not shares_memory:
                pieces = await asyncio.to_thread(digest_whole, pieces, memory)
                client = await torchstore_compat.client(self.name)
                for key, bucket in memory.items():
                    await client.put(key, bucket)
                await deliver(pieces)
            await asyncio.gather(*deliveries)
        finally:
            for delivery in deliveries:
                delivery.cancel()  # nothing to those that are done
        return Part(version, rank, grant.attempt)

    async def commit(self, version: int, parts: Sequence[Part]) -> Manifest:
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

    async def acquire(self, version: int | None = None, regions: Mapping[str, Ranges | None] | None = None) -> Pulled:
        """Pull ``version`` (None: the newest) and hold it until :meth:`Pulled.release`.

        Args:
            regions: what the reader needs, by HF name: a region, or None for the full tensor. On the store's host that
                makes no difference, since nothing is copied; elsewhere only the buckets that hold it are fetched.
        Raises:
            VersionGone: it was deleted, or never committed.
        """
        lease: Lease = await self._request("acquire", version)
        pulled = Pulled(self, lease)
        try:
            forget_segments(lease.live_segments)
            keys = lease.manifest.buckets_of(regions)
            if self._shares_memory():
                near = {key: attach(lease.segments[key]) for key in keys if key in lease.segments}
                pulled._buckets.update(near)
                keys = [key for key in keys if key not in near]
            if keys:
                client = await torchstore_compat.client(self.name)
                found = await asyncio.gather(*(client.get(key) for key in keys))
                pulled._buckets.update(zip(keys, found, strict=True))
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

    def _published_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if self.config.dtype == "auto" or not dtype.is_floating_point:
            return dtype
        published: torch.dtype = getattr(torch, self.config.dtype)
        return published

    def _as_full(self, shard: TensorShard) -> FullTensor:
        return FullTensor(shard.name, shard.tensor.dtype, shard.part_shape)

    def _piece(self, shard: TensorShard, key: str, start: int, in_full: bool) -> Piece:
        dtype = str(self._published_dtype(shard.tensor.dtype)).removeprefix("torch.")
        shape, offsets = tuple(shard.global_shape), tuple(shard.offsets)
        return Piece(shard.name, dtype, shape, offsets, shard.part_shape, key, start, in_full)

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
        """One full tensor by HF name: a view where it lies in one piece, else assembled."""
        self._check()
        pieces = self.manifest.tensors[name].pieces
        if lies_in_full(pieces):
            return pieces[0].full_view(self._buckets[pieces[0].bucket])
        return assemble(pieces, self._buckets)

    def region(self, name: str, ranges: Ranges) -> torch.Tensor:
        """Part of a tensor, [start, end) per dimension: a view where one piece holds all of it, else assembled from
        those that hold some of it."""
        self._check()
        pieces = self.manifest.tensors[name].pieces
        if lies_in_full(pieces):
            return narrow(self.tensor(name), ranges)
        own = [ranges_of(piece.offsets, piece.shape) for piece in pieces]
        for piece, there in zip(pieces, own, strict=True):
            if all(start <= a and b <= end for (start, end), (a, b) in zip(there, ranges, strict=True)):
                inside = [(a - start, b - start) for (a, b), (start, _) in zip(ranges, there, strict=True)]
                return narrow(piece.view(self._buckets[piece.bucket]), inside)
        return assemble(
            [piece for piece, there in zip(pieces, own, strict=True) if overlap(there, ranges)],
            self._buckets,
            ranges=ranges,
        )

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


def place_of(shard: TensorShard, places: Mapping[str, tuple[FullTensor, Slot]]) -> Slot:
    """Where the full tensor of ``shard`` goes."""
    full, slot = places.get(shard.name, (None, Slot(0, 0)))
    if full is None or full.shape != tuple(shard.global_shape) or full.dtype != shard.tensor.dtype:
        raise StoreError(
            f"{shard.name}: the shard is of a {shard.tensor.dtype} tensor of shape {tuple(shard.global_shape)}, the "
            f"layout has {'no such tensor' if full is None else f'a {full.dtype} tensor of shape {full.shape}'}"
        )
    return slot


def even_runs(sizes: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Cut a sequence of ``sizes`` into at most ``count`` runs, (start, end) each, of about the same sum."""
    total, done, cuts = sum(sizes), 0, [0]
    for index, size in enumerate(sizes):
        done += size
        if done * count >= total * len(cuts):
            cuts.append(index + 1)
    return list(itertools.pairwise(cuts))


def write_shards(pieces: Sequence[Piece], shards: Sequence[TensorShard], memory: Mapping[str, torch.Tensor]) -> None:
    """Copy shards to their places, cast to the pieces' dtypes. On CUDA in a stream of its own, beside training."""
    device = next((shard.tensor.device for shard in shards if shard.tensor.is_cuda), None)
    stream = torch.cuda.Stream(device) if device is not None else None
    with torch.no_grad(), torch.cuda.stream(stream):
        for piece, shard in zip(pieces, shards, strict=True):
            target = piece.view(memory[piece.bucket])
            source = shard.tensor.detach()
            if source.is_cuda:
                source = source.to(target.dtype)  # there, so that half the bytes cross the bus
            target = target.view(source.shape) if shard.shape is not None else target
            target.copy_(source)


def digest_whole(pieces: Sequence[Piece], memory: Mapping[str, torch.Tensor]) -> list[Piece]:
    """The pieces, with digests of those that are whole tensors."""
    return [
        replace(piece, digest=tensor_digest(piece.view(memory[piece.bucket]))) if piece.is_whole else piece
        for piece in pieces
    ]


async def finish_in_thread(function: Any) -> Any:
    """Run ``function`` in a thread; a cancellation waits for its end, since it writes shared memory."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise
