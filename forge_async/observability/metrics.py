"""Numbers per step, written as JSON lines and for TensorBoard."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_async.observability.config import MetricsConfig
from forge_async.observability.jsonl import JsonLines


class MetricsLogger:
    """Writes ``metrics.jsonl`` and ``tensorboard/`` in a run's folder.

    Each series (key) moves forward only: within one logger a step below the key's last one is an error, because
    readers would draw the line backwards. A resumed run may write steps again; readers take the last record of a step.
    """

    def __init__(self, folder: Path, config: MetricsConfig | None = None) -> None:
        config = config or MetricsConfig()
        self._lines = JsonLines(folder / "metrics.jsonl") if config.jsonl else None
        self._board = TensorBoardFile(folder / "tensorboard") if config.tensorboard else None
        self._last: dict[str, int] = {}
        self._lock = threading.Lock()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record the values of a step. Numbers go to both files, lists and text to JSONL only.

        Nested mappings become ``outer/inner``.

        Raises:
            ValueError: a key was already logged for a later step; nothing is written then.
        """
        flat = flatten(values)
        with self._lock:
            for key in flat:
                if step < self._last.get(key, step):
                    raise ValueError(f"metric {key!r}: step {step} comes after step {self._last[key]}; steps only grow")
            self._last.update(dict.fromkeys(flat, step))
            if self._lines is not None:
                self._lines.write({"step": step, "at": round(time.time(), 3), **flat})
            if self._board is not None:
                self._board.write(step, {k: float(v) for k, v in flat.items() if _is_number(v)})

    def close(self) -> None:
        with self._lock:
            if self._lines is not None:
                self._lines.close()
            if self._board is not None:
                self._board.close()


class TensorBoardFile:
    """Scalars in TensorBoard's format. Written without torch, so that the controller need not import it."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # slow to import

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder), flush_secs=10)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if scalars:
            values = [Summary.Value(tag=key, simple_value=value) for key, value in scalars.items()]
            self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Writes what is pending and ends the writer's thread."""
        self._writer.close()


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"reward": {"exact": 1}}`` becomes ``{"reward/exact": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0
