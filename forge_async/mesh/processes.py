"""Operating-system processes of a run: find them, watch them, end them.

Every worker (and whatever it starts) carries ``FORGE_ASYNC_RUN=<run id>`` in its environment from the moment it is
executed, so that a run can find its own processes in ``/proc`` however they came about.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

RUN_VARIABLE = "FORGE_ASYNC_RUN"
HOST_CORES_VARIABLE = "FORGE_ASYNC_HOST_CORES"
"""In a worker that has cores of its own: those that the run may use on its host, numbers with commas."""


def process_alive(pid: int) -> bool:
    """False for a process that has ended, a zombie included."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def find_processes(run_id: str) -> list[int]:
    """Pids of living processes of this user whose environment carries ``run_id``."""
    marker = f"{RUN_VARIABLE}={run_id}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            variables = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
        except OSError:  # ended meanwhile, or another user's
            continue
        if marker in variables and process_alive(int(entry)):
            found.append(int(entry))
    return found


def kill_processes(pids: Iterable[int]) -> None:
    """SIGKILL to each but Python's resource trackers, which end by themselves: killed together with the process that
    they clean up after, they would leave its semaphores in /dev/shm. Those already gone are fine."""
    for pid in pids:
        with contextlib.suppress(OSError):
            if b"multiprocessing.resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


async def wait_until_gone(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Wait until the processes have ended; returns those that have not within ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    remaining = [pid for pid in pids if process_alive(pid)]
    while remaining and time.monotonic() < deadline:
        await asyncio.sleep(0.02)  # polling: a zombie's pidfd is readable only once, and /proc has no notification
        remaining = [pid for pid in remaining if process_alive(pid)]
    return remaining


class ProcessWatch:
    """Calls ``on_death(pid)`` in the event loop at the moment a process of this machine ends.

    Monarch's supervision notices a death by polling, after 0.7 to 30 s; a pidfd becomes readable at once.
    """

    def __init__(self, pids: Iterable[int], on_death: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_death = on_death
        self._descriptors: dict[int, int] = {}
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._loop.call_soon(on_death, pid)
                continue
            self._descriptors[pid] = descriptor
            self._loop.add_reader(descriptor, self._ended, pid)

    def _ended(self, pid: int) -> None:
        self._forget(pid)
        self._on_death(pid)

    def _forget(self, pid: int) -> None:
        descriptor = self._descriptors.pop(pid, None)
        if descriptor is not None:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)

    def close(self) -> None:
        """Stop watching."""
        for pid in list(self._descriptors):
            self._forget(pid)


def stand_back(nice: int) -> None:
    """Of the calling thread alone, for good: run wherever a core of the run is idle, not only on its process's, and add
    ``nice`` to the nice value. Only Linux has threads of their own cores and priority; elsewhere nothing is done."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + nice, 19))
    if HOST_CORES_VARIABLE in os.environ:
        own = os.sched_getaffinity(thread)
        os.sched_setaffinity(thread, own | {int(core) for core in os.environ[HOST_CORES_VARIABLE].split(",")})


class GiveWay:
    """Lets the kernel move the calling thread to an idle core while it has to share one.

    A kernel looks for an idle core when a thread wakes up; one of low priority that never sleeps can stay beside a busy
    thread for seconds. Call it now and then.
    """

    def __init__(self) -> None:
        self._at, self._worked = time.perf_counter(), time.thread_time()

    def __call__(self) -> None:
        """Sleep for a moment where less than two thirds of the time since the last call was the thread's own."""
        if time.perf_counter() - self._at > 1.5 * (time.thread_time() - self._worked) + 1e-3:
            time.sleep(5e-5)
        self._at, self._worked = time.perf_counter(), time.thread_time()
