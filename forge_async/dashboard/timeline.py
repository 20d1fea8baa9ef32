"""Spans for the timeline: all of them, or where there are more than pixels, what took most of each pixel."""

from __future__ import annotations

import bisect
import json
import re
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from forge_async.dashboard.tables import NO_LINE, Table
from forge_async.observability.spans import JOIN_S

SPAN = re.compile(
    rb'\{"actor": "([^"\\]*)", "lane": "([^"\\]*)", "name": "([^"\\]*)", "at": (\d{1,12}(?:\.\d+)?), '
    rb'"s": (\d{1,12}(?:\.\d+)?(?:e-\d+)?)(?:\}|, "args": \{(?:"version": (\d{1,9})[,}]|\}))'
)
"""What ``SpanLog`` writes; others are parsed as JSON."""

SHOWN_WHOLE = 1500
"""Spans of one lane within the window up to which each is shown."""


class Lane:
    """The spans of one row of the timeline."""

    def __init__(self) -> None:
        self.starts, self.ends = array("d"), array("d")
        self.names = array("i")
        self.versions = array("i")
        """-1 where a span has none."""
        self.numbers = array("q")
        """Which of all spans each is, in the order of the file."""


class SpanTable(Table):
    """``spans.jsonl`` by lane."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.clear()

    def clear(self) -> None:
        self.lanes: dict[str, Lane] = {}
        self.names: list[str] = []
        self._by_bytes: dict[tuple[bytes, bytes], int] = {}
        self._kinds: dict[bytes, int] = {}
        """Both count from 1."""
        self.first, self.last = float("inf"), float("-inf")
        self.count = 0

    def update(self) -> None:
        """Take in new lines: all of a chunk at once where they are what a run writes, else one by one."""
        for _, data in self.file.new_chunks():
            self._follow_restart()
            found = SPAN.findall(data)
            if len(found) != data.count(b"\n"):
                found = self._parsed(data.splitlines())
            if found:
                self._add(found)
        self._follow_restart()

    def _parsed(self, lines: list[bytes]) -> list[tuple[bytes, ...]]:
        found = []
        for line in filter(None, lines):
            try:
                span = json.loads(line)
                names = [str(span[key]).encode() for key in ("actor", "lane", "name")]
                numbers = [float(span["at"]), float(span["s"]), int(span.get("args", {}).get("version", -1))]
                if not all(-1 <= number < most for number, most in zip(numbers, (1e12, 1e12, 2**31), strict=True)):
                    raise ValueError("no such numbers")
            except NO_LINE:
                self.broken += 1
            else:
                found.append((*names, *(repr(number).encode() for number in numbers)))
        return found

    def _add(self, found: list[tuple[bytes, ...]]) -> None:
        actors, rows, names, at, seconds, version = zip(*found, strict=True)
        starts = np.array(list(map(float, at)))
        ends = starts + np.array(list(map(float, seconds)))
        kinds = np.array([self._kinds.get(name) or self._new_kind(name) for name in names], np.int32) - 1
        versions = np.array([int(number) if number else -1 for number in version], np.int32)
        lanes = np.array([self._by_bytes.get(key) or self._new_lane(key) for key in zip(actors, rows, strict=True)]) - 1
        numbers = np.arange(self.count, self.count + len(found), dtype=np.int64)
        everything = list(self.lanes.values())
        for number in np.unique(lanes):
            chosen, lane = lanes == number, everything[number]
            for column, values in (
                (lane.starts, starts),
                (lane.ends, ends),
                (lane.names, kinds),
                (lane.versions, versions),
                (lane.numbers, numbers),
            ):
                column.frombytes(values[chosen].tobytes())
        self.first, self.last = min(self.first, float(starts.min())), max(self.last, float(ends.max()))
        self.count += len(found)

    def _new_kind(self, name: bytes) -> int:
        self.names.append(name.decode(errors="replace"))
        self._kinds[name] = len(self.names)
        return len(self.names)

    def _new_lane(self, key: tuple[bytes, bytes]) -> int:
        actor, row = key
        title = actor if row == b"main" else actor + b" " + row
        self.lanes[title.decode(errors="replace")] = Lane()
        self._by_bytes[key] = len(self.lanes)
        return len(self.lanes)

    def since(self, count: int) -> list[dict[str, Any]]:
        """Per lane, as :meth:`window`, the spans after the first ``count``."""
        lanes = []
        for name in sorted(self.lanes, key=_place):
            lane = self.lanes[name]
            new = bisect.bisect_left(lane.numbers, count)
            columns = (lane.names[new:], lane.starts[new:], lane.ends[new:], lane.versions[new:])
            lanes.append({"lane": name, "spans": _joined(zip(*columns, strict=True))})
        return lanes

    def window(self, start: float, end: float, pixels: int) -> list[dict[str, Any]]:
        """Per lane the spans in [start, end] (Unix time): [name's index, start, seconds, version, how many].

        Where a lane has too many, a pixel's worth of time shows what took most of it, and equal neighbours are joined.
        """
        return [
            {"lane": name, "spans": self._lane(self.lanes[name], start, end, max(1, min(pixels, 4000)))}
            for name in sorted(self.lanes, key=_place)
        ]

    def _lane(self, lane: Lane, start: float, end: float, pixels: int) -> list[list[Any]]:
        starts, ends = np.frombuffer(lane.starts), np.frombuffer(lane.ends)
        names, versions = np.frombuffer(lane.names, np.int32), np.frombuffer(lane.versions, np.int32)
        chosen = np.flatnonzero((starts < end) & (ends > start))
        if len(chosen) <= SHOWN_WHOLE:
            columns = (names[chosen], starts[chosen], ends[chosen], versions[chosen])
            return _joined(zip(*(column.tolist() for column in columns), strict=True))
        width = (end - start) / pixels
        left = np.clip(((starts[chosen] - start) / width).astype(int), 0, pixels - 1)
        seconds = np.zeros((len(self.names), pixels))
        np.add.at(seconds, (names[chosen], left), np.minimum(ends[chosen] - starts[chosen], width))
        counts = np.bincount(left, minlength=pixels)
        long = chosen[ends[chosen] - starts[chosen] > width]  # these fill pixels of their own
        for i in long.tolist():
            first, last = int((starts[i] - start) / width), int((ends[i] - start) / width)
            seconds[names[i], max(0, first) : max(0, last)] = width
        winner, busy = seconds.argmax(0), seconds.max(0) > 0
        result: list[list[Any]] = []
        for pixel in np.flatnonzero(busy).tolist():
            at = start + pixel * width
            if result and result[-1][0] == winner[pixel] and abs(result[-1][1] + result[-1][2] - at) < width / 2:
                result[-1][2] += width
                result[-1][4] += int(counts[pixel])
            else:
                result.append([int(winner[pixel]), at, width, -1, int(counts[pixel])])
        return result


def _joined(spans: Iterable[tuple[int, float, float, int]]) -> list[list[Any]]:
    """As [name, start, seconds, version, 1]; what the controller's questions have cut is one again."""
    result: list[list[Any]] = []
    end = -1.0
    for name, start, stop, version in spans:
        if result and result[-1][0] == name and result[-1][3] == version and 0 <= start - end < JOIN_S:
            result[-1][2] = round(stop - result[-1][1], 6)
        else:
            result.append([name, start, round(stop - start, 6), version, 1])
        end = stop
    return result


def _place(lane: str) -> tuple[int, str]:
    order = ("trainer", "generator", "rewards")
    return next((i for i, word in enumerate(order) if lane.startswith(word)), len(order)), lane
