"""How much of a version is written, told through shared memory: a message costs more than most tensors' copies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from forge_async.store.shared_memory import Segment, attach

POLL_S = 0.0005
"""Seconds between two looks at the counts: a small tensor's copy."""

Needs = Sequence[tuple[int, int]]
"""(Rank, elements that it must have written)."""


class WrittenCounts:
    """For each rank the number of elements that it has written, in the order of its plan; int64 [ranks] in a segment of
    the store."""

    def __init__(self, segment: Segment) -> None:
        self._counts = attach(segment).numpy()[: segment.nbytes // 8 * 8].view(np.int64)
        self._fence = threading.Lock()

    def note(self, rank: int, elements: int) -> None:
        """Tell that the first ``elements`` of a rank's plan are written."""
        with self._fence:  # orders memory: what was written before it is given back is seen before what comes then
            pass
        with self._fence:
            self._counts[rank] = elements

    def wait(self, needs: Needs, ended: Callable[[], bool]) -> bool:
        """Block until all that is needed is written; False if ``ended`` is true before. Not for the event loop."""
        while not all(self._counts[rank] >= elements for rank, elements in needs):
            if ended():
                return False
            time.sleep(POLL_S)
        with self._fence:
            return True
