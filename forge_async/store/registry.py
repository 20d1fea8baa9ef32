"""The registry: which versions exist, who reads them, and which shared-memory segments are free.

It lives in the process of the torchstore volume and owns all segments, so that they outlive trainers and readers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from monarch.actor import concurrent_endpoint

from forge_async.mesh import ForgeActor
from forge_async.store import torchstore_compat
from forge_async.store.digest import pieces_digest
from forge_async.store.errors import StoreError, VersionGone
from forge_async.store.layout import (
    Manifest,
    Part,
    Piece,
    build_manifest,
    digest_of_pieces,
    group_pieces,
)
from forge_async.store.shared_memory import Segment, attach, create_segment, destroy_segment

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Grant:
    """The answer to ``begin``: where a rank may write its part."""

    attempt: str
    keys: list[str]
    """One per bucket: its torchstore key."""
    segments: list[Segment] | None
    """One per bucket; None: the client shares no memory with the store and puts the buckets itself."""
    live_segments: list[str]


@dataclass(frozen=True)
class Lease:
    """The answer to ``acquire``: a version that stays until released or expired."""

    lease_id: int
    manifest: Manifest
    segments: dict[str, Segment]
    """Of those buckets that lie in shared memory, by key: a reader on this host needs nothing else."""
    live_segments: list[str]


@dataclass(frozen=True)
class Committed:
    """The answer to ``finish``: a version that readers see."""

    version: int
    digest: str
    nbytes: int


Place = tuple[str, int]
"""Where a full tensor lies: its bucket's key and the bytes from the bucket's start."""


@dataclass
class _Buckets:
    """Room for a version, or for one rank's part of it."""

    sizes: dict[str, int]
    """Bytes by torchstore key."""
    segments: list[Segment]
    """One per bucket, none where the rank puts its buckets itself."""
    put: asyncio.Future[Any] | None = None
    """Done when torchstore has the segments' addresses."""


@dataclass
class _Part:
    """What one rank was granted, and has delivered, for one version."""

    attempt: str
    own: _Buckets | None
    """None: it writes to the buckets that all ranks have in common."""
    pieces: list[Piece] = field(default_factory=list)


class _Version:
    def __init__(self) -> None:
        self.parts: dict[int, _Part] = {}
        self.common: _Buckets | None = None
        self.outcomes: dict[int, str | None] = {}
        """What went wrong, or None, of each rank that has finished."""
        self.filled: Counter[Place] = Counter()
        """Elements delivered of tensors that several ranks write to one place."""
        self.digesting: list[asyncio.Future[dict[Place, str]]] = []
        self.manifest: Manifest | None = None
        self.settled: asyncio.Future[Committed] = asyncio.get_running_loop().create_future()
        """What every rank's ``finish`` waits for."""
        self.settled.add_done_callback(lambda future: future.exception())  # perhaps nobody waits

    def knows(self, rank: int) -> bool:
        """Whether the rank has begun or ended its part: if it begins another, that is a new attempt."""
        return rank in self.parts or rank in self.outcomes

    def fail(self, message: str) -> None:
        if not self.settled.done():
            self.settled.set_exception(StoreError(message))

    def all_buckets(self) -> list[_Buckets]:
        found = [part.own for part in self.parts.values()] + [self.common]
        return [buckets for buckets in found if buckets is not None]


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

    def give_up(self, segments: list[Segment]) -> None:
        """Segments that somebody may still write to: never used again."""
        for segment in segments:
            destroy_segment(self.used.pop(segment.segment_id))

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
        self._collection: asyncio.Future[None] | None = None
        """The newest clean-up, which runs beside what nobody should wait for it."""
        self._token = os.urandom(32)
        self._probe = create_segment(4096)
        os.pwrite(self._probe.descriptor, self._token, 0)

    @concurrent_endpoint
    async def probe(self) -> tuple[Segment, bytes]:
        """A small segment and its content: who finds the same in it shares memory with the store."""
        return self._probe, self._token

    @concurrent_endpoint
    async def begin(self, version: int, rank: int, sizes: list[int], shares_memory: bool, common: bool) -> Grant:
        """Room for the buckets of one rank's part; with ``common``, all ranks get the same buckets.

        A rank that has begun or ended its part of this version before starts the version over: what any rank has put
        for it is void. One that comes to a version that has failed without it is told why.
        """
        await self._collected()  # its segments can be used again
        entry = self._versions.get(version)
        if entry is not None and entry.manifest is None and entry.knows(rank):
            await self._start_over(version, entry, rank)
        entry = self._open(version)
        if entry.settled.done():
            await entry.settled  # its finish will be noted, so that its next begin is another attempt
        attempt = f"{next(self._attempts)}"
        own: _Buckets | None = None
        if not common:
            buckets = own = self._room(version, f"rank{rank}", attempt, sizes, shares_memory)
        elif entry.common is None:
            buckets = entry.common = self._room(version, "all", attempt, sizes, shares_memory)
        else:
            buckets = entry.common
            if list(buckets.sizes.values()) != sizes:
                raise StoreError(
                    f"version {version}: rank {rank} has buckets of {sizes} bytes, another rank of "
                    f"{list(buckets.sizes.values())}; all ranks must pass the same layout"
                )
        entry.parts[rank] = _Part(attempt, own)
        return Grant(attempt, list(buckets.sizes), buckets.segments if shares_memory else None, self._pool.live())

    @concurrent_endpoint
    async def deliver(self, version: int, rank: int, attempt: str, pieces: list[Piece]) -> None:
        """Pieces that are written. Tensors that are complete by them are digested here, beside further writing."""
        entry, part = self._granted(version, rank, attempt)
        part.pieces += pieces
        memory = self._memory_of(entry)
        complete = []
        for piece in pieces:
            if piece.digest is not None or piece.bucket not in memory:
                continue
            if not piece.is_whole:
                place = (piece.bucket, piece.start)
                entry.filled[place] += piece.numel if piece.in_full else 0
                if entry.filled[place] != math.prod(piece.global_shape):
                    continue
            complete.append(piece)

        def compute() -> dict[Place, str]:
            found = {}
            for piece in complete:
                dtype, shape = getattr(torch, piece.dtype), piece.global_shape
                digest = pieces_digest(dtype, shape, [piece.full_view(memory[piece.bucket])])
                found[piece.bucket, piece.start] = digest
            return found

        if complete:
            entry.digesting.append(asyncio.ensure_future(asyncio.to_thread(compute)))

    @concurrent_endpoint
    async def finish(self, version: int, rank: int, ranks: int, attempt: str | None, failure: str | None) -> Committed:
        """End one rank's part (``failure``: why there is none). When all ``ranks`` have ended theirs, the version is
        committed; returns, or raises, the same for all of them."""
        if attempt is not None:
            entry, _ = self._granted(version, rank, attempt)
        else:
            entry = self._open(version)
            if rank in entry.outcomes:
                await self._start_over(version, entry, rank)
                entry = self._open(version)
        entry.outcomes[rank] = failure
        if failure is not None:
            entry.fail(f"version {version} was not committed: rank {rank}: {failure}")
        elif len(entry.outcomes) == ranks and not entry.settled.done():
            parts = [Part(version, other, part.attempt) for other, part in sorted(entry.parts.items())]
            try:
                manifest = await self._commit(version, parts)
            except Exception as error:
                entry.fail(str(error))
                raise
            if not entry.settled.done():
                entry.settled.set_result(Committed(version, manifest.digest, manifest.nbytes))
        return await asyncio.shield(entry.settled)

    @concurrent_endpoint
    async def commit(self, version: int, parts: list[Part]) -> Manifest:
        """Check that the parts make whole tensors, digest those that are not yet, and show the version."""
        return await self._commit(version, parts)

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
        return Lease(lease_id, entry.manifest, self._segments_of(entry), self._pool.live())

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
        self._collection = asyncio.ensure_future(self._collect())
        return held

    @concurrent_endpoint
    async def stats(self) -> dict[str, Any]:
        """``versions`` (committed, ascending), ``pending``, ``leases``, ``segments``, ``segment_bytes``."""
        await self._collected()
        return {
            "versions": sorted(number for number, known in self._versions.items() if known.manifest is not None),
            "pending": sorted(number for number, known in self._versions.items() if known.manifest is None),
            "leases": len(self._leases),
            "segments": len(self._pool.live()),
            "segment_bytes": self._pool.nbytes,
        }

    def _open(self, version: int) -> _Version:
        """The attempt at ``version`` under way, or a new one."""
        if self._latest is not None and version <= self._latest:
            raise StoreError(f"version {version} cannot be written: version {self._latest} is committed already")
        return self._versions.setdefault(version, _Version())

    async def _start_over(self, version: int, entry: _Version, rank: int) -> None:
        del self._versions[version]
        entry.fail(f"version {version}: the part of rank {rank} was put again since")
        await self._discard(entry)

    def _granted(self, version: int, rank: int, attempt: str) -> tuple[_Version, _Part]:
        entry = self._versions.get(version)
        part = entry.parts.get(rank) if entry is not None else None
        if entry is None or part is None or part.attempt != attempt or entry.manifest is not None:
            raise StoreError(f"version {version}: the part of rank {rank} was put again since, or is out of date")
        return entry, part

    def _room(self, version: int, owner: str, attempt: str, sizes: list[int], shares_memory: bool) -> _Buckets:
        keys = [bucket_key(version, owner, attempt, index) for index in range(len(sizes))]
        if not shares_memory:
            return _Buckets(dict(zip(keys, sizes, strict=True)), [])
        segments = [self._pool.take(nbytes) for nbytes in sizes]
        buckets = _Buckets(dict(zip(keys, sizes, strict=True)), segments)
        buckets.put = asyncio.ensure_future(self._put_addresses(buckets))
        return buckets

    async def _put_addresses(self, buckets: _Buckets) -> None:
        """Hand torchstore the segments, whose contents are written meanwhile."""
        client = await torchstore_compat.client(self._store_name)
        with torchstore_compat.segment_transport():
            for (key, nbytes), segment in zip(buckets.sizes.items(), buckets.segments, strict=True):
                await client.put(key, attach(segment)[:nbytes])

    def _check_parts(self, version: int, parts: list[Part]) -> _Version:
        refused = f"version {version} cannot be committed: "
        entry = self._versions.get(version)
        if entry is not None and entry.manifest is not None:
            raise StoreError(refused + "it is already")
        if self._latest is not None and version <= self._latest:
            raise StoreError(refused + f"version {self._latest} is newer")
        if entry is None:
            raise StoreError(refused + "nothing was put")
        for part in parts:
            granted = entry.parts.get(part.rank)
            if part.version != version or granted is None or granted.attempt != part.attempt:
                raise StoreError(
                    refused + f"the part of rank {part.rank} belongs to version {part.version} or was put again since"
                )
        return entry

    async def _commit(self, version: int, parts: list[Part]) -> Manifest:
        entry = self._check_parts(version, parts)
        pieces = group_pieces(piece for part in parts for piece in entry.parts[part.rank].pieces)
        if not pieces:
            raise StoreError(f"version {version} cannot be committed: nothing was put")
        granted = entry.all_buckets()
        await asyncio.gather(*(buckets.put for buckets in granted if buckets.put is not None))
        digests = await self._digests(entry, pieces)
        sizes = {key: nbytes for buckets in granted for key, nbytes in buckets.sizes.items()}
        used = {piece.bucket for own in pieces.values() for piece in own}
        manifest = build_manifest(version, pieces, {key: sizes[key] for key in sizes if key in used}, digests)
        entry = self._check_parts(version, parts)  # again: others were served meanwhile
        entry.manifest = manifest
        self._latest = version
        async with self._committed:
            self._committed.notify_all()
        self._collection = asyncio.ensure_future(self._collect())
        return manifest

    def _memory_of(self, entry: _Version) -> dict[str, torch.Tensor]:
        """Buckets in this process's memory, by key."""
        return {key: attach(segment) for key, segment in self._segments_of(entry).items()}

    def _segments_of(self, entry: _Version) -> dict[str, Segment]:
        return {
            key: segment
            for buckets in entry.all_buckets()
            for key, segment in zip(buckets.sizes, buckets.segments, strict=False)
        }

    async def _digests(self, entry: _Version, pieces: dict[str, list[Piece]]) -> dict[str, str]:
        """Each tensor's digest: its writer's, one computed at delivery, or else computed now."""
        known: dict[Place, str] = {}
        for computed in await asyncio.gather(*entry.digesting):
            known |= computed
        digests = {name: own[0].digest or known.get((own[0].bucket, own[0].start)) for name, own in pieces.items()}
        missing = {name: own for name, own in pieces.items() if digests[name] is None}
        memory = self._memory_of(entry)
        with torchstore_compat.segment_transport():
            client = await torchstore_compat.client(self._store_name)
            for key in {piece.bucket for own in missing.values() for piece in own} - memory.keys():
                memory[key] = await client.get(key)

        def compute() -> dict[str, str]:
            return {name: digest_of_pieces(own, memory) for name, own in missing.items()}

        computed_now = await asyncio.to_thread(compute) if missing else {}
        return {name: digest for name, digest in digests.items() if digest is not None} | computed_now

    async def _collected(self) -> None:
        if self._collection is not None:
            await asyncio.shield(self._collection)

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
                entry.fail(f"version {latest} was committed meanwhile")
                await self._discard(entry)
            if gone and latest in self._versions:
                newest = self._versions[latest].manifest
                self._pool.trim(2 * newest.nbytes if newest is not None else 0)

    async def _discard(self, entry: _Version) -> None:
        """Delete a version's buckets. Segments of one that was committed are free; of another, a rank may be writing
        still."""
        client = await torchstore_compat.client(self._store_name)
        for buckets in entry.all_buckets():
            if buckets.put is not None:
                await asyncio.wait({buckets.put})
            for key in buckets.sizes:
                if await client.exists(key):
                    await client.delete(key)
            if entry.manifest is not None:
                self._pool.give_back(buckets.segments)
            else:
                await asyncio.gather(*entry.digesting, return_exceptions=True)
                self._pool.give_up(buckets.segments)


def bucket_key(version: int, owner: str, attempt: str, index: int) -> str:
    """A torchstore key, new for every put: a key put twice with another layout is poisoned."""
    return f"v{version}/{owner}/a{attempt}/b{index}"
