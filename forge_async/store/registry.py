"""The registry: which versions exist, who reads them, and which shared-memory segments are free.

It lives in the process of the torchstore volume and owns all segments, so that they outlive trainers and readers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from monarch.actor import concurrent_endpoint

from forge_async.mesh import ForgeActor
from forge_async.store import torchstore_compat
from forge_async.store.errors import StoreError, VersionGone
from forge_async.store.layout import (
    Manifest,
    PartManifest,
    Piece,
    build_manifest,
    digest_of_pieces,
    group_pieces,
)
from forge_async.store.shared_memory import Segment, create_segment, destroy_segment

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Grant:
    """The answer to ``begin``: where a rank may write its part."""

    attempt: str
    segments: list[Segment] | None
    """One per bucket; None: the client shares no memory with the store."""
    live_segments: list[str]


@dataclass(frozen=True)
class Lease:
    """The answer to ``acquire``: a version that stays until released or expired."""

    lease_id: int
    manifest: Manifest
    live_segments: list[str]


@dataclass
class _Part:
    """Buckets a rank was granted for one version."""

    attempt: str
    keys: list[str]
    segments: list[Segment]


@dataclass
class _Version:
    parts: dict[int, _Part] = field(default_factory=dict)
    manifest: Manifest | None = None


class SegmentPool:
    """Segments to be used again: fresh memory costs a page fault per 4 KiB, several times the copy itself."""

    def __init__(self) -> None:
        self.free: list[Segment] = []
        self.used: dict[str, Segment] = {}

    def take(self, nbytes: int) -> Segment:
        """A segment of at least ``nbytes``, free or new."""
        fitting = [segment for segment in self.free if nbytes <= segment.nbytes <= nbytes + nbytes // 4 + 4096]
        if fitting:
            segment = min(fitting, key=lambda candidate: candidate.nbytes)
            self.free.remove(segment)
        else:
            segment = create_segment(-(-nbytes // 4096) * 4096)
        self.used[segment.segment_id] = segment
        return segment

    def give_back(self, segments: list[Segment]) -> None:
        for segment in segments:
            self.free.append(self.used.pop(segment.segment_id))

    def trim(self, limit_bytes: int) -> None:
        """Destroy free segments, oldest first, until they hold at most ``limit_bytes``."""
        while self.free and sum(segment.nbytes for segment in self.free) > limit_bytes:
            destroy_segment(self.free.pop(0))

    def live(self) -> list[str]:
        return [*self.used, *(segment.segment_id for segment in self.free)]

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in [*self.used.values(), *self.free])


class Registry(ForgeActor):
    """One per store. Every endpoint runs on one event loop: between two awaits nothing else changes the tables.

    Args:
        keep_versions: committed versions kept besides those that leases hold.
        lease_ttl_s: seconds after which a lease that is not renewed ends.
    """

    def __init__(self, store_name: str, keep_versions: int, lease_ttl_s: float) -> None:
        self._store_name = store_name
        self._keep_versions = keep_versions
        self._lease_ttl_s = lease_ttl_s
        self._versions: dict[int, _Version] = {}
        self._latest: int | None = None
        self._leases: dict[int, tuple[int, float]] = {}
        self._lease_numbers = itertools.count()
        self._attempts = itertools.count()
        self._pool = SegmentPool()
        self._committed = asyncio.Condition()
        self._collecting = asyncio.Lock()
        self._token = os.urandom(32)
        self._probe = create_segment(4096)
        os.pwrite(self._probe.descriptor, self._token, 0)

    @concurrent_endpoint
    async def probe(self) -> tuple[Segment, bytes]:
        """A small segment and its content: who finds the same in it shares memory with the store."""
        return self._probe, self._token

    @concurrent_endpoint
    async def begin(self, version: int, rank: int, sizes: list[int], shares_memory: bool) -> Grant:
        """Room for the buckets of one rank's part; a part granted before for the same version and rank is void."""
        entry = self._versions.get(version)
        former = entry.parts.pop(rank, None) if entry is not None and entry.manifest is None else None
        if former is not None:
            await self._discard([former])
        if self._latest is not None and version <= self._latest:
            raise StoreError(f"version {version} cannot be written: version {self._latest} is committed already")
        entry = self._versions.setdefault(version, _Version())
        attempt = f"{next(self._attempts)}"
        segments = [self._pool.take(nbytes) for nbytes in sizes] if shares_memory else []
        keys = [bucket_key(version, rank, attempt, index) for index in range(len(sizes))]
        entry.parts[rank] = _Part(attempt, keys, segments)
        return Grant(attempt, segments if shares_memory else None, self._pool.live())

    @concurrent_endpoint
    async def commit(self, version: int, parts: list[PartManifest]) -> Manifest:
        """Check that the parts make whole tensors, digest those that no rank had whole, and show the version."""
        self._check_parts(version, parts)
        pieces = group_pieces(parts)
        manifest = build_manifest(version, parts, await self._digests(pieces))
        entry = self._check_parts(version, parts)  # again: others were served meanwhile
        entry.manifest = manifest
        self._latest = version
        async with self._committed:
            self._committed.notify_all()
        await self._collect()
        return manifest

    @concurrent_endpoint
    async def latest(self) -> int | None:
        """The newest committed version."""
        return self._latest

    @concurrent_endpoint
    async def wait_for_newer(self, version: int, timeout_s: float) -> int | None:
        """The newest committed version once it is above ``version``; None after ``timeout_s``."""
        async with self._committed:
            try:
                await asyncio.wait_for(
                    self._committed.wait_for(lambda: self._latest is not None and self._latest > version), timeout_s
                )
            except TimeoutError:
                return None
        return self._latest

    @concurrent_endpoint
    async def acquire(self, version: int | None) -> Lease:
        """Hold ``version`` (None: the newest) for a reader."""
        wanted = self._latest if version is None else version
        entry = self._versions.get(wanted) if wanted is not None else None
        if entry is None or entry.manifest is None:
            have = sorted(number for number, known in self._versions.items() if known.manifest is not None)
            what = "no version is committed yet" if wanted is None else f"version {wanted} is not in the store"
            raise VersionGone(f"{what}; it holds {have}")
        lease_id = next(self._lease_numbers)
        self._leases[lease_id] = (entry.manifest.version, time.monotonic() + self._lease_ttl_s)
        return Lease(lease_id, entry.manifest, self._pool.live())

    @concurrent_endpoint
    async def renew(self, lease_id: int) -> bool:
        """Extend a lease; False when it has ended."""
        if lease_id not in self._leases:
            return False
        self._leases[lease_id] = (self._leases[lease_id][0], time.monotonic() + self._lease_ttl_s)
        return True

    @concurrent_endpoint
    async def release(self, lease_id: int) -> bool:
        """End a lease; False when it had ended before, so that what was read may be torn."""
        held = self._leases.pop(lease_id, None) is not None
        await self._collect()
        return held

    @concurrent_endpoint
    async def stats(self) -> dict[str, Any]:
        """``versions`` (committed, ascending), ``pending``, ``leases``, ``segments``, ``segment_bytes``."""
        return {
            "versions": sorted(number for number, known in self._versions.items() if known.manifest is not None),
            "pending": sorted(number for number, known in self._versions.items() if known.manifest is None),
            "leases": len(self._leases),
            "segments": len(self._pool.live()),
            "segment_bytes": self._pool.nbytes,
        }

    def _check_parts(self, version: int, parts: list[PartManifest]) -> _Version:
        refused = f"version {version} cannot be committed: "
        entry = self._versions.get(version)
        if entry is not None and entry.manifest is not None:
            raise StoreError(refused + "it is already")
        if self._latest is not None and version <= self._latest:
            raise StoreError(refused + f"version {self._latest} is newer")
        if entry is None or not any(part.pieces for part in parts):
            raise StoreError(refused + "nothing was put")
        for part in parts:
            granted = entry.parts.get(part.rank)
            if part.version != version or granted is None or granted.attempt != part.attempt:
                raise StoreError(
                    refused + f"the part of rank {part.rank} belongs to version {part.version} or was put again since"
                )
        return entry

    async def _digests(self, pieces: dict[str, list[Piece]]) -> dict[str, str]:
        split = {name: own for name, own in pieces.items() if own[0].digest is None}
        buckets: dict[str, torch.Tensor] = {}
        with torchstore_compat.segment_transport(shares_memory=True):
            client = await torchstore_compat.client(self._store_name)
            for own in split.values():
                for piece in own:
                    if piece.bucket not in buckets:
                        buckets[piece.bucket] = await client.get(piece.bucket)

        def compute() -> dict[str, str]:
            return {name: digest_of_pieces(own, buckets) for name, own in split.items()}

        return {name: own[0].digest or "" for name, own in pieces.items()} | await asyncio.to_thread(compute)

    async def _collect(self) -> None:
        """Delete what nobody needs: old committed versions without a lease, and parts that were never committed."""
        async with self._collecting:
            now = time.monotonic()
            for lease_id, (version, expires_at) in list(self._leases.items()):
                if expires_at < now:
                    logger.warning("the lease of a reader of version %d expired", version)
                    del self._leases[lease_id]
            leased = {version for version, _ in self._leases.values()}
            committed = sorted(number for number, known in self._versions.items() if known.manifest is not None)
            kept = set(committed[-self._keep_versions :]) | leased
            latest = self._latest if self._latest is not None else -1
            stale = [number for number in self._versions if number <= latest and number not in kept]
            gone = [self._versions.pop(number) for number in stale]
            for entry in gone:
                await self._discard(list(entry.parts.values()))
            if gone and latest in self._versions:
                newest = self._versions[latest].manifest
                self._pool.trim(2 * newest.nbytes if newest is not None else 0)

    async def _discard(self, parts: list[_Part]) -> None:
        client = await torchstore_compat.client(self._store_name)
        for part in parts:
            for key in part.keys:
                if await client.exists(key):
                    await client.delete(key)
            self._pool.give_back(part.segments)


def bucket_key(version: int, rank: int, attempt: str, index: int) -> str:
    """A torchstore key, new for every put: a key put twice with another layout is poisoned."""
    return f"v{version}/r{rank}/a{attempt}/b{index}"
