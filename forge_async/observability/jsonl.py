"""Files of JSON lines: one writer, whole lines only, readable while they grow."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np


class JsonLines:
    """Appends records to a file, one JSON object per line, written line by line; safe from several threads.

    A last line that a killed process left incomplete is cut off on opening: what a resumed run adds stays readable.

    Args:
        warn: told, the first time, that a line could not be written (a full disk); such lines are left out. None: the
            OSError is raised.
    """

    def __init__(self, path: Path, warn: Callable[[str], None] | None = None) -> None:
        self.path, self._warn = path, warn
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_partial_line(path)
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()

    def write(self, record: dict[str, Any]) -> None:
        """Append one record. NumPy values, dataclasses, paths and non-finite floats are turned into plain JSON."""
        line = encode(record) + "\n"
        with self._lock:
            if self._file.closed:
                raise ValueError(f"{self.path} is closed: nothing can be recorded after the run ended")
            try:
                write_line(self._file, line)
            except OSError as error:
                if self._warn is None:
                    raise
                self._warn, warn = lambda text: None, self._warn
                warn(f"{self.path} cannot be written, the run goes on and lines are missing there: {error}")

    def close(self) -> None:
        with self._lock:
            self._file.close()


def write_line(file: io.FileIO, line: str) -> None:
    """Append a line to an unbuffered file, whole or not at all."""
    data, done = line.encode(), 0
    try:
        while done < len(data):  # of a disk that fills up, the part that found room
            done += file.write(data[done:] if done else data)
    except OSError:
        file.truncate(file.seek(0, io.SEEK_END) - done)
        raise


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file that may still be growing: an incomplete last line is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def encode(record: Any) -> str:
    """``record`` as JSON, in one line; what is none of JSON's own as :func:`to_plain` has it."""
    try:
        return _ENCODER.encode(record)
    except (TypeError, ValueError):  # a float that is not finite, a key that is no text: all of it is gone through
        return _ENCODER.encode(to_plain(record))


def to_plain(value: Any) -> Any:
    """``value`` in JSON's own types. Non-finite floats become "nan", "inf" or "-inf", which ``float()`` reads back."""
    if isinstance(value, bool | str | int) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, np.generic):
        return to_plain(value.item())
    if isinstance(value, np.ndarray):
        return to_plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): to_plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted(to_plain(inner) for inner in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    return str(value)


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=to_plain)


def _cut_partial_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        content_end = file.seek(0, 2)
        position = content_end
        while position > 0:
            step = min(65536, position)
            file.seek(position - step)
            newline = file.read(step).rfind(b"\n")
            if newline >= 0:
                file.truncate(position - step + newline + 1)
                return
            position -= step
        file.truncate(0)
