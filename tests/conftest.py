"""Shared fixtures, and the check that the suite leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

pytest_plugins = ["forge_async.testing.models"]

settings.register_profile("suite", database=None, deadline=None)  # no files, and shared machines are slow at times
settings.load_profile("suite")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED_MEMORY = Path("/dev/shm")


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


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """The whole suite leaves no process and no shared-memory segment."""
    segments = set(SHARED_MEMORY.iterdir())
    yield
    deadline = time.monotonic() + 20  # Python's resource trackers clean up after processes that were killed
    while (_left_processes() or _left_segments(segments)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not _left_processes()
    assert not _left_segments(segments)


def _left_segments(before: set[Path]) -> set[Path]:
    """New segments that no living process maps: this suite's have ended, so one in use is another program's."""
    new = set(SHARED_MEMORY.iterdir()) - before
    if new:
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                text = maps.read_text()
                new = {path for path in new if str(path) not in text}
    return {path for path in new if path.exists()}


def _left_processes() -> list[str]:
    names = []
    for pid in _children():
        with contextlib.suppress(OSError):  # it ended meanwhile
            names.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[:200].decode(errors="replace"))
    return [name for name in names if "resource_tracker" not in name]  # Python's own, ends with this process
