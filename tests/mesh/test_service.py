"""Services: routing, sessions, fan-out, respawn after a death."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import cloudpickle
import pytest
import pytest_asyncio
from monarch.actor import concurrent_endpoint, endpoint

from forge_async.errors import ForgeError
from forge_async.mesh import ForgeActor, MeshRuntime, RemoteError, ReplicaDied
from forge_async.mesh.processes import process_alive

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test modules


class Worker(ForgeActor):
    def __init__(self, marker: str | None = None) -> None:
        self.marker = marker
        if marker is not None and os.path.exists(marker):
            raise RuntimeError("the marker says no")

    @concurrent_endpoint
    async def pid(self, seconds: float = 0.0) -> int:
        await asyncio.sleep(seconds)
        return os.getpid()

    @concurrent_endpoint
    async def count(self) -> int:
        self.counted = getattr(self, "counted", 0) + 1
        return self.counted

    @endpoint
    async def block(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - a reward that never returns

    @concurrent_endpoint
    async def fail(self) -> None:
        raise ValueError("no")

    @concurrent_endpoint
    async def cores(self) -> set[int]:
        return os.sched_getaffinity(0)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def runtime():
    async with MeshRuntime() as opened:
        yield opened
    assert opened.processes() == []


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def service(runtime):
    cores = sorted(os.sched_getaffinity(0))
    return await Worker.options(cores=[[cores[0]], [cores[-1]]]).as_service(num_replicas=2)


async def test_least_loaded_replica_is_chosen(service):
    calls = [asyncio.ensure_future(service.call("pid", 1.0)) for _ in range(4)]
    await asyncio.sleep(0.3)
    assert [replica.in_flight for replica in service.replicas] == [2, 2]
    pids = await asyncio.gather(*calls)
    assert {pid: pids.count(pid) for pid in pids} == {replica.pids[0]: 2 for replica in service.replicas}
    assert [replica.in_flight for replica in service.replicas] == [0, 0]


async def test_cores_are_given_per_replica(service):
    cores = sorted(os.sched_getaffinity(0))
    assert await service.fan_out("cores") == [{cores[0]}, {cores[-1]}]


async def test_sessions_are_sticky(service):
    first = await service.call("pid", session="a")
    busy = [asyncio.ensure_future(service.call("pid", 1.0, session="a")) for _ in range(3)]
    await asyncio.sleep(0.2)
    other = await service.call("pid", session="b")
    assert other != first
    assert await asyncio.gather(*busy) == [first] * 3


async def test_a_replica_of_several_processes_is_called_on_rank_0_and_dies_as_one(runtime):
    service = await Worker.options(procs=2).as_service(num_replicas=1)
    (replica,) = service.replicas
    first, second = replica.pids
    assert [await service.call("pid"), await service.call("count")] == [first, 1]
    assert replica.handle is not None
    assert await replica.handle.call("count") == [2, 1]
    os.kill(second, signal.SIGKILL)
    await wait_until(lambda: replica.respawns == 1)
    assert not process_alive(first)
    assert await service.call("pid") == replica.pids[0]
    await service.stop()


async def test_fan_out_never_raises(service):
    assert await service.fan_out("pid") == [replica.pids[0] for replica in service.replicas]
    results = await service.fan_out("fail")
    assert [type(result) for result in results] == [RemoteError, RemoteError]
    with pytest.raises(RemoteError, match="no"):
        await service.call("fail")


async def test_dead_replica_is_respawned_while_the_other_serves(service):
    prepared = []

    async def prepare(handle):
        prepared.append(await handle.call_one("pid"))

    service.on_respawn = prepare
    victim, other = service.replicas[0].pids[0], service.replicas[1].pids[0]
    calls = [asyncio.ensure_future(service.call("pid", 2.0)) for _ in range(4)]
    await asyncio.sleep(0.3)
    os.kill(victim, signal.SIGKILL)
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results if result != other] == [ReplicaDied, ReplicaDied]
    assert results.count(other) == 2
    await wait_until(lambda: service.replicas[0].state == "healthy")
    reborn = service.replicas[0].pids[0]
    assert prepared == [reborn]
    assert reborn != victim
    assert service.replicas[0].respawns == 1
    assert await service.fan_out("pid") == [reborn, other]
    assert not process_alive(victim)


async def test_all_replicas_dead_calls_wait_for_a_new_one(service):
    for replica in service.replicas:
        os.kill(replica.pids[0], signal.SIGKILL)
    await wait_until(lambda: all(replica.state != "healthy" for replica in service.replicas))
    assert await service.call("pid") in [pid for replica in service.replicas for pid in replica.pids]
    await wait_until(lambda: all(replica.state == "healthy" for replica in service.replicas))


async def test_replace_ends_a_blocked_replica(service):
    call = asyncio.ensure_future(service.call("block", 600.0))
    await asyncio.sleep(0.2)
    (index,) = [replica.index for replica in service.replicas if replica.in_flight]
    before = service.replicas[index].pids[0]
    await service.replace(index)
    with pytest.raises(ReplicaDied):
        await call
    assert service.replicas[index].pids[0] != before
    assert await service.call("pid") > 0


async def test_replica_that_cannot_start_is_given_up(runtime, tmp_path):
    marker = tmp_path / "marker"
    service = await Worker.as_service(str(marker))
    marker.touch()
    os.kill(service.replicas[0].pids[0], signal.SIGKILL)
    await wait_until(lambda: service.replicas[0].state != "healthy")
    with pytest.raises(ForgeError, match="gave up: .*the marker says no"):
        await service.call("pid")
    await service.stop()


async def test_stop_fails_waiting_calls(runtime):
    service = await Worker.as_service()
    call = asyncio.ensure_future(service.call("pid", 60.0))
    await asyncio.sleep(0.1)
    pids = service.replicas[0].pids
    await service.stop()
    with pytest.raises(ReplicaDied):
        await call
    with pytest.raises(ForgeError, match="it was stopped"):
        await service.call("pid")
    assert not any(process_alive(pid) for pid in pids)


async def wait_until(condition, timeout_s: float = 60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
