"""Processes that have to be killed leave nothing of theirs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from forge_async.mesh import processes
from forge_async.mesh.processes import (
    HOST_CORES_VARIABLE,
    RUN_VARIABLE,
    find_processes,
    kill_processes,
    stand_back,
    wait_until_gone,
)

HOLDER = """
import multiprocessing, time
lock = multiprocessing.get_context("spawn").RLock()
print("ready", lock._semlock.name, flush=True)
time.sleep(100)
"""


async def test_a_killed_process_leaves_no_semaphore() -> None:
    """Its resource tracker belongs to the same run; killed with it, it could not clean up."""
    run_id = f"test-{os.getpid()}-{time.monotonic_ns()}"
    process = subprocess.Popen(  # noqa: ASYNC220 - started before anything else runs in this loop
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True, env=os.environ | {RUN_VARIABLE: run_id}
    )
    assert process.stdout is not None
    name = (await asyncio.to_thread(process.stdout.readline)).split()[1]
    semaphore = Path("/dev/shm") / f"sem.{name.lstrip('/')}"
    assert semaphore.exists()
    async with asyncio.timeout(20):  # the process and its resource tracker, which is being started
        while len(pids := find_processes(run_id)) < 2:  # noqa: ASYNC110 - its start gives no event
            await asyncio.sleep(0.02)
    kill_processes(pids)
    assert process.wait() == -signal.SIGKILL
    assert await wait_until_gone(pids, 20) == []
    assert not semaphore.exists()


def test_a_thread_that_stands_back_may_use_all_cores_of_the_run(monkeypatch) -> None:
    """And only this thread: an engine's own stay on its cores, at their priority."""
    every = os.sched_getaffinity(0)
    own = {min(every)}

    def seen() -> tuple[set[int], int]:
        thread = threading.get_native_id()
        return os.sched_getaffinity(thread), os.getpriority(os.PRIO_PROCESS, thread)

    def pinned() -> list[tuple[set[int], int]]:
        os.sched_setaffinity(0, own)
        with ThreadPoolExecutor(1, initializer=stand_back, initargs=(5,)) as background:
            return [background.submit(seen).result(), seen()]

    monkeypatch.setenv(HOST_CORES_VARIABLE, ",".join(map(str, every)))
    with ThreadPoolExecutor(1) as thread:
        (cores, nice), (cores_here, nice_here) = thread.submit(pinned).result()
    assert (cores, nice) == (every, min(nice_here + 5, 19))
    assert cores_here == own


def test_a_thread_that_shares_its_core_gives_way_and_one_that_does_not_goes_on(monkeypatch) -> None:
    slept: list[float] = []
    clock = {"at": 0.0, "worked": 0.0}
    monkeypatch.setattr(processes.time, "perf_counter", lambda: clock["at"])
    monkeypatch.setattr(processes.time, "thread_time", lambda: clock["worked"])
    monkeypatch.setattr(processes.time, "sleep", slept.append)
    give_way = processes.GiveWay()
    for passed, worked, sleeps in ((0.1, 0.1, 0), (0.1, 0.01, 1), (0.1, 0.09, 0), (0.0005, 0.0, 0)):
        clock["at"] += passed
        clock["worked"] += worked
        slept.clear()
        give_way()
        assert len(slept) == sleeps
