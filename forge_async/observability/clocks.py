"""How busy each worker is: measured where the work is done, turned into shares and rates by the controller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class BusyClock:
    """Splits the time since :meth:`start` into busy and idle seconds; used inside a worker.

    Overlapping or nested busy sections count once. Safe from several threads.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._started = now()
        self._busy = 0.0
        self._sections = 0
        self._section_started = 0.0

    def start(self) -> None:
        """Count from now on: what was before (loading, warming up) is neither busy nor idle."""
        with self._lock:
            self._started = self._section_started = self._now()
            self._busy = 0.0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The time inside counts as busy."""
        with self._lock:
            if self._sections == 0:
                self._section_started = self._now()
            self._sections += 1
        try:
            yield
        finally:
            with self._lock:
                self._sections -= 1
                if self._sections == 0:
                    self._busy += self._now() - self._section_started

    def read(self) -> tuple[float, float]:
        """(busy, idle) seconds so far, a section that is still open included."""
        with self._lock:
            now = self._now()
            busy = self._busy + (now - self._section_started if self._sections else 0.0)
            return busy, max(0.0, now - self._started - busy)


@dataclass
class _Counter:
    busy: float
    idle: float
    window: float | None = None
    total_busy: float = 0.0
    total_idle: float = 0.0


class IdleMeter:
    """Idle shares of named workers, from the cumulative (busy, idle) seconds that they report.

    The first report of a worker is its starting point. A report below the last one means that the worker was replaced:
    the new one counts from zero, and what the old one did is kept.
    """

    def __init__(self) -> None:
        self._counters: dict[str, _Counter] = {}

    def update(self, name: str, busy_s: float, idle_s: float) -> float | None:
        """Take a report; returns the idle share since the previous one, None while there is none."""
        counter = self._counters.get(name)
        if counter is None:
            self._counters[name] = _Counter(busy_s, idle_s)
            return None
        replaced = busy_s < counter.busy - 1e-9 or idle_s < counter.idle - 0.05
        busy = busy_s if replaced else busy_s - counter.busy
        idle = max(0.0, idle_s if replaced else idle_s - counter.idle)
        counter.busy, counter.idle = busy_s, idle_s
        counter.total_busy += busy
        counter.total_idle += idle
        if busy + idle > 0:
            counter.window = idle / (busy + idle)
        return counter.window

    def skip(self, name: str, busy_s: float, idle_s: float) -> None:
        """Take a report without counting what was since the last one, as after a pause."""
        counter = self._counters.setdefault(name, _Counter(busy_s, idle_s))
        counter.busy, counter.idle = busy_s, idle_s

    def window(self, name: str) -> float | None:
        """Idle share between the last two reports."""
        counter = self._counters.get(name)
        return counter.window if counter else None

    def share(self, name: str) -> float | None:
        """Idle share since the first report; None while there is none."""
        counter = self._counters.get(name)
        total = counter.total_busy + counter.total_idle if counter else 0.0
        return counter.total_idle / total if counter and total > 0 else None


class RateMeter:
    """Units per second out of a counter that only grows, such as generated tokens; a drop means a replaced worker."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._first: float | None = None
        self._last: dict[str, tuple[float, float]] = {}
        self.total = 0.0
        """Units counted since the first update of each name."""

    def update(self, name: str, count: float) -> float:
        """Take a reading of the counter ``name``; returns its rate since the last reading, 0 at first."""
        now = self._now()
        if self._first is None:
            self._first = now
        if name not in self._last:
            self._last[name] = (now, count)
            return 0.0
        then, before = self._last[name]
        gained = count - before if count >= before else count
        self._last[name] = (now, count)
        self.total += gained
        return gained / (now - then) if now > then else 0.0

    def mean(self) -> float:
        """Units per second over all names since the first update."""
        elapsed = self._now() - self._first if self._first is not None else 0.0
        return self.total / elapsed if elapsed > 0 else 0.0
