"""kill -9 of each of the three sides of a publication: no torn version is ever visible, errors say what happened."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable

import cloudpickle
import pytest
import torch
from monarch.actor import concurrent_endpoint

from forge_async.mesh import ActorDied, ForgeActor, MeshRuntime
from forge_async.store import (
    FullTensor,
    StoreConfig,
    StoreError,
    TensorShard,
    WeightStore,
    version_digest,
    writer,
)
from forge_async.store.layout import lies_in_full

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test modules

LAYOUT = [
    FullTensor("rows", torch.float32, (6, 50_000)),
    FullTensor("columns", torch.float32, (4, 70_000)),
    FullTensor("half", torch.bfloat16, (33,)),
    FullTensor("scalar", torch.float32, ()),
]


def full_tensors(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {full.name: torch.randn(full.shape, generator=generator).to(full.dtype) for full in LAYOUT}


def shards_of(version: int, rank: int) -> list[TensorShard]:
    """Two ranks' parts: one tensor split by rows, unevenly, one by columns, the others of one rank each."""
    full = full_tensors(version)
    rows = full["rows"][:5] if rank == 0 else full["rows"][5:]
    columns = full["columns"][:, :20_000] if rank == 0 else full["columns"][:, 20_000:]
    shards = [
        TensorShard("rows", rows, (6, 50_000), (5 * rank, 0)),
        TensorShard("columns", columns, (4, 70_000), (0, 20_000 * rank)),
    ]
    own = ("half", "scalar")[rank]
    return [*shards, TensorShard.whole(own, full[own])]


class Rank(ForgeActor):
    """A trainer rank or a reader, whichever endpoint is called."""

    @concurrent_endpoint
    async def publish(self, store: WeightStore, version: int, hang_at: int | None = None) -> tuple[str, int]:
        """Publish this rank's part; with ``hang_at`` sleep in that copy, with half of the version written."""
        rank = int(os.environ["RANK"])
        if hang_at is not None and rank == 1:
            write, copies = writer.Place.write, iter(range(100))

            def hang(place: writer.Place, values: torch.Tensor, done: Callable[[int], object]) -> bytes:
                if next(copies) == hang_at:
                    time.sleep(600)
                return write(place, values, done)

            writer.Place.write = hang  # type: ignore[method-assign]
        committed = await store.publish(version, rank, 2, shards_of(version, rank), LAYOUT)
        return committed.digest, committed.nbytes

    @concurrent_endpoint
    async def publish_misfit(self, store: WeightStore, version: int) -> None:
        rank = int(os.environ["RANK"])
        shards = shards_of(version, rank)
        if rank == 1:
            shards.append(TensorShard.whole("unknown", torch.ones(3)))
        await store.publish(version, rank, 2, shards, LAYOUT)

    @concurrent_endpoint
    async def publish_filled(self, store: WeightStore, first: int, count: int) -> int:
        """Small versions of one tensor; the largest number of bytes the store ever held."""
        most = 0
        for version in range(first, first + count):
            shard = TensorShard.whole("w", torch.full((1 << 18,), float(version)))
            await store.publish(version, 0, 1, [shard])
            most = max(most, (await store.stats())["segment_bytes"])
        return most

    @concurrent_endpoint
    async def pull(self, store: WeightStore) -> tuple[int, str, str, list[bool]]:
        async with await store.acquire() as pulled:
            views = [lies_in_full(entry.pieces) for entry in pulled.manifest.tensors.values()]
            return pulled.version, version_digest(dict(pulled)), pulled.manifest.digest, views

    @concurrent_endpoint
    async def pull_slowly(self, store: WeightStore, seconds: float) -> tuple[int, set[float]]:
        """Read a version piece by piece over ``seconds``; the values seen."""
        seen: set[float] = set()
        async with await store.acquire() as pulled:
            for part in pulled["w"].chunk(10):
                seen |= set(part.unique().tolist())
                await asyncio.sleep(seconds / 10)
            return pulled.version, seen


async def until(store: WeightStore, name: str, value: object) -> None:
    deadline = time.monotonic() + 30
    while (await store.stats())[name] != value:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_ranks_share_a_layout_and_a_failing_one_fails_all() -> None:
    async with MeshRuntime():
        store = await WeightStore.create(StoreConfig(bucket_mib=1))
        ranks, reader = await Rank.options(procs=2).spawn(), await Rank.spawn()
        expected = version_digest(full_tensors(1))
        assert {digest for digest, _ in await ranks.call("publish", store, 1)} == {expected}
        version, read, digest, views = await reader.call_one("pull", store)
        assert (version, read, digest) == (1, expected, expected)
        assert all(views), "full tensors lie in one place, also those that two ranks have written"
        with pytest.raises(StoreError, match="version 2 was not committed: rank 1: unknown: .*no such tensor"):
            await ranks.call("publish_misfit", store, 2, timeout=20)
        assert (await reader.call_one("pull", store))[:2] == (1, expected)

        # The same ranks try again, and one of them is killed half-way through its part.
        hanging = asyncio.ensure_future(ranks.call("publish", store, 2, 1))
        await until(store, "pending", [2])
        await asyncio.sleep(1.0)
        assert not hanging.done()
        os.kill(ranks.pids()[1], signal.SIGKILL)
        with pytest.raises(ActorDied, match=f"process {ranks.pids()[1]} ended"):
            await hanging
        assert (await reader.call_one("pull", store))[:2] == (1, expected), "half a version is never visible"
        await ranks.stop()

        fresh = await Rank.options(procs=2).spawn()
        digests = {digest for digest, _ in await fresh.call("publish", store, 2)}
        assert digests == {version_digest(full_tensors(2))}
        assert (await reader.call_one("pull", store))[:2] == (2, *digests)
        await fresh.call("publish", store, 3)
        stats = await store.stats()
        assert (stats["versions"], stats["pending"]) == ([2, 3], [])

        # A trainer is killed when only its rank 0 has put its part: its successor's rank 1 does not complete that.
        hanging = asyncio.ensure_future(reader.call_one("publish", store, 4))
        await until(store, "pending", [4])
        await asyncio.sleep(1.0)
        os.kill(reader.pids()[0], signal.SIGKILL)
        with pytest.raises(ActorDied):
            await hanging
        second = asyncio.ensure_future(store.publish(4, 1, 2, shards_of(5, 1), LAYOUT))
        await asyncio.sleep(0.5)
        first = store.publish(4, 0, 2, shards_of(5, 0), LAYOUT)
        for committed in await asyncio.wait_for(asyncio.gather(first, second), 20):
            assert committed.digest == version_digest(full_tensors(5))
        await store.close()


async def test_killed_and_slow_readers_and_the_store_itself() -> None:
    async with MeshRuntime():
        store = await WeightStore.create(StoreConfig(lease_ttl_s=1.0, keep_versions=2))
        deaths: list[str] = []
        store.on_death(deaths.append)
        writer, victim, slow = await Rank.spawn(), await Rank.spawn(), await Rank.spawn()
        await writer.call_one("publish_filled", store, 0, 1)

        pulling = asyncio.ensure_future(slow.call_one("pull_slowly", store, 3.0))
        dying = asyncio.ensure_future(victim.call_one("pull_slowly", store, 60.0))
        await until(store, "leases", 2)
        os.kill(victim.pids()[0], signal.SIGKILL)
        most = await writer.call_one("publish_filled", store, 1, 10)
        assert most <= 6 << 20, "one held version, two kept, one in the making, and room to use again"
        with pytest.raises(ActorDied):
            await dying
        assert await pulling == (0, {0.0}), "ten newer versions have not touched the one that is read"
        await asyncio.sleep(1.2)
        await writer.call_one("publish_filled", store, 11, 1)
        stats = await store.stats()
        assert (stats["versions"], stats["leases"]) == ([10, 11], 0)

        pulling = asyncio.ensure_future(slow.call_one("pull_slowly", store, 60.0))
        publishing = asyncio.ensure_future(writer.call_one("publish_filled", store, 12, 10_000))
        await asyncio.sleep(0.5)
        store_pid = store._handle.pids()[0]
        os.kill(store_pid, signal.SIGKILL)
        with pytest.raises(ActorDied, match=f"latest: .*process {store_pid} ended"):
            await asyncio.wait_for(_latest(store), 5)
        assert deaths == [f"process {store_pid} ended"], "known at once, by which a run ends"
        publishing.cancel()
        pulling.cancel()
        await asyncio.gather(pulling, publishing, return_exceptions=True)
        await victim.stop()


async def _latest(store: WeightStore) -> None:
    """Ask until the store's death is known."""
    while True:
        await store.latest()
        await asyncio.sleep(0.05)
