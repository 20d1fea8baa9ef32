"""Files of lines that may still be growing: what is new, whole lines only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

CHUNK_BYTES = 1 << 20
"""Small, as whoever works on a chunk keeps others from running."""
NEWLINE = 10


class GrowingFile:
    """Reads a file in steps. A missing file is an empty one; one that shrank, or is another one, is read anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        """Bytes read: the end of the last whole line."""
        self.restarts = 0
        """How often the file was made anew: what was read before counts no more."""
        self._inode = 0

    @property
    def size(self) -> int | None:
        """Bytes that it has now; None: there is no such file."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return None

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """(Offset, line without its end) of every whole line that was not read before."""
        for first, data in self.new_chunks():
            start = 0
            while (end := data.find(b"\n", start)) >= 0:
                yield first + start, data[start:end]
                start = end + 1

    def new_starts(self) -> Iterator[np.ndarray]:
        """int64 [N]: the same lines' offsets, many at a time."""
        for first, data in self.new_chunks():
            ends = np.flatnonzero(np.frombuffer(data, np.uint8) == NEWLINE)
            yield np.concatenate([[first], first + ends[:-1] + 1])

    def new_chunks(self) -> Iterator[tuple[int, bytes]]:
        """(Offset, whole lines) of what was not read before."""
        try:
            found = self.path.stat()
            if (found.st_ino, found.st_size) == (self._inode, self.offset):
                return
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if self.offset and (found.st_size < self.offset or found.st_ino != self._inode):
                    self.offset, self.restarts = 0, self.restarts + 1
                self._inode = found.st_ino
                first = file.seek(self.offset)
                rest = b""
                while chunk := file.read(min(CHUNK_BYTES, found.st_size - first - len(rest))):
                    data = rest + chunk if rest else chunk
                    length = data.rfind(b"\n") + 1
                    rest = data[length:]
                    if length:
                        self.offset = first + length
                        yield first, data[:length]
                        first += length
        except FileNotFoundError:
            if self.offset:
                self.offset, self.restarts = 0, self.restarts + 1

    def line_at(self, offset: int) -> bytes:
        """The line that begins at ``offset``."""
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.readline()
