"""Which process runs a run, as its event log tells, and whether it is still there: a killed one writes no ``end``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """``pid``, when it ``started`` (a pid is given again) and the ``place`` where both mean something."""
    return {"pid": os.getpid(), "started": _started(os.getpid()), "place": _place()}


def has_ended(process: Any) -> bool:
    """Whether the process that :func:`this_process` told of is known to be gone. False where nobody here can know: it
    is another machine's, another container's, or nothing that was told so."""
    if not isinstance(process, dict) or process.get("place") != (place := _place()) or place is None:
        return False
    pid, started = process.get("pid"), process.get("started")
    return isinstance(pid, int) and started is not None and _started(pid) != started


def _started(pid: int) -> int | None:
    """Clock ticks from the boot to the start of a process; None of one that has ended, a zombie included."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _place() -> str | None:
    """This boot of this machine, and the namespace that pids belong to; None where there are none such."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None
