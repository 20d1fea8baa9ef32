"""The registry: which versions exist, who reads them, and which shared-memory segments are free.

It lives in the process of the torchstore volume and owns all segments, so that they outlive trainers and readers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from monarch.actor import concurrent_endpoint

from forge_async.mesh import ForgeActor
from forge_async.store import torchstore_compat
from forge_async.store.counts import WrittenCounts
from forge_async.store.digest import version_digest
from forge_async.store.errors import LeaseExpired, StoreError, Superseded, VersionGone
from forge_async.store.layout import PartPlan, combined, unpacked_plan
from forge_async.store.messages import Committed, Digests, Grant, Lease, VersionInfo
from forge_async.store.shared_memory import Segment, SegmentPool, attach, create_segment
from forge_async.store.version import Buckets, Part, Version
from forge_async.store.version_digests import Blocks, digest_seams, seams, tensor_digests

logger = logging.getLogger(__name__)


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
        self._versions: dict[int, Version] = {}
        self._latest: int | None = None
        self._leases: dict[int, tuple[Version, float]] = {}
        self._lease_numbers = itertools.count()
        self._attempts = itertools.count()
        self._pool = SegmentPool()
        self._changed = asyncio.Condition()
        """Told whenever a version has come further."""
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

    # ---- writers ----

    @concurrent_endpoint
    async def begin(self, version: int, rank: int, ranks: int, plan: bytes, writer: int | None) -> Grant:
        """Room for one rank's part, ``plan`` (a packed :class:`PartPlan`).

        A rank that has begun or ended its part of this version before starts the version over: what any rank has put
        for it is void. So does one that finds the part of a process that has ended since: its trainer is gone, and with
        its successor's parts it would make a version of two trainers' weights. One that comes to a version that has
        failed without it is told why.

        Args:
            writer: the rank's process, where that shares memory with the store.
        """
        await self._collected()  # its segments can be used again
        shares_memory = writer is not None
        entry = self._versions.get(version)
        if entry is not None and entry.committed is None:
            if entry.knows(rank):
                await self._start_over(entry, f"the part of rank {rank} was put again since")
            elif (ended := entry.ended()) is not None:
                await self._start_over(entry, f"the process of rank {ended} has ended")
        entry = self._open(version)
        if entry.failed:
            await entry.settled  # its finish will be noted, so that its next begin is another attempt
        attempt, part = f"{next(self._attempts)}", unpacked_plan(plan)
        own: Buckets | None = None
        if not part.common:
            buckets = own = self._room(version, f"rank{rank}", attempt, part, shares_memory)
        elif entry.common is None:
            buckets = entry.common = self._room(version, "all", attempt, part, shares_memory)
        else:
            buckets = entry.common
            other = next(unpacked_plan(known.plan).sizes for known in entry.parts.values() if known.own is None)
            if other != part.sizes:
                raise StoreError(
                    f"version {version}: rank {rank} has buckets of {part.sizes} bytes, another rank of {other}; all "
                    "ranks must pass the same layout"
                )
        entry.parts[rank] = Part(attempt, plan, own, writer)
        if shares_memory and entry.counts is None:
            (entry.counts,) = self._pool.take_all([8 * ranks])
            attach(entry.counts).zero_()
        if len(entry.parts) == ranks:
            entry.arranged = asyncio.ensure_future(self._arrange(entry))  # while the ranks begin to write
        segments, counts = (buckets.segments, entry.counts) if shares_memory else (None, None)
        return Grant(attempt, buckets.keys, segments, counts, self._pool.live())

    @concurrent_endpoint
    async def finish(
        self, version: int, rank: int, ranks: int, attempt: str | None, failure: str | None, digests: bytes
    ) -> Committed:
        """End one rank's part (``failure``: why there is none). When all ``ranks`` have ended theirs, the version is
        committed; returns, or raises, the same for all of them.

        ``digests`` are those of its pieces' own blocks, which the rank computes as it writes them.
        """
        if attempt is not None:
            entry = self._granted(version, rank, attempt)
            entry.parts[rank].digests = digests
        else:
            entry = self._open(version)
            if rank in entry.outcomes:
                await self._start_over(entry, f"the part of rank {rank} was put again since")
                entry = self._open(version)
        entry.outcomes[rank] = failure
        if failure is not None:
            entry.fail(f"version {version} was not committed: rank {rank}: {failure}")
        elif len(entry.outcomes) == ranks and not entry.settled.done():
            try:
                await self._commit(entry)
            except Exception as error:
                entry.fail(str(error))
        await self._tell()
        return await asyncio.shield(entry.settled)

    # ---- readers ----

    @concurrent_endpoint
    async def latest(self) -> int | None:
        """The newest committed version."""
        return self._latest

    @concurrent_endpoint
    async def wait_for_newer(self, version: int, timeout_s: float) -> int | None:
        """The newest committed version once it is above ``version``; None after ``timeout_s``."""
        newer = await self._until(lambda: self._latest is not None and self._latest > version, timeout_s)
        return self._latest if newer else None

    @concurrent_endpoint
    async def acquire(self, version: int | None, near: bool) -> Lease:
        """Hold ``version`` (None: the newest) for a reader; ``near``: it shares memory with the store."""
        wanted = self._latest if version is None else version
        entry = self._versions.get(wanted) if wanted is not None else None
        if entry is None or entry.committed is None:
            have = sorted(number for number, known in self._versions.items() if known.committed is not None)
            what = "no version is committed yet" if wanted is None else f"version {wanted} is not in the store"
            raise VersionGone(f"{what}; it holds {have}")
        return await self._lease(entry, near)

    @concurrent_endpoint
    async def acquire_next(self, version: int, near: bool, timeout_s: float) -> Lease | None:
        """Hold the newest version once it is at least ``version``; None after ``timeout_s``.

        A reader that is ``near`` gets ``version`` itself while it is still being written, if all of it lies in shared
        memory.
        """

        def ready() -> Version | None:
            if self._latest is not None and self._latest >= version:
                return self._versions[self._latest]
            entry = self._versions.get(version)
            return entry if entry is not None and (entry.failed or (near and entry.within_reach)) else None

        while (entry := ready()) is None:  # once more: between being woken and going on it may have been started over
            if not await self._until(lambda: ready() is not None, timeout_s):
                return None
        if entry.failed:
            await entry.settled
        return await self._lease(entry, near)

    @concurrent_endpoint
    async def outcome(self, lease_id: int, timeout_s: float) -> Digests | None:
        """The digests of a version that is read ahead, once it is committed; None after ``timeout_s``.

        Raises why it has failed, and when the lease has ended.
        """
        if lease_id not in self._leases:
            raise LeaseExpired("the lease of a version that was being read has expired. Raise store.lease_ttl_s")
        entry, _ = self._leases[lease_id]
        await asyncio.wait({entry.settled}, timeout=timeout_s)
        if entry.failed:
            await entry.settled
        return entry.committed_digests()

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
        """``versions`` (committed, ascending), ``pending``, ``leases``, ``readers`` (leases by version), ``segments``,
        ``segment_bytes``."""
        await self._collected()
        return {
            "versions": sorted(number for number, known in self._versions.items() if known.committed is not None),
            "pending": sorted(number for number, known in self._versions.items() if known.committed is None),
            "leases": len(self._leases),
            "readers": dict(Counter(version.number for version, _ in self._leases.values())),
            "segments": len(self._pool.live()),
            "segment_bytes": self._pool.nbytes,
        }

    @concurrent_endpoint
    async def versions(self) -> list[VersionInfo]:
        """What is held, oldest first."""
        await self._collected()
        held = Counter(entry.number for entry, _ in self._leases.values())
        return [entry.info(held[number]) for number, entry in sorted(self._versions.items())]

    # ---- a version's way ----

    def _open(self, version: int) -> Version:
        """The attempt at ``version`` under way, or a new one."""
        if self._latest is not None and version <= self._latest:
            raise StoreError(f"version {version} cannot be written: version {self._latest} is committed already")
        return self._versions.setdefault(version, Version(version))

    async def _start_over(self, entry: Version, why: str) -> None:
        del self._versions[entry.number]
        entry.fail(f"version {entry.number}: {why}", Superseded)
        await self._tell()
        await self._discard(entry)

    def _granted(self, version: int, rank: int, attempt: str) -> Version:
        entry = self._versions.get(version)
        part = entry.parts.get(rank) if entry is not None else None
        if entry is None or part is None or part.attempt != attempt or entry.committed is not None:
            raise StoreError(f"version {version}: the part of rank {rank} was put again since, or is out of date")
        return entry

    def _room(self, version: int, owner: str, attempt: str, plan: PartPlan, shares_memory: bool) -> Buckets:
        keys = [bucket_key(version, owner, attempt, index) for index in range(len(plan.sizes))]
        if not shares_memory:
            return Buckets(keys, [])
        return Buckets(keys, self._pool.take_all(plan.sizes))

    async def _arrange(self, entry: Version) -> None:
        """All ranks have begun: check that their plans make whole tensors, and let readers see the layout."""
        try:
            entry.layout_data = combined(tuple(entry.parts[rank].plan for rank in sorted(entry.parts)))
        except StoreError as error:
            entry.fail(f"version {entry.number} cannot be committed: {error}")
        else:
            if entry.within_reach and seams(entry.layout_data):
                entry.digesting = asyncio.ensure_future(asyncio.to_thread(_digest_beside_writing, entry))
        await self._tell()

    async def _commit(self, entry: Version) -> None:
        refused = f"version {entry.number} cannot be committed: "
        if entry.arranged is None:
            raise StoreError(refused + f"only {len(entry.parts)} ranks have put a part")
        await entry.arranged
        if entry.failed:
            return
        found = await (self._digest_seams(entry) if entry.digesting is None else entry.digesting)
        if self._versions.get(entry.number) is not entry:  # others were served meanwhile
            raise StoreError(refused + "its parts were put again since")
        if self._latest is not None and entry.number <= self._latest:
            raise StoreError(refused + f"version {self._latest} is newer")
        nbytes = sum(entry.layout.sizes)
        parts = [(unpacked_plan(part.plan), part.digests) for part in entry.parts.values()]
        entry.digests = tensor_digests(entry.layout, parts, found)
        entry.committed = Committed(entry.number, version_digest(dict(entry.digests)), nbytes)
        entry.committed_at = time.time()
        entry.settled.set_result(entry.committed)
        self._latest = entry.number
        self._collection = asyncio.ensure_future(self._collect())

    async def _digest_seams(self, entry: Version) -> Blocks:
        """Where ranks have put their buckets themselves, so that it was not done beside the writing."""
        assert entry.layout_data is not None
        wanted = seams(entry.layout_data)
        if not wanted:
            return {}
        memory, keys = entry.memory(), entry.keys()
        needed = {piece.bucket for name in wanted for piece in entry.layout.tensors[name].pieces}
        client = await torchstore_compat.client(self._store_name)
        with torchstore_compat.segment_transport():
            for bucket in needed - memory.keys():
                memory[bucket] = await client.get(keys[bucket])
        return await asyncio.to_thread(digest_seams, entry.layout, wanted, memory)

    async def _lease(self, entry: Version, near: bool) -> Lease:
        assert entry.layout_data is not None
        lease_id = next(self._lease_numbers)
        self._leases[lease_id] = (entry, time.monotonic() + self._lease_ttl_s)
        if not near:
            if entry.announced is None:
                entry.announced = asyncio.ensure_future(self._announce(entry))
            try:
                await asyncio.shield(entry.announced)
            except Exception:  # the next reader tries it anew
                entry.announced = None
                del self._leases[lease_id]
                raise
        return Lease(
            lease_id,
            entry.number,
            entry.layout_data,
            entry.keys(),
            entry.segments(),
            self._pool.live(),
            entry.counts,
            entry.committed_digests(),
        )

    async def _announce(self, entry: Version) -> None:
        """Hand torchstore the segments of a version, for readers that share no memory with them."""
        client, keys = await torchstore_compat.client(self._store_name), entry.keys()
        with torchstore_compat.segment_transport():
            for bucket, memory in entry.memory().items():
                await client.put(keys[bucket], memory[: entry.layout.sizes[bucket]])

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for ``condition``; False after ``timeout_s``."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(condition), timeout_s)
            except TimeoutError:
                return False
        return True

    # ---- clean-up ----

    async def _collected(self) -> None:
        if self._collection is not None:
            await asyncio.shield(self._collection)

    async def _collect(self) -> None:
        """Delete what nobody needs: old committed versions without a lease, and parts that were never committed."""
        async with self._collecting:
            now = time.monotonic()
            for lease_id, (entry, expires_at) in list(self._leases.items()):
                if expires_at < now:
                    logger.warning("the lease of a reader of version %d expired", entry.number)
                    del self._leases[lease_id]
            leased = {entry.number for entry, _ in self._leases.values() if entry.committed is not None}
            committed = sorted(number for number, known in self._versions.items() if known.committed is not None)
            kept = set(committed[-self._keep_versions :]) | leased
            latest = self._latest if self._latest is not None else -1
            stale = [number for number in self._versions if number <= latest and number not in kept]
            gone = [self._versions.pop(number) for number in stale]
            for entry in gone:
                entry.fail(f"version {latest} was committed meanwhile", Superseded)
            if gone:
                await self._tell()
            for entry in gone:
                await self._discard(entry)
            newest = self._versions.get(latest)
            if gone and newest is not None and newest.committed is not None:
                self._pool.trim(2 * newest.committed.nbytes)

    async def _discard(self, entry: Version) -> None:
        """Delete a version's buckets. Segments of one that was committed are free; of another, a rank may be writing
        still."""
        near = entry.segments()
        if entry.announced is not None:
            await asyncio.wait({entry.announced})
            near = {}
        client = await torchstore_compat.client(self._store_name)
        for bucket, key in enumerate(entry.keys()):
            if bucket not in near and await client.exists(key):
                await client.delete(key)
        segments = [*entry.segments().values(), *([entry.counts] if entry.counts is not None else [])]
        if entry.committed is not None:
            self._pool.give_back(segments)
        else:
            await asyncio.gather(*([entry.digesting] if entry.digesting is not None else []), return_exceptions=True)
            self._pool.give_up(segments)


def _digest_beside_writing(entry: Version) -> Blocks:
    """The digests of what no rank digests, each as soon as it is written; not all, if the attempt fails."""
    assert entry.counts is not None and entry.layout_data is not None
    counts, tensors = WrittenCounts(entry.counts), entry.layout.tensors

    def ready(name: str) -> bool:
        return counts.wait(tensors[name].needs(), entry.settled.done)

    return digest_seams(entry.layout, seams(entry.layout_data), entry.memory(), ready)


def bucket_key(version: int, owner: str, attempt: str, index: int) -> str:
    """A torchstore key, new for every put: a key put twice with another layout is poisoned."""
    return f"v{version}/{owner}/a{attempt}/b{index}"
