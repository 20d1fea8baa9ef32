"""What each actor was doing and when: recorded where it happens, fetched with the status, written to ``spans.jsonl``.

::

    worker:     SpanRing ──since(cursor)──▶ status reply ──▶ controller: SpanLog ──▶ spans.jsonl

A worker notes spans on its own monotonic clock. The controller asks for news every few seconds, and puts them on its
own clock: it knows when it asked and when the answer came, so it knows the worker's clock to half of that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge_async.observability.jsonl import JsonLines

logger = logging.getLogger(__name__)

JOIN_S = 0.005
"""Spans of one name that follow each other within this are one."""

RawSpan = tuple[str, str, float, float, dict[str, Any]]
"""Lane, name, start, end, arguments; in seconds on the monotonic clock of the process that noted it."""


class SpanRing:
    """The newest spans of one process. A lane is a row of the timeline. Safe from several threads."""

    def __init__(self, size: int = 8192, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._lock = threading.Lock()
        self._spans: deque[list[Any]] = deque(maxlen=size)
        self._noted = 0
        """Spans ever noted; the newest has this number."""
        self._fetched = 0
        """Spans up to this number are with the controller: they do not grow any more."""
        self._newest: dict[str, tuple[int, list[Any]]] = {}
        self._open: dict[int, tuple[str, str, float]] = {}

    def note(self, lane: str, name: str, start: float, end: float, **args: Any) -> None:
        """Add a span that has ended; one that goes on with the lane's last is joined to it."""
        with self._lock:
            number, last = self._newest.get(lane, (0, None))
            if last and number > self._fetched and last[1] == name and last[4] == args and start - last[3] < JOIN_S:
                last[3] = end
                return
            self._noted += 1
            span = [lane, name, start, end, args]
            self._spans.append(span)
            self._newest[lane] = (self._noted, span)

    @contextmanager
    def span(self, lane: str, name: str, after_waiting: bool = False, **args: Any) -> Iterator[None]:
        """The time inside is a span; until it ends, it is among what is open.

        With ``after_waiting`` the time since the lane's last span is one named ``wait``.
        """
        key, start = object(), self.now()
        if after_waiting and lane in self._newest and start - (last := self._newest[lane][1][3]) > JOIN_S:
            self.note(lane, "wait", last, start)
        self._open[id(key)] = (lane, name, start)
        try:
            yield
        finally:
            del self._open[id(key)]
            self.note(lane, name, start, self.now(), **args)

    def since(self, cursor: int) -> dict[str, Any]:
        """What was noted after ``cursor``.

        Returns:
            ``now`` (this process's clock), ``cursor`` (for the next call), ``spans``, and ``open``: lane, name and
            start of what goes on.
        """
        with self._lock:
            new = min(self._noted - cursor, len(self._spans)) if cursor <= self._noted else len(self._spans)
            self._fetched = self._noted
            spans = [tuple(self._spans[i]) for i in range(len(self._spans) - new, len(self._spans))]
            return {"now": self.now(), "cursor": self._noted, "spans": spans, "open": list(self._open.values())}


class ClockOffset:
    """How far a worker's clock is ahead of the controller's, from questions and answers.

    The best estimate is that of the quickest answer; an offset that may be 0 is 0, as it is on one host.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._error = float("inf")

    def update(self, asked: float, theirs: float, answered: float) -> None:
        """Take a reading: the worker's clock said ``theirs`` between ``asked`` and ``answered``."""
        error = (answered - asked) / 2
        if error < self._error:
            offset = theirs - (asked + answered) / 2
            self.seconds, self._error = (0.0 if abs(offset) <= error else offset), error


class SpanLog:
    """Writes ``spans.jsonl``: one line per span with ``actor``, ``lane``, ``name``, ``at`` and ``s``.

    ``at`` is Unix time in seconds, the same clock for all actors and that of the event log; ``s`` is the duration.
    """

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path, logger.warning)
        self._epoch = time.time() - time.monotonic()
        self._cursors: dict[tuple[str, int], int] = {}
        self._offsets: dict[tuple[str, int], ClockOffset] = {}

    def cursor(self, actor: str, pid: int) -> int:
        """Where to ask process ``pid`` from."""
        return self._cursors.get((actor, pid), 0)

    def add(self, actor: str, pid: int, reply: dict[str, Any], asked: float, answered: float) -> str:
        """Write what :meth:`SpanRing.since` returned; ``asked`` and ``answered`` are the controller's monotonic clock.

        Returns what the actor is doing now, "" if nothing is open.
        """
        key = (actor, pid)
        offset = self._offsets.setdefault(key, ClockOffset())
        offset.update(asked, reply["now"], answered)
        new = max(0, reply["cursor"] - self._cursors.get(key, 0))  # two questions at once have one answer
        self._cursors[key] = max(reply["cursor"], self._cursors.get(key, 0))
        for lane, name, start, end, args in reply["spans"][max(0, len(reply["spans"]) - new) :]:
            at = self._epoch + start - offset.seconds
            more = {"args": args} if args else {}
            self._lines.write(
                {"actor": actor, "lane": lane, "name": name, "at": round(at, 6), "s": round(end - start, 6), **more}
            )
        return str(reply["open"][0][1]) if reply["open"] else ""

    def close(self) -> None:
        self._lines.close()
