"""Shared fixtures, and the check that the suite leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is imported: the workers share the cores, and threads that wait for each other would spin on them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from hypothesis import settings

pytest_plugins = ["forge_async.testing.models", "tests.browser"]

settings.register_profile("suite", database=None, deadline=None)  # no files, and shared machines are slow at times
settings.register_profile("fuzz", database=None, deadline=None)  # tests/buffer/test_fuzz.py runs more schedules by it
settings.load_profile("suite")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED_MEMORY = Path("/dev/shm")
SEGMENTS_BEFORE = pytest.StashKey[set[Path]]()


def _children() -> set[int]:
    """Living processes below this one."""
    own, parents = os.getpid(), {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = status.read_text()
        except OSError:
            continue  # it ended meanwhile
        fields = text.rpartition(")")[2].split()
        if fields[0] != "Z":
            parents[int(status.parent.name)] = int(fields[1])
    found: set[int] = set()
    for pid in parents:
        ancestor = pid
        while ancestor in parents and ancestor != own:
            ancestor = parents[ancestor]
        if ancestor == own and pid != own:
            found.add(pid)
    return found


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[SEGMENTS_BEFORE] = set(SHARED_MEMORY.iterdir())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The whole suite leaves no shared-memory segment, once all its workers have ended."""
    if hasattr(session.config, "workerinput"):
        return
    before = session.config.stash[SEGMENTS_BEFORE]
    if left := _wait_until_empty(lambda: _left_segments(before)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nERROR: the suite left behind {left}")


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Each worker's tests leave no process."""
    yield
    assert not _wait_until_empty(_left_processes)


def _wait_until_empty(left: Callable[[], list[str]], timeout_s: float = 20) -> list[str]:
    """What is left then; Python's resource trackers need a moment to clean up after processes that were killed."""
    deadline = time.monotonic() + timeout_s
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def _left_segments(before: set[Path]) -> list[str]:
    """New segments, unless another program runs whose they may be: one with a resource tracker of its own."""
    trackers = set(_pids_of("multiprocessing.resource_tracker"))
    if trackers - _children():
        return []
    return [str(path) for path in set(SHARED_MEMORY.iterdir()) - before]


def _left_processes() -> list[str]:
    trackers = _pids_of("multiprocessing.resource_tracker")  # Python's own, they end with their processes
    return [f"{pid}: {_command(pid)[:200]}" for pid in _children() if pid not in trackers and _command(pid)]


def _pids_of(words: str) -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if words in _command(int(path.name))]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # it ended meanwhile
        return ""
