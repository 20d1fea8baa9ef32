"""Publish and pull across real processes: trainer ranks, readers and the store are Monarch actors."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest
import pytest_asyncio
import torch
from monarch.actor import concurrent_endpoint

from forge_async.errors import ConfigError
from forge_async.mesh import ActorDied, ForgeActor, MeshRuntime
from forge_async.store import (
    FullTensor,
    StoreConfig,
    StoreError,
    TensorShard,
    VersionGone,
    WeightStore,
    tensor_digest,
    torchstore_compat,
    version_digest,
    writer,
)
from forge_async.store.digest import SPAN_BYTES
from forge_async.store.part_plan import plan_part

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test modules

ROWS = (5, 2)
"""Rows of the sharded tensor on each of two ranks: uneven, as FSDP leaves them."""


def full_tensors(version: int) -> dict[str, torch.Tensor]:
    """What a version holds: a sharded matrix, one smaller than the rank count, a bf16 and a scalar."""
    generator = torch.Generator().manual_seed(version)
    return {
        "model.embed.weight": torch.randn(7, 3, generator=generator),
        "model.norm.weight": torch.randn(1, generator=generator),
        "model.big.weight": torch.randn(600, 1000, generator=generator),
        "model.half.weight": torch.randn(4, 4, generator=generator).bfloat16(),
        "model.scale": torch.tensor(float(version)),
    }


def shards(version: int, rank: int, ranks: int) -> list[TensorShard]:
    """One rank's shards: split along rows; the norm has an empty shard on rank 1, the rest is replicated."""
    full = full_tensors(version)
    if ranks == 1:
        return [TensorShard.whole(name, tensor) for name, tensor in full.items()]
    found = []
    for name, rows in (("model.embed.weight", ROWS), ("model.norm.weight", (1, 0)), ("model.big.weight", (400, 200))):
        start = sum(rows[:rank])
        part = full[name][start : start + rows[rank]]
        found.append(TensorShard(name, part, tuple(full[name].shape), (start,) + (0,) * (part.dim() - 1)))
    if rank == 0:
        found += [TensorShard.whole(name, full[name]) for name in ("model.half.weight", "model.scale")]
    return found


def layout_of(version: int) -> list[FullTensor]:
    """Of :func:`full_tensors`."""
    return [FullTensor(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in full_tensors(version).items()]


class Peer(ForgeActor):
    """A trainer rank or a reader, whichever endpoint is called."""

    def __init__(self) -> None:
        self.held = None

    @concurrent_endpoint
    async def publish(self, store: WeightStore, version: int, ranks: int = 1) -> str:
        rank = int(os.environ["RANK"]) if ranks > 1 else 0
        return (await store.publish(version, rank, ranks, shards(version, rank, ranks))).digest

    @concurrent_endpoint
    async def publish_many(self, store: WeightStore, first: int, count: int) -> list[dict]:
        stats = []
        for version in range(first, first + count):
            filled = torch.full((1 << 16,), float(version))
            await store.publish(version, 0, 1, [TensorShard.whole("w", filled)])
            stats.append(await store.stats())
        return stats

    @concurrent_endpoint
    async def pull(self, store: WeightStore, version: int | None = None):
        async with await store.acquire(version) as pulled:
            live = {
                name: torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype))
                for name, entry in pulled.manifest.tensors.items()
            }
            for name, tensor in live.items():
                pulled.copy_into(name, tensor)
            copied = {name: tensor.clone() for name, tensor in pulled.items()}
            return pulled.version, pulled.manifest, copied, version_digest(live)

    @concurrent_endpoint
    async def hold(self, store: WeightStore, version: int | None = None) -> int:
        self.held = await store.acquire(version)
        return self.held.version

    @concurrent_endpoint
    async def held_digest(self) -> tuple[str, str]:
        return version_digest(dict(self.held)), self.held.manifest.digest

    @concurrent_endpoint
    async def release(self) -> None:
        await self.held.release()

    @concurrent_endpoint
    async def wait_for_newer(self, store: WeightStore, version: int) -> int:
        return await store.wait_for_newer(version)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def runtime():
    before = set(os.listdir("/dev/shm"))
    async with MeshRuntime() as opened:
        yield opened
    assert opened.processes() == []
    assert {name for name in set(os.listdir("/dev/shm")) - before if "torch" in name or "forge" in name} == set()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def store(runtime):
    store = await WeightStore.create(StoreConfig(bucket_mib=1, transport="shared_memory"))
    yield store
    await store.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def writers(runtime):
    return await Peer.options(procs=2).spawn()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def reader(runtime):
    return await Peer.spawn()


async def test_version_is_invisible_until_committed(store, writers, reader):
    assert await store.latest() is None
    with pytest.raises(VersionGone, match="no version is committed yet"):
        await reader.call_one("pull", store)
    waiting = asyncio.ensure_future(reader.call_one("wait_for_newer", store, 0))
    with pytest.raises(StoreError, match=r"version 1 cannot be committed: .*embed\.weight: the shards hold 15 of 21"):
        await store.publish(1, 0, 1, shards(1, 0, 2))
    first = asyncio.ensure_future(store.publish(1, 0, 2, shards(1, 0, 2)))
    await asyncio.sleep(0.3)
    assert not first.done()
    assert await store.latest() is None
    assert not waiting.done()
    second = await store.publish(1, 1, 2, shards(1, 1, 2))
    assert await waiting == 1
    assert second == await first
    assert second.digest == version_digest(full_tensors(1))


@pytest.mark.parametrize(("version", "ranks"), [(2, 1), (3, 2)])
async def test_pulled_tensors_equal_the_published(store, writers, reader, version, ranks):
    await check_round_trip(store, writers, reader, version, ranks)


async def test_a_part_put_again_voids_the_former(store):
    former = asyncio.ensure_future(store.publish(4, 0, 2, shards(4, 0, 2)))
    await asyncio.sleep(0.3)
    again = asyncio.ensure_future(store.publish(4, 0, 2, shards(4, 0, 2)))
    with pytest.raises(StoreError, match="the part of rank 0 was put again since"):
        await former
    await store.publish(4, 1, 2, shards(4, 1, 2))
    assert (await again).digest == version_digest(full_tensors(4))
    with pytest.raises(StoreError, match="version 4 .*version 4 is committed already"):
        await store.publish(4, 0, 1, shards(4, 0, 1))


async def test_a_version_is_read_while_it_is_written(store, monkeypatch):
    """Tensor by tensor, as soon as each is written; it counts once committed."""
    expected = {f"w{index}": torch.full((1000,), float(index)) for index in range(6)}
    write, gates = writer.Place.write, {name: threading.Event() for name in expected}

    def write_when_told(place, values, done):
        assert gates[place.name].wait(20)
        return write(place, values, done)

    monkeypatch.setattr(writer.Place, "write", write_when_told)
    parts = [TensorShard.whole(name, tensor) for name, tensor in expected.items()]
    publishing = asyncio.ensure_future(store.publish(5, 0, 1, parts))
    pulled = await asyncio.wait_for(store.acquire_next(5), 10)
    committing = asyncio.ensure_future(pulled.committed())
    assert (pulled.version, pulled.manifest.digest, await store.latest()) == (5, "", 4)
    assert pulled.shapes == dict.fromkeys(expected, (1000,))
    for name, gate in gates.items():
        reading = asyncio.ensure_future(asyncio.to_thread(pulled.__getitem__, name))
        await asyncio.sleep(0.05)
        assert not (reading.done() or publishing.done() or committing.done()), name
        gate.set()
        assert torch.equal(await asyncio.wait_for(reading, 10), expected[name])
    assert (await committing).digest == (await publishing).digest == version_digest(expected)
    await pulled.release()
    async with await store.acquire_next(3) as newest:
        assert newest.version == 5


async def test_who_reads_ahead_is_told_of_a_failure(store, writers, monkeypatch):
    monkeypatch.setattr(writer, "write_shards", lambda *_: 1 / 0)
    waiting = asyncio.ensure_future(store.acquire_next(6))
    publishing = asyncio.ensure_future(store.publish(6, 0, 2, shards(6, 0, 2), layout_of(6)))
    with pytest.raises(StoreError, match="version 6 was not committed: rank 0: ZeroDivisionError"):
        await asyncio.wait_for(waiting, 10)
    with pytest.raises(StoreError, match="rank 0: ZeroDivisionError"):
        await publishing
    gate = threading.Event()
    monkeypatch.setattr(writer, "write_shards", lambda *_: gate.wait(20) and 1 / 0)
    publishing = asyncio.ensure_future(store.publish(7, 0, 1, shards(7, 0, 1), layout_of(7)))
    pulled = await asyncio.wait_for(store.acquire_next(7), 10)
    reading = asyncio.ensure_future(asyncio.to_thread(lambda: pulled["model.big.weight"]))
    await asyncio.sleep(0.2)
    gate.set()
    for result in (reading, publishing, pulled.committed()):
        with pytest.raises(StoreError, match="version 7 was not committed: rank 0: ZeroDivisionError"):
            await asyncio.wait_for(result, 10)
    await pulled.release()


@pytest.mark.parametrize(("version", "granted"), [(8, False), (9, True)], ids=["before its room", "in its room"])
async def test_a_rank_that_comes_after_anothers_failure_is_told_and_may_try_again(store, version, granted):
    failure = f"version {version} was not committed: rank 1: no space left"

    async def fail() -> None:
        plan = plan_part((), None, 1 << 20)
        attempt = (await store.request("begin", version, 1, 2, plan, os.getpid())).attempt if granted else None
        with pytest.raises(StoreError, match=failure):
            await store.request("finish", version, 1, 2, attempt, "no space left", b"")

    async def publish(rank: int) -> str:
        return (await asyncio.wait_for(store.publish(version, rank, 2, shards(version, rank, 2)), 10)).digest

    for _ in range(2):
        await fail()
        with pytest.raises(StoreError, match=failure):
            await publish(0)
    assert set(await asyncio.gather(publish(0), publish(1))) == {version_digest(full_tensors(version))}


async def test_ranks_count_from_0(store):
    """Else the store would wait for ever for ranks that nobody has."""
    for rank, ranks in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(StoreError, match=f"rank {rank} of {ranks} cannot publish"):
            await asyncio.wait_for(store.publish(9, rank, ranks, shards(9, 0, 1)), 10)


async def test_a_leased_version_stays_and_goes_when_released(store, writers, reader):
    assert await reader.call_one("hold", store) == 9
    await writers.call_one("publish_many", store, 10, 4)
    assert (await store.stats())["versions"] == [9, 12, 13]
    shown = await store.versions()
    assert [(each.version, each.leases, each.nbytes > 0) for each in shown] == [
        (9, 1, True),
        (12, 0, True),
        (13, 0, True),
    ]
    assert shown[0].digest == version_digest(full_tensors(9))
    assert 0 <= time.time() - shown[2].committed_at < 60 and shown[0].committed_at <= shown[2].committed_at
    assert "versions in the store (3)" in repr(shown)
    read, published = await reader.call_one("held_digest")
    assert read == published == version_digest(full_tensors(9))
    with pytest.raises(VersionGone, match=r"version 5 is not in the store; it holds \[9, 12, 13\]"):
        await store.acquire(5)
    await reader.call_one("release")
    stats = await store.stats()
    assert (stats["versions"], stats["leases"], stats["pending"]) == ([12, 13], 0, [])


async def test_a_hundred_publishes_are_bounded(store, writers, reader):
    seen = await writers.call_one("publish_many", store, 100, 100)
    assert all(len(stats["versions"]) <= 2 for stats in seen)
    assert max(stats["segment_bytes"] for stats in seen[10:]) == seen[10]["segment_bytes"] <= 4 << 20
    assert (await reader.call_one("pull", store))[0] == 199
    assert 0 < mapped_segments(writers.pids()[0]) <= 8


async def test_a_region_is_a_view_of_shared_memory(store):
    async with await store.acquire(regions={"w": [(10, 20)]}) as pulled:
        region = pulled.region("w", [(10, 20)])
        assert region.untyped_storage().data_ptr() == pulled["w"].untyped_storage().data_ptr()
        assert region.tolist() == [199.0] * 10


async def test_tensors_are_refused_after_release(store):
    pulled = await store.acquire()
    assert float(pulled["w"][0]) == 199.0
    await pulled.release()
    await pulled.release()
    with pytest.raises(StoreError, match="version 199 was released"):
        pulled["w"]


async def test_a_large_tensor_is_read_block_by_block(store, monkeypatch):
    """As soon as each block is written: a reader keeps close to the writer, whose bytes are in the caches still."""
    write, half, gate = writer.Place.write, SPAN_BYTES // 4, threading.Event()

    def write_half(place, values, done):
        def step(elements):
            done(elements)
            assert gate.wait(20)

        return write(place, values, step)

    monkeypatch.setattr(writer.Place, "write", write_half)
    values = torch.randn(2 * half)
    publishing = asyncio.ensure_future(store.publish(200, 0, 1, [TensorShard.whole("w", values)]))
    pulled = await asyncio.wait_for(store.acquire_next(200), 10)
    view, ready = pulled.arriving("w")
    await asyncio.wait_for(asyncio.to_thread(ready, half), 10)
    assert torch.equal(view[:half], values[:half])
    rest = asyncio.ensure_future(asyncio.to_thread(ready, half + 1))
    await asyncio.sleep(0.1)
    assert not rest.done() and not publishing.done()
    gate.set()
    await asyncio.wait_for(rest, 10)
    assert torch.equal(view, values)
    assert (await pulled.committed()).digest == (await publishing).digest
    await pulled.release()


async def test_who_shares_no_memory_reads_what_was_written_to_it_through_torchstore(store):
    """torchstore is told where a version lies when the first such reader comes, and forgets it with the version."""
    far, client = store.client, await torchstore_compat.client(store.name)
    far.config = replace(store.config, transport="rpc")
    expected = {name: tensor for name, tensor in full_tensors(201).items() if name != "model.scale"}
    await store.publish(201, 0, 1, [TensorShard.whole(name, tensor) for name, tensor in expected.items()])
    async with await store.acquire():
        assert await client.keys() == []
    for acquire in (far.acquire, lambda: far.acquire_next(201)):
        async with await acquire() as pulled:
            assert version_digest(dict(pulled)) == pulled.manifest.digest == version_digest(expected)
        assert {key.split("/")[0] for key in await client.keys()} == {"v201"}
    for version in range(202, 207):  # until its place in memory serves again
        again = {name: tensor + version for name, tensor in expected.items()}
        await store.publish(version, 0, 1, [TensorShard.whole(name, tensor) for name, tensor in again.items()])
        async with await far.acquire() as pulled:
            assert version_digest(dict(pulled)) == pulled.manifest.digest == version_digest(again)
    for version in (207, 208):
        await store.publish(version, 0, 1, [TensorShard.whole("w", torch.ones(5))])
    assert (await store.stats())["versions"] == [207, 208]
    assert await client.keys() == []


async def test_rpc_transport(runtime, writers, reader):
    store = await WeightStore.create(StoreConfig(bucket_mib=1, transport="rpc"))
    await check_round_trip(store, writers, reader, 1, 2)
    assert (await store.stats())["segment_bytes"] == 0
    await store.close()
    await store.close()
    with pytest.raises(ActorDied):
        await store.latest()


async def test_killed_trainer_and_reader(runtime, reader):
    """Weights outlive the trainer that wrote them; the lease of a dead reader ends, a living one's does not."""
    store = await WeightStore.create(StoreConfig(lease_ttl_s=0.8, keep_versions=1))
    victim = await Peer.spawn()
    await victim.call_one("publish", store, 0)
    await victim.call_one("hold", store)
    await asyncio.sleep(1.6)
    await victim.call_one("publish", store, 1)
    assert (await store.stats())["versions"] == [0, 1]
    os.kill(victim.pids()[0], signal.SIGKILL)
    assert (await reader.call_one("pull", store))[3] == version_digest(full_tensors(1))
    await asyncio.sleep(1.2)
    await reader.call_one("publish", store, 2)
    assert (await store.stats())["versions"] == [2]
    assert (await reader.call_one("pull", store))[3] == version_digest(full_tensors(2))
    await victim.stop()
    await store.close()


def test_config_is_checked():
    with pytest.raises(ConfigError, match="transport = 'pigeon': must be one of auto, shared_memory, rpc"):
        StoreConfig(transport="pigeon")
    with pytest.raises(ConfigError, match="keep_versions = 0"):
        StoreConfig(keep_versions=0)


def mapped_segments(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("forge-async-weights")


async def check_round_trip(store, writers, reader, version, ranks):
    if ranks > 1:
        digests = await writers.call("publish", store, version, ranks)
    else:
        digests = [await reader.call_one("publish", store, version)]
    pulled_version, manifest, tensors, live_digest = await reader.call_one("pull", store)
    expected = full_tensors(version)
    assert pulled_version == version
    assert set(tensors) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor)
        assert manifest.digests[name] == tensor_digest(tensor)
    assert {live_digest, manifest.digest, *digests} == {version_digest(expected)}
