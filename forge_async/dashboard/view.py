"""A run as the page shows it, out of its folder."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from forge_async.dashboard.episodes import EpisodeTable
from forge_async.dashboard.tables import EventTable, MetricsTable
from forge_async.dashboard.timeline import SpanTable
from forge_async.errors import ConfigError
from forge_async.observability.alive import has_ended
from forge_async.observability.run_folder import RunPaths

DRAWN = (
    *("reward", "train/loss", "train/grad_norm", "train/ratio_mean", "train/ratio_max", "staleness_mean"),
    *("staleness_max", "tokens_per_s/generated", "tokens_per_s/trained", "idle/trainer", "idle/generator_0"),
)
"""The series of the page's own charts, as in ``static/curves.js``."""

NEW_SPANS = 1000
"""So many new ones are told alone; of more, the whole window is told again, as the page may draw far too many."""

SILENT_S, STARTING_S = 30.0, 600.0
"""Seconds without a sign of life after which a run that has not ended is called silent: once it trains (or three times
its ``metrics.status_every_s``, where that is more), and while its engines start."""


class RunView:
    """One run's folder, read as it grows. Safe from several threads."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError("RUN", str(folder), "the folder of a run")
        self.paths = RunPaths(folder)
        self.metrics = MetricsTable(self.paths.metrics)
        self.events = EventTable(self.paths.events)
        self.episodes = EpisodeTable(self.paths.episodes)
        self.spans = SpanTable(self.paths.spans)
        self.server = f"{time.time_ns()}"
        """What a page that goes on asking knows this view from another at the same address by."""
        self.caught_up = False
        """Whether :meth:`read_ahead` is done: what is asked for now takes no longer than it takes to change threads."""
        self._config: tuple[tuple[int, int], Any] = ((0, 0), None)
        """When it was changed and its size, and what was in it."""

    def read_ahead(self) -> threading.Thread:
        """Read what there is in a thread, before anybody asks; returns it."""

        def read() -> None:
            self.metrics.want(DRAWN)
            for table in (self.metrics, self.events, self.spans, self.episodes):
                with table.lock:
                    table.update()
            done = False
            while not done:  # in parts: a page may be waiting for its first rows
                with self.episodes.lock:
                    done = self.episodes.index(most=500)
                time.sleep(0.02)  # it is for filters: what a page shows at first goes before
            self.caught_up = True

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    def state(
        self, metrics_row: int, metrics_generation: int, event: int, keys: Sequence[str], event_generation: int = 0
    ) -> dict[str, Any]:
        """What changes from second to second, since what the page has: rows of metrics, events, who does what.

        Args:
            metrics_row: rows that the page has of ``metrics_generation``.
            event: number of the last event that it has of ``event_generation``.
            keys: the series that it draws.
        """
        episodes = self._count_episodes()
        metrics, events = self.metrics, self.events
        with metrics.lock, events.lock:
            metrics.want(keys)
            metrics.update()
            events.update()
            row = metrics_row if metrics_generation == metrics.generation else 0
            config, status = self._read_config(), self._read_status()
            tables = {table.file.path.name: table for table in (metrics, events, self.episodes, self.spans)}
            sizes = {name: table.file.size for name, table in tables.items()}
            return {
                "name": self.paths.path.resolve().name,
                "server": self.server,
                "now": time.time(),
                "run": self._run(config, status),
                "config": _settings(config),
                "status": status,
                "summary": _read_json(self.paths.summary) if events.newest("end") else None,
                "episodes": {"count": episodes, "generation": self.episodes.generation},
                "metrics": {
                    "generation": metrics.generation,
                    "row": row,
                    "steps": metrics.steps[row:],
                    "columns": metrics.since(row, keys),
                    "keys": metrics.keys,
                    "last": metrics.last,
                },
                "events": {
                    "count": events.count,
                    "generation": events.generation,
                    "new": events.recent(after=event if event_generation == events.generation else 0),
                    "kinds": dict(events.kinds),
                    "swaps": events.swaps,
                    "published": events.newest("published"),
                },
                "spans": sizes[self.spans.file.path.name],
                "missing": [name for name, size in sizes.items() if size is None],
                "broken": {name: table.broken for name, table in tables.items() if table.broken},
            }

    def episode_rows(
        self, start: int, count: int, order: str, mixed: bool, step: int | None, of: int | None = None
    ) -> dict[str, Any]:
        """``count`` rows of the list of episodes from ``start`` on, and how many there are in all.

        Args:
            of: only the first so many of the file, as they were when a page asked first: what was added since would
                shift its other pages.
        """
        with self.episodes.lock:
            self.episodes.update()
            chosen = self.episodes.select(order, mixed, step, of)
            return {
                "total": len(chosen),
                "all": len(self.episodes) if of is None else min(of, len(self.episodes)),
                "generation": self.episodes.generation,
                "start": start,
                "rows": self.episodes.rows(chosen[start : start + count]),
            }

    def episode(self, index: int) -> dict[str, Any] | None:
        """One episode as it was recorded; None where there is no such one."""
        with self.episodes.lock:
            self.episodes.update()
            return self.episodes.record(index) if 0 <= index < len(self.episodes) else None

    def timeline(
        self, start: float | None, end: float | None, pixels: int, after: int = 0, generation: int = 0
    ) -> dict[str, Any]:
        """The spans between two Unix times (None: all there is); of a page that has some, only those that are new.

        Args:
            after: how many of ``generation`` there were when it asked last.
        """
        spans = self.spans
        with spans.lock:
            spans.update()
            if not spans.lanes:
                return {"first": None, "last": None, "names": [], "lanes": []}
            start = spans.first if start is None else start
            end = spans.last if end is None else end
            adds = generation == spans.generation and 0 < after <= spans.count < after + NEW_SPANS
            return {
                "first": spans.first,
                "last": spans.last,
                "generation": spans.generation,
                "count": spans.count,
                "adds": adds,
                "names": spans.names,
                "lanes": spans.since(after) if adds else spans.window(start, max(end, start + 1e-6), pixels),
            }

    def outcome_of(self, command_id: str) -> dict[str, Any] | None:
        """The event that tells what came of a command."""
        with self.events.lock:
            self.events.update()
            for event in reversed(self.events.recent()):
                if event["kind"] == "control" and event.get("id") == command_id:
                    return event
        return None

    def _run(self, config: Any, status: dict[str, Any] | None) -> dict[str, Any]:
        """``state``: empty, starting, running, paused, silent, killed, or how it ended; Unix times of its ``started``,
        of its ``last`` event, and when it was last ``seen`` to live."""
        events = self.events
        if not events.count:
            return {"state": "empty"}
        end, start = events.newest("end"), events.newest("start")
        last, ready = events.recent(after=events.count - 1)[0], events.newest("ready") is not None
        seen = max(self._last_look(), _time_of(last))
        if end is not None:
            state = str(end.get("outcome", "ended"))
        elif has_ended((start or {}).get("process")):
            state = "killed"
        elif time.time() - seen > (_silent_s(config) if ready else STARTING_S):
            state = "silent"
        elif not ready:
            state = "starting"
        else:
            state = str((status or {}).get("state", "running"))
        began, monarch = _time_of(start or last), events.newest("monarch_dashboard") or {}
        serves = end is None and _time_of(monarch) >= began  # else it was another process's
        return {
            "state": state,
            "started": began or None,
            "last": _time_of(last) or None,
            "seen": seen or None,
            "monarch": monarch.get("url") if serves else None,
        }

    def _last_look(self) -> float:
        try:
            return self.paths.status.stat().st_mtime
        except OSError:
            return 0.0

    def _read_status(self) -> dict[str, Any] | None:
        """``status.json``, unless it was the process before a resume that wrote it."""
        status, start = _read_json(self.paths.status), self.events.newest("start")
        if status is None or (start is not None and (_time_of(status) or self._last_look()) < _time_of(start)):
            return None
        return status

    def _count_episodes(self) -> int:
        """As they are found: while somebody reads them, that is not waited for."""
        if self.episodes.lock.acquire(blocking=False):
            try:
                self.episodes.update()
            finally:
                self.episodes.lock.release()
        return len(self.episodes)

    def _read_config(self) -> Any:
        """What is in ``config.yaml``; None where there is none, or not yet."""
        try:
            found = self.paths.config.stat()
            if (found.st_mtime_ns, found.st_size) != self._config[0]:
                self._config = ((found.st_mtime_ns, found.st_size), None)  # also while it is not whole
                tree = yaml.safe_load(self.paths.config.read_text(encoding="utf-8"))
                self._config = (self._config[0], tree)
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            return None
        return self._config[1]


def _settings(config: Any) -> dict[str, Any]:
    """A few settings that the page needs."""
    return {
        "steps": _setting(config, "steps"),
        "model": _setting(config, "model", "path"),
        "dataset": _setting(config, "dataset", "name") or _setting(config, "dataset", "kind"),
        "replicas": _setting(config, "policy", "num_replicas"),
        "update_mode": _setting(config, "policy", "update", "mode"),
        "max_staleness": _setting(config, "buffer", "max_staleness"),
    }


def _setting(config: Any, *keys: str) -> str | float | None:
    """One setting; None where there is no such one."""
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config if isinstance(config, str | int | float) else None


def _silent_s(config: Any) -> float:
    """Seconds without a sign of life after which the run is called silent; one that never looks gives none."""
    every_s = _setting(config, "metrics", "status_every_s")
    if not isinstance(every_s, int | float):
        return SILENT_S
    return max(SILENT_S, 3 * every_s) if every_s > 0 else math.inf


def _time_of(event: dict[str, Any]) -> float:
    """When it was written, Unix time; 0 where it does not say."""
    at = event.get("at")
    return float(at) if isinstance(at, int | float) and abs(at) < 1e12 else 0.0


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # not there yet, or not whole
        return None
    return content if isinstance(content, dict) else None
