"""Numbers per step, written as JSON lines, for TensorBoard and for W&B."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from forge_async.observability.config import MetricsConfig
from forge_async.observability.jsonl import JsonLines
from forge_async.observability.wandb_run import WandbRun

TENSORBOARD_S = 10
"""Seconds between two writings of ``tensorboard/``."""


class Backend(Protocol):
    """Takes the numbers of each step."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsLogger:
    """Writes ``metrics.jsonl`` and ``tensorboard/`` in a run's folder, and to W&B.

    A backend that fails, the file too, costs a warning, its first time, and nothing else.

    Each series (key) moves forward only: within one logger a step below the key's last one is an error, because
    readers would draw the line backwards. A resumed run may write steps again; readers take the last record of a step.

    Args:
        warn: how a person is told that a backend has failed.
        more: further backends, by the name that a warning gives them.
    """

    def __init__(
        self,
        folder: Path,
        config: MetricsConfig | None = None,
        warn: Callable[[str], None] | None = None,
        more: Mapping[str, Backend] | None = None,
    ) -> None:
        config = config or MetricsConfig()
        self._warn = warn or (lambda text: print(f"warning: {text}", file=sys.stderr))
        self._failed: set[str] = set()
        self._lines = JsonLines(folder / "metrics.jsonl", self._warn) if config.jsonl else None
        self._backends: dict[str, Backend] = dict(more or {})
        if config.tensorboard:
            self._guard("TensorBoard", lambda: self._add("TensorBoard", TensorBoardFile(folder / "tensorboard")))
        if config.wandb:
            self._add("W&B", WandbRun(folder, config.wandb_project, config.wandb, self._warn))
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
            scalars = {k: float(v) for k, v in flat.items() if _is_number(v)}
            for name, backend in self._backends.items():
                self._guard(name, functools.partial(backend.write, step, scalars))

    def close(self) -> None:
        with self._lock:
            if self._lines is not None:
                self._lines.close()
            for name, backend in self._backends.items():
                self._guard(name, backend.close)
            self._backends.clear()

    def _add(self, name: str, backend: Backend) -> None:
        self._backends[name] = backend

    def _guard(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # a disk that is full, a service that is down: not worth a run
            if name not in self._failed:
                self._failed.add(name)
                self._warn(f"{name} failed, the run goes on without it: {type(error).__name__}: {error}")


class TensorBoardFile:
    """Scalars in TensorBoard's format. Written without torch, so that the controller need not import it.

    Quick steps are written some at once, which costs a fifth of one by one; none waits longer than ``TENSORBOARD_S``.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # slow to import

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder), flush_secs=TENSORBOARD_S)
        self._pending: list[tuple[float, int, Mapping[str, float]]] = []
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        if not scalars:
            return
        with self._lock:
            self._pending.append((time.time(), step, scalars))
            if self._timer is None:
                self._timer = threading.Timer(TENSORBOARD_S, self._write)
                self._timer.daemon = True
                self._timer.start()

    def close(self) -> None:
        """Writes what is pending and ends the writer's thread."""
        if self._timer is not None:
            self._timer.cancel()
        self._write()
        self._writer.close()

    def _write(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        with self._lock:
            pending, self._pending, self._timer = self._pending, [], None
        for at, step, scalars in pending:
            values = [Summary.Value(tag=key, simple_value=value) for key, value in scalars.items()]
            self._writer.add_event(Event(wall_time=at, step=step, summary=Summary(value=values)))


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
