"""What is kept of each file of a run: columns, counts and offsets, brought up to date by :meth:`update`.

Lines that are no JSON are counted and left out: one broken line must not hide a run.
"""

from __future__ import annotations

import bisect
import json
import math
import re
import threading
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from forge_async.dashboard.lines import GrowingFile

KIND, REPLICA = re.compile(rb'"kind": "([^"\\]+)"'), re.compile(rb'"replica": (\d+)')

RECENT_EVENTS = 300

NO_LINE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What lines raise that are no JSON, or JSON of something else."""

NO_NUMBERS = ("nan", "inf", "-inf")
"""How figures that are not finite are written."""


class Table:
    """Base of all: reads new lines, counts broken ones. Whoever reads or updates one holds its ``lock``."""

    def __init__(self, path: Path) -> None:
        self.file = GrowingFile(path)
        self.lock = threading.RLock()
        self.broken = 0
        self._restarts = 0

    @property
    def generation(self) -> int:
        """Changes when what was shown before is void."""
        return self._restarts

    def update(self) -> None:
        """Take in what is new."""
        for offset, line in self.file.new_lines():
            self._follow_restart()
            if not line or line.isspace():
                continue
            try:
                self.take(offset, line)
            except NO_LINE:
                self.broken += 1
        self._follow_restart()

    def _follow_restart(self) -> None:
        """Forget what there was where the file was made anew."""
        if self.file.restarts != self._restarts:
            self._restarts, self.broken = self.file.restarts, 0
            self.clear()

    def clear(self) -> None:
        """Forget everything: the file was made anew."""
        raise NotImplementedError

    def take(self, offset: int, line: bytes) -> None:
        """One more line. Raises one of :data:`NO_LINE` where it is none of this table's."""
        raise NotImplementedError


class MetricsTable(Table):
    """``metrics.jsonl`` as columns of those series that were asked for, one value per step; of a step logged twice the
    last one counts."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._rewritten = 0
        self.columns: dict[str, list[float | None]] = {}
        self.clear()

    def clear(self) -> None:
        self.steps: list[int] = []
        self.columns = {key: [] for key in self.columns}
        self.last: dict[str, Any] = {}
        self._seen: set[str] = set()
        self._series: set[str] = set()

    @property
    def generation(self) -> int:
        return self._restarts + self._rewritten

    @property
    def keys(self) -> list[str]:
        """All series of numbers."""
        return sorted(self._series)

    def want(self, keys: Iterable[str]) -> None:
        """Keep these series, too; the file is read once more for new ones."""
        new = [key for key in keys if key not in self.columns]
        if new:
            if self.file.offset:
                self.update()  # so that it shows whether the file is still the one that was read
            self.columns |= {key: [] for key in new}
            self.clear()
            self.file.offset = self.broken = 0

    def take(self, offset: int, line: bytes) -> None:
        row = json.loads(line)
        step = _step_of(row.pop("step"))
        if self.steps and step <= self.steps[-1]:  # a resume goes back
            self._rewritten += 1
            keep = bisect.bisect_left(self.steps, step)
            del self.steps[keep:]
            for values in self.columns.values():
                del values[keep:]
        self.steps.append(step)
        for key, values in self.columns.items():
            values.append(_number(row.get(key)))
        if not row.keys() <= self._seen:
            self._seen |= row.keys()
            self._series |= {key for key, value in row.items() if isinstance(value, int | float) or value in NO_NUMBERS}
        row["step"] = step
        self.last = row

    def since(self, row: int, keys: Iterable[str]) -> dict[str, list[float | None]]:
        """The columns ``keys`` from ``row`` on."""
        return {key: self.columns[key][row:] for key in keys}


class EventTable(Table):
    """``events.jsonl``: counts, the newest of each kind, and the last few hundred; only those are parsed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.clear()

    def clear(self) -> None:
        self.count = 0
        self.kinds: Counter[str] = Counter()
        self._newest: dict[str, bytes] = {}
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=RECENT_EVENTS)
        self._swaps: dict[int, tuple[int, bytes]] = {}

    def take(self, offset: int, line: bytes) -> None:
        found = KIND.search(line)
        if found is None or not line.endswith(b"}"):
            raise ValueError("no event")
        kind = found[1].decode()
        self.count += 1
        self.kinds[kind] += 1
        self._newest[kind] = line
        self._recent.append((self.count, line))
        if kind == "start":
            for older in ("end", "ready", "published"):  # of the process before: a resumed run goes on
                self._newest.pop(older, None)
            self._swaps.clear()
        elif kind == "swapped" and (replica := REPLICA.search(line)):
            index = int(replica[1])
            self._swaps[index] = (self._swaps[index][0] + 1 if index in self._swaps else 1, line)

    def newest(self, kind: str) -> dict[str, Any] | None:
        """The last event of a kind; ``ready``, ``published`` and ``end`` count until a resume."""
        line = self._newest.get(kind)
        return None if line is None else _event(line)

    def recent(self, after: int = 0) -> list[dict[str, Any]]:
        """Events after the ``after``-th, of the last few hundred, each with its number ``n``."""
        return [{"n": n, **_event(line)} for n, line in self._recent if n > after]

    @property
    def swaps(self) -> dict[int, dict[str, Any]]:
        """By replica of the last process: how many, and the last one's version, digest and pause."""
        return {replica: {**_event(line), "count": count} for replica, (count, line) in self._swaps.items()}


def _event(line: bytes) -> dict[str, Any]:
    try:
        event: dict[str, Any] = json.loads(line)
        return event
    except NO_LINE:
        return {"kind": "unreadable", "at": 0.0}


def _step_of(value: Any) -> int:
    step = int(value)
    if not 0 <= step < 2**31:
        raise ValueError("no step")
    return step


def _number(value: Any) -> float | None:
    """To six digits: more are not drawn, and would be sent."""
    if type(value) is not float:
        try:
            value = float(value)  # "nan" and its like, too
        except (TypeError, ValueError, OverflowError):
            return None
    return float(f"{value:.6g}") if math.isfinite(value) else None
