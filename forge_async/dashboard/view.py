"""A run as the page shows it, out of its folder."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import yaml

from forge_async.dashboard.episodes import EpisodeTable
from forge_async.dashboard.tables import EventTable, MetricsTable
from forge_async.dashboard.timeline import SpanTable
from forge_async.errors import ConfigError
from forge_async.observability.run_folder import RunPaths

DRAWN = (
    *("reward", "train/loss", "train/grad_norm", "train/ratio_mean", "train/ratio_max", "staleness_mean"),
    *("staleness_max", "tokens_per_s/generated", "tokens_per_s/trained", "idle/trainer", "idle/generator_0"),
)
"""The series of the page's own charts, as in ``static/curves.js``."""

SILENT_S, STARTING_S = 30.0, 600.0
"""Seconds without a sign of life after which a run that has not ended is called silent: once it trains, and while its
engines start."""


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
        self._config: tuple[float, dict[str, Any]] = (0.0, {})

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
                    done = self.episodes.index(most=2000)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    def state(self, metrics_row: int, metrics_generation: int, event: int, keys: list[str]) -> dict[str, Any]:
        """What changes from second to second, since what the page has: rows of metrics, events, who does what.

        Args:
            metrics_row: rows that the page has of ``metrics_generation``.
            event: number of the last event that it has.
            keys: the series that it draws.
        """
        metrics, events = self.metrics, self.events
        with metrics.lock, events.lock:
            metrics.want(keys)
            metrics.update()
            events.update()
            row = metrics_row if metrics_generation == metrics.generation else 0
            return {
                "name": self.paths.path.resolve().name,
                "now": time.time(),
                "run": self._run(),
                "config": self._read_config(),
                "status": self._read_status(),
                "summary": _read_json(self.paths.summary),
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
                    "new": events.recent(after=event),
                    "kinds": dict(events.kinds),
                    "swaps": events.swaps,
                    "published": events.newest("published"),
                },
                "missing": [
                    table.file.path.name
                    for table in (metrics, events, self.episodes, self.spans)
                    if not table.file.exists
                ],
                "broken": {
                    table.file.path.name: table.broken
                    for table in (metrics, events, self.episodes, self.spans)
                    if table.broken
                },
            }

    def episode_rows(
        self, start: int, count: int, order: str, mixed: bool, step: int | None, lowest: float | None
    ) -> dict[str, Any]:
        """``count`` rows of the list of episodes from ``start`` on, and how many there are in all."""
        with self.episodes.lock:
            self.episodes.update()
            chosen = self.episodes.select(order, mixed, step, lowest)
            return {
                "total": len(chosen),
                "all": len(self.episodes),
                "generation": self.episodes.generation,
                "start": start,
                "rows": self.episodes.rows(chosen[start : start + count]),
            }

    def episode(self, index: int) -> dict[str, Any] | None:
        """One episode as it was recorded; None where there is no such one."""
        with self.episodes.lock:
            self.episodes.update()
            return self.episodes.record(index) if 0 <= index < len(self.episodes) else None

    def timeline(self, start: float | None, end: float | None, pixels: int) -> dict[str, Any]:
        """The spans between two Unix times (None: all there is)."""
        with self.spans.lock:
            self.spans.update()
            if not self.spans.lanes:
                return {"first": None, "last": None, "names": [], "lanes": []}
            start = self.spans.first if start is None else start
            end = self.spans.last if end is None else end
            return {
                "first": self.spans.first,
                "last": self.spans.last,
                "start": start,
                "end": end,
                "names": self.spans.names,
                "lanes": self.spans.window(start, max(end, start + 1e-6), pixels),
            }

    def outcome_of(self, command_id: str) -> dict[str, Any] | None:
        """The event that tells what came of a command."""
        with self.events.lock:
            self.events.update()
            for event in reversed(self.events.recent()):
                if event["kind"] == "control" and event.get("id") == command_id:
                    return event
        return None

    def _run(self) -> dict[str, Any]:
        """``state``: empty, starting, running, paused, silent, or how it ended."""
        events = self.events
        if not events.count:
            return {"state": "empty"}
        end, start = events.newest("end"), events.newest("start")
        last, ready = events.recent(after=events.count - 1)[0], events.newest("ready") is not None
        if end is not None:
            state = str(end.get("outcome", "ended"))
        elif time.time() - max(self._last_sign(), float(last.get("at", 0))) > (SILENT_S if ready else STARTING_S):
            state = "silent"
        elif not ready:
            state = "starting"
        else:
            state = str((self._read_status() or {}).get("state", "running"))
        began, monarch = (start or last).get("at"), events.newest("monarch_dashboard") or {}
        serves = end is None and float(monarch.get("at", 0)) >= float(began or 0)  # else it was another process's
        return {
            "state": state,
            "started": began,
            "last": last.get("at"),
            "monarch": monarch.get("url") if serves else None,
        }

    def _last_sign(self) -> float:
        try:
            return self.paths.status.stat().st_mtime
        except OSError:
            return 0.0

    def _read_status(self) -> dict[str, Any] | None:
        return _read_json(self.paths.status)

    def _read_config(self) -> dict[str, Any]:
        """A few settings that the page needs."""
        try:
            changed = self.paths.config.stat().st_mtime
            if changed != self._config[0]:
                tree = yaml.safe_load(self.paths.config.read_text(encoding="utf-8")) or {}
                self._config = (changed, tree)
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        tree = self._config[1]
        return {
            "steps": tree.get("steps"),
            "model": tree.get("model", {}).get("path"),
            "dataset": tree.get("dataset", {}).get("name") or tree.get("dataset", {}).get("kind"),
            "replicas": tree.get("policy", {}).get("num_replicas"),
            "update_mode": tree.get("policy", {}).get("update", {}).get("mode"),
            "max_staleness": tree.get("buffer", {}).get("max_staleness"),
            "group_size": tree.get("rollout", {}).get("group_size"),
        }


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there yet, or not whole
        return None
    return content if isinstance(content, dict) else None
