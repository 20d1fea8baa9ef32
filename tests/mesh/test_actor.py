"""Actors on real Monarch processes: environment, values, errors, deaths."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import sys
import time
from pathlib import Path

import cloudpickle
import pytest
import pytest_asyncio
import torch
from monarch.actor import concurrent_endpoint, current_rank, endpoint

from forge_async.errors import ConfigError, DataError, ForgeError
from forge_async.mesh import ActorDied, ForgeActor, MeshRuntime, RemoteError
from forge_async.mesh.processes import HOST_CORES_VARIABLE, process_alive

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test modules

THP_FILE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
THP = THP_FILE.read_text().strip() if THP_FILE.exists() else ""
"""The kernel's choices, with the one that is set in brackets."""


class Probe(ForgeActor):
    def __init__(self, value: int = 0, fail: bool = False) -> None:
        if fail:
            raise DataError("row 7 of train.jsonl has no answer")
        self.value = value

    @concurrent_endpoint
    async def add(self, more: int, scale: int = 1) -> int:
        return self.value + more * scale

    @concurrent_endpoint
    async def rank(self) -> int:
        return current_rank().rank

    @concurrent_endpoint
    async def environment(self) -> dict:
        threads = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
        return {"variables": dict(os.environ), "threads": threads, "sigint": signal.getsignal(signal.SIGINT)}

    @concurrent_endpoint
    async def in_huge_pages(self, count: int, mib: int) -> float:
        """Which share of some new tensors of ``mib`` MiB each is."""

        def kib() -> int:
            rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
            return int(next(row for row in rows if row.startswith("AnonHugePages")).split()[1])

        def allocate() -> float:
            before = kib()
            tensors = [torch.ones(mib << 18) for _ in range(count)]
            return (kib() - before) / 1024 / mib / len(tensors)

        return await asyncio.to_thread(allocate)

    @concurrent_endpoint
    async def fail(self, kind: str) -> None:
        raise ConfigError("a.b", 3, "even") if kind == "forge" else ValueError("seven")

    @concurrent_endpoint
    async def sleep(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    @endpoint
    async def block(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - an actor that does not answer is the point

    @concurrent_endpoint
    async def ask(self, other: object, more: int) -> int:
        return await other.add.call_one(more)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def runtime():
    async with MeshRuntime() as opened:
        yield opened
    assert opened.processes() == []
    assert opened.killed == []


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(runtime):
    return await Probe.options(procs=2, cores=sorted(os.sched_getaffinity(0))[:2]).spawn(5)


async def test_call_returns_values_by_rank(pair):
    assert await pair.call("add", 2, scale=10) == [25, 25]
    assert await pair.call("rank") == [0, 1]
    assert await pair.call_one("rank") == 0
    assert pair.healthy
    assert all(process_alive(pid) for pid in pair.pids())
    assert len(set(pair.pids())) == 2


async def test_process_environment(pair):
    """Set before the interpreter starts, so that every thread, Monarch's included, stays on its core."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    for rank, seen in enumerate(await pair.call("environment")):
        variables = seen["variables"]
        own = {cores[rank % len(cores)]}
        assert seen["threads"] == [own] * len(seen["threads"])
        assert variables[HOST_CORES_VARIABLE] == ",".join(map(str, os.sched_getaffinity(0)))
        assert seen["sigint"] == signal.SIG_IGN
        assert variables["OMP_NUM_THREADS"] == "1"
        assert variables["OMP_WAIT_POLICY"] == "PASSIVE"
        assert variables["HF_HUB_OFFLINE"] == "1"
        assert variables["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert (variables["RANK"], variables["WORLD_SIZE"]) == (str(rank), "2")
        assert variables["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.skipif("[never]" in THP or not THP, reason="this machine has no transparent huge pages")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="these are settings of glibc")
async def test_tensors_smaller_than_two_huge_pages_lie_in_huge_pages(pair):
    """Also those that a thread makes, as engines do; a mapping of its own would have one aligned huge page at most."""
    for share in await pair.call("in_huge_pages", 40, 3):
        assert share > 0.9


async def test_remote_errors_keep_their_kind(pair):
    with pytest.raises(ConfigError, match=r"a\.b = 3: must be even"):
        await pair.call("fail", "forge")
    with pytest.raises(RemoteError, match=r"fail failed: ValueError\('seven'\)"):
        await pair.call_one("fail", "other")
    assert await pair.call_one("add", 1) == 6


async def test_timeout_and_cancellation_leave_the_actor_usable(pair):
    with pytest.raises(TimeoutError, match=r"sleep did not answer within 0\.1 s"):
        await pair.call("sleep", 1.0, timeout=0.1)
    call = asyncio.ensure_future(pair.call("sleep", 5.0))
    await asyncio.sleep(0.1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await pair.call_one("add", 1) == 6


async def test_one_process_gets_its_own_group_and_variables(runtime, pair):
    single = await Probe.options(env={"HF_HUB_OFFLINE": "0"}).spawn(1)
    variables = (await single.call_one("environment"))["variables"]
    assert (variables["RANK"], variables["LOCAL_RANK"], variables["WORLD_SIZE"]) == ("0", "0", "1")
    assert int(variables["MASTER_PORT"]) > 0
    assert variables["HF_HUB_OFFLINE"] == "0"
    assert await pair.call("ask", single.raw, 3) == [4, 4]
    assert set(single.pids()) < set(runtime.processes())
    await single.stop()
    assert not any(process_alive(pid) for pid in single.pids())
    with pytest.raises(ActorDied, match="the actor was stopped"):
        await single.call("rank")


async def test_init_failure_names_its_cause(runtime):
    before = set(runtime.processes())
    with pytest.raises(ForgeError, match=r"DataError: row 7 of train.jsonl has no answer"):
        await Probe.spawn(fail=True)
    assert set(runtime.processes()) == before


async def test_killed_process_fails_calls_at_once(runtime):
    victim = await Probe.options(procs=2).spawn()
    call = asyncio.ensure_future(victim.call("sleep", 60.0))
    await asyncio.sleep(0.1)
    started = time.monotonic()
    os.kill(victim.pids()[1], signal.SIGKILL)
    with pytest.raises(ActorDied, match=rf"process {victim.pids()[1]} ended"):
        await call
    assert time.monotonic() - started < 2.0
    assert not victim.healthy
    with pytest.raises(ActorDied, match="is dead"):
        await victim.call("rank")
    await victim.stop()
    assert not any(process_alive(pid) for pid in victim.pids())


async def test_blocked_actor_is_stopped(runtime):
    blocked = await Probe.spawn()
    call = asyncio.ensure_future(blocked.call("block", 60.0))
    await asyncio.sleep(0.2)
    await blocked.stop(timeout_s=1.0)
    assert not any(process_alive(pid) for pid in blocked.pids())
    with pytest.raises(ActorDied):
        await call


async def test_options_are_checked():
    with pytest.raises(ConfigError, match="procs = 0: must be at least 1"):
        Probe.options(procs=0)
