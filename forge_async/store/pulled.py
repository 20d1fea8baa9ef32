"""The reading side: a version held by a lease, committed or still being written."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from forge_async.errors import ForgeError
from forge_async.store.counts import WrittenCounts
from forge_async.store.digest import nothing
from forge_async.store.errors import LeaseExpired, StoreError
from forge_async.store.layout import (
    Manifest,
    Ranges,
    assemble,
    lies_in_full,
    narrow,
    overlap,
    ranges_of,
    unpacked_layout,
)
from forge_async.store.messages import Digests, Lease
from forge_async.store.shared_memory import Segment

if TYPE_CHECKING:
    from forge_async.store.weight_store import WeightStore

OUTCOME_S = 10.0
"""Seconds that one request for a version's outcome waits in the store."""


_views: dict[tuple[bytes, tuple[Segment, ...]], dict[str, torch.Tensor]] = {}
"""By layout, and the segments that hold a version: views of its tensors, which versions in the same place have too."""


def views_of(lease: Lease) -> dict[str, torch.Tensor]:
    """Views of tensors where a version lies, as far as they were made; remembered while the store has the segments."""
    for known in list(_views):
        if not {segment.segment_id for segment in known[1]}.issubset(lease.live_segments):
            _views.pop(known, None)
    if len(lease.segments) < len(lease.keys):
        return {}
    return _views.setdefault((lease.layout, tuple(lease.segments.values())), {})


class Pulled(Mapping[str, torch.Tensor]):
    """A version held by a reader: HF name -> full tensor, a read-only view of shared memory where it lies in one piece.
    Its tensors are valid until :meth:`release`.

    Of a version that is still being written (:meth:`WeightStore.acquire_next`), asking for a tensor blocks the thread
    until that is written; never do so in the event loop. What was read counts only if :meth:`committed` returns.
    """

    def __init__(self, store: WeightStore, lease: Lease) -> None:
        digests = lease.digests if lease.digests is not None else Digests("", {})
        self.manifest = Manifest(lease.version, unpacked_layout(lease.layout), digests.version, digests.tensors)
        self.version: int = lease.version
        self.buckets: dict[int, torch.Tensor] = {}
        self._store = store
        self._lease_id = lease.lease_id
        # Of a reader that shares no memory, what it has fetched is its own: a place in the store serves again.
        self._views = views_of(lease) if store.shares_memory() else {}
        self._assembled: dict[str, torch.Tensor] = {}
        self._released = False
        self._failure: ForgeError | None = None
        self._renewal = asyncio.ensure_future(self._renew())
        self._watcher: asyncio.Future[None] | None = None
        if lease.digests is None:
            assert lease.counts is not None
            self._counts = WrittenCounts(lease.counts)
            self._watcher = asyncio.ensure_future(self._watch())

    async def __aenter__(self) -> Pulled:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.release()

    def __getitem__(self, name: str) -> torch.Tensor:
        """One full tensor, assembled where it lies in several pieces."""
        self._ready(name)
        if name in self._views or self.lies_whole(name):
            return self._view(name)
        if name not in self._assembled:
            self._assembled[name] = assemble(self.manifest.tensors[name].pieces, self.buckets)
        return self._assembled[name]

    def arriving(self, name: str) -> tuple[torch.Tensor, Callable[[int], None]]:
        """A tensor that :meth:`lies_whole`, as a view of what may still be written, and what blocks the thread until so
        many of its first elements are."""
        if self.manifest.digest:
            return self[name], nothing
        self._ready(name, 0)  # where there is nothing to wait for any more, that is an error
        return self._view(name), functools.partial(self._ready, name)

    def _view(self, name: str) -> torch.Tensor:
        if name not in self._views:
            piece = self.manifest.tensors[name].pieces[0]
            self._views[name] = piece.full_view(self.buckets[piece.bucket])
        return self._views[name]

    def lies_whole(self, name: str) -> bool:
        """Whether asking for a tensor gives a view of it; else :meth:`copy_into` saves putting it together first."""
        return lies_in_full(self.manifest.tensors[name].pieces)

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.tensors)

    def __len__(self) -> int:
        return len(self.manifest.tensors)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors, whether they are written or not."""
        return {name: entry.shape for name, entry in self.manifest.tensors.items()}

    def region(self, name: str, ranges: Ranges) -> torch.Tensor:
        """Part of a tensor, [start, end) per dimension: a view where one piece holds all of it, else assembled from
        those that hold some of it."""
        self._ready(name)
        pieces = self.manifest.tensors[name].pieces
        if lies_in_full(pieces):
            return narrow(self[name], ranges)
        own = [ranges_of(piece.offsets, piece.shape) for piece in pieces]
        for piece, there in zip(pieces, own, strict=True):
            if all(start <= a and b <= end for (start, end), (a, b) in zip(there, ranges, strict=True)):
                inside = [(a - start, b - start) for (a, b), (start, _) in zip(ranges, there, strict=True)]
                return narrow(piece.view(self.buckets[piece.bucket]), inside)
        return assemble(
            [piece for piece, there in zip(pieces, own, strict=True) if overlap(there, ranges)],
            self.buckets,
            ranges=ranges,
        )

    def copy_into(self, name: str, destination: torch.Tensor) -> None:
        """Copy one full tensor into ``destination`` of the same shape, shard by shard, without assembling it first."""
        self._ready(name)
        entry = self.manifest.tensors[name]
        if tuple(destination.shape) != entry.shape:
            raise StoreError(
                f"{name} has shape {entry.shape} in version {self.version}, not {tuple(destination.shape)}"
            )
        assemble(entry.pieces, self.buckets, into=destination)

    async def committed(self) -> Manifest:
        """Wait until the version is committed; its manifest, with the digests.

        Raises:
            StoreError: it could not be published.
        """
        if self._watcher is not None:
            await asyncio.wait({self._watcher})
        if self._failure is not None:
            raise self._failure
        return self.manifest

    async def release(self) -> None:
        """Give the version back; its tensors must not be used any more. Safe to call again.

        Raises:
            LeaseExpired: before it was released.
        """
        if self._released:
            return
        self._released = True
        tasks = [task for task in (self._renewal, self._watcher) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._views, self._assembled = {}, {}
        self.buckets.clear()
        if not await self._store.request("release", self._lease_id):
            raise LeaseExpired(
                f"the lease of version {self.version} expired before it was released: what was read may be torn. "
                "Raise store.lease_ttl_s"
            )

    def _ready(self, name: str, elements: int | None = None) -> None:
        """Return when ``name``, or so many of its first elements, may be read."""
        if not self.manifest.digest and not self._released:
            needs = self.manifest.tensors[name].needs(elements)
            self._counts.wait(needs, lambda: self._released or self._failure is not None)
        if self._released:
            raise StoreError(f"version {self.version} was released: its tensors may hold another version by now")
        if self._failure is not None:
            raise self._failure

    async def _watch(self) -> None:
        """Waits for the end of a version that is being written: its commit, its failure, or ``release``."""
        digests: Digests | None = None
        try:
            while digests is None:
                digests = await self._store.request("outcome", self._lease_id, OUTCOME_S)
            self.manifest = Manifest(self.version, self.manifest.layout, digests.version, digests.tensors)
        except ForgeError as error:
            self._failure = error

    async def _renew(self) -> None:
        """Renews the lease until cancelled by ``release``; ends when the lease or the store has."""
        while True:
            await asyncio.sleep(self._store.config.lease_ttl_s / 4)
            try:
                if not await self._store.request("renew", self._lease_id):
                    return
            except ForgeError:  # the store is gone: whoever reads next is told
                return
