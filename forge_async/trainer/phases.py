"""Where a step's time goes: packing, forward, log-probs, backward and the rest, without holding the device up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

OTHER = "other"
"""The phase of what is in no other."""

Note = Callable[[str, float, float], None]
"""Takes a phase with its start and end, seconds on the monotonic clock."""


class Phases:
    """Times the phases of one step after another. A phase within a phase counts for itself alone.

    On a CUDA device the times are those of the stream, taken by events and read when the step is over; a phase's
    kernels count for it, not the calls that queue them.

    Args:
        device: where the step runs.
        note: told of every stretch of a phase once the step is over.
    """

    def __init__(self, device: torch.device, note: Note = lambda name, start, end: None) -> None:
        self.note = note
        self._cuda = device.type == "cuda"
        self._began = 0.0
        self._marks: list[tuple[str, Any]] = []
        """Phase and when it began, in turn; empty outside a step."""
        self._stack: list[str] = []

    def begin(self) -> None:
        """A step starts."""
        self._began = time.monotonic()
        self._marks, self._stack = [], []
        self._enter(OTHER)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is inside is phase ``name``; outside a step nothing is timed."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def enter(self, name: str) -> None:
        if self._marks:
            self._enter(name)

    def leave(self) -> None:
        """Go on with the phase around the current one."""
        if self._marks:
            self._stack.pop()
            self._mark(self._stack[-1])

    def _enter(self, name: str) -> None:
        self._stack.append(name)
        self._mark(name)

    def _mark(self, name: str) -> None:
        self._marks.append((name, self._now()))

    def _now(self) -> Any:
        if not self._cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self) -> dict[str, float]:
        """The step is over: seconds by phase, which add up to all of it."""
        self._mark(OTHER)
        marks, self._marks, self._stack = self._marks, [], []
        names = [name for name, _ in marks]
        if self._cuda:
            marks[-1][1].synchronize()
            times = [self._began + 1e-3 * marks[0][1].elapsed_time(mark) for _, mark in marks]
        else:
            times = [mark for _, mark in marks]
        found: dict[str, float] = {}
        for name, start, stop in zip(names, times, times[1:], strict=False):
            found[name] = found.get(name, 0.0) + stop - start
            if name != OTHER:
                self.note(name, start, stop)
        return found
