"""Weights across hosts: writer and reader sit on two simulated Monarch hosts, and share no memory with the store."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator

import cloudpickle
import pytest
import torch
from monarch.actor import attach_to_workers, concurrent_endpoint

from forge_async.mesh import ForgeActor, MeshRuntime
from forge_async.store import StoreConfig, TensorShard, WeightStore, version_digest
from forge_async.store.layout import Ranges

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test modules


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {f"layer{i}": torch.randn(400, 1000, generator=generator) for i in range(4)} | {"scalar": torch.tensor(3.0)}


class Side(ForgeActor):
    @concurrent_endpoint
    async def publish(self, store: WeightStore, version: int) -> str:
        shards = [TensorShard.whole(name, tensor) for name, tensor in tensors().items()]
        return (await store.publish(version, 0, 1, shards)).digest

    @concurrent_endpoint
    async def pull(self, store: WeightStore, regions: dict[str, Ranges | None] | None) -> tuple[dict, int]:
        async with await store.acquire(regions=regions) as pulled:
            wanted = regions if regions is not None else dict.fromkeys(pulled.manifest.tensors)
            found = {
                name: (pulled[name] if ranges is None else pulled.region(name, ranges)).clone()
                for name, ranges in wanted.items()
            }
            return found, sum(bucket.nbytes for bucket in pulled.buckets.values())


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Addresses of two worker loops, each a host of its own to Monarch."""
    addresses = [free_address(), free_address()]
    loop = "import monarch.actor as m; m.run_worker_loop_forever(address='{}', ca='trust_all_connections')"
    processes = [subprocess.Popen([sys.executable, "-c", loop.format(address)]) for address in addresses]
    yield addresses
    for process in processes:
        process.terminate()
        process.wait(20)


async def test_versions_travel_between_hosts(hosts: list[str]) -> None:
    async with MeshRuntime():
        attached = attach_to_workers(ca="trust_all_connections", workers=hosts)
        await asyncio.wait_for(asyncio.ensure_future(_done(attached.initialized)), 60)
        first, second = attached.slice(hosts=0), attached.slice(hosts=1)
        store = await WeightStore.create(StoreConfig(bucket_mib=2, transport="rpc", dtype="bfloat16"))
        writer, reader = await Side.options(hosts=first).spawn(), await Side.options(hosts=second).spawn()
        expected = {name: tensor.bfloat16() for name, tensor in tensors().items()}
        assert await writer.call_one("publish", store, 1, timeout=60) == version_digest(expected)
        found, nbytes = await reader.call_one("pull", store, None, timeout=60)
        assert version_digest(found) == version_digest(expected)
        assert nbytes > 3_200_000
        assert (await store.stats())["segment_bytes"] == 0, "nothing went through shared memory"

        part = [(100, 200), (0, 500)]
        found, nbytes = await reader.call_one("pull", store, {"layer0": part}, timeout=60)
        assert torch.equal(found["layer0"], expected["layer0"][100:200, :500])
        assert nbytes < 2_000_000, "only the bucket that holds it is fetched"
        await writer.stop()
        await reader.stop()
        await store.close()
        await attached.shutdown()


async def _done(future: object) -> object:
    return await future  # type: ignore[misc]
