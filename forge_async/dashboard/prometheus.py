"""The newest figures of a run in Prometheus' text format, for its scraper or an OpenTelemetry collector."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from forge_async.dashboard.view import RunView

__all__ = ["CONTENT_TYPE", "exposition"]


def exposition(view: RunView) -> bytes:
    """Every series of ``metrics.jsonl`` as ``forge_async_<name>{run="..."}``, at its newest step."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(view))
    return generate_latest(registry)


class _Figures:
    def __init__(self, view: RunView) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        state = self._view.state(2**31, self._view.metrics.generation, 2**31, [])
        last = dict(state["metrics"]["last"])
        last.pop("at", None)
        for name, value in sorted(last.items()):
            try:
                number = float(value)
            except (TypeError, ValueError, OverflowError):
                continue
            clean = re.sub(r"[^a-zA-Z0-9_]", "_", name)
            gauge = GaugeMetricFamily(f"forge_async_{clean}", f"{name} of metrics.jsonl", labels=["run"])
            gauge.add_metric([state["name"]], number)
            yield gauge
        running = GaugeMetricFamily("forge_async_running", "1 while the run goes on", labels=["run", "state"])
        running.add_metric([state["name"], state["run"]["state"]], float(state["run"]["state"] == "running"))
        yield running
