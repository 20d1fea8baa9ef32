"""The event log: what happened in a run, in order."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge_async.observability.jsonl import JsonLines


class EventLog:
    """Writes ``events.jsonl``: one line per event with its kind and fields, and two clocks.

    ``t`` is seconds since the log was opened on the monotonic clock (differences are durations); ``at`` is Unix time.

    Args:
        warn: as for ``JsonLines``.
    """

    def __init__(self, path: Path, warn: Callable[[str], None] | None = None) -> None:
        self._lines = JsonLines(path, warn)
        self._started = time.monotonic()

    def write(self, kind: str, **fields: Any) -> None:
        """Append the event ``kind``. ``t``, ``at`` and ``kind`` cannot be fields.

        Raises:
            ValueError: a field has one of those names, or the log is closed.
        """
        taken = {"t", "at"} & fields.keys()
        if taken:
            raise ValueError(f"event {kind!r}: {', '.join(sorted(taken))} is written by the log itself")
        at, elapsed = time.time(), time.monotonic() - self._started
        self._lines.write({"t": round(elapsed, 6), "at": round(at, 3), "kind": kind, **fields})

    def close(self) -> None:
        self._lines.close()
