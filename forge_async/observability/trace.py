"""A run's spans as a trace that Perfetto (ui.perfetto.dev) and ``chrome://tracing`` open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from forge_async.errors import ForgeError
from forge_async.observability.jsonl import read
from forge_async.observability.run_folder import RunPaths, write_whole

MARKS = ("step", "published", "swapped", "checkpoint", "respawned", "requeued", "replica_hung", "control", "end")
"""Events that are shown as marks, in a row of their own."""


def trace_events(spans: Iterable[dict[str, Any]], events: Iterable[dict[str, Any]] = ()) -> Iterator[dict[str, Any]]:
    """Trace events: one process per actor, one thread per lane; times in microseconds since the Unix epoch."""
    processes: dict[str, int] = {}
    threads: dict[tuple[str, str], int] = {}

    def place(actor: str, lane: str) -> Iterator[dict[str, Any]]:
        if actor not in processes:
            processes[actor] = len(processes) + 1
            yield {"ph": "M", "name": "process_name", "pid": processes[actor], "args": {"name": actor}}
        if (actor, lane) not in threads:
            threads[actor, lane] = len(threads) + 1
            pid, tid = processes[actor], threads[actor, lane]
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}}

    for span in spans:
        actor, lane = span["actor"], span["lane"]
        yield from place(actor, lane)
        yield {
            "ph": "X",
            "name": span["name"],
            "cat": actor.split()[0],
            "pid": processes[actor],
            "tid": threads[actor, lane],
            "ts": round(span["at"] * 1e6),
            "dur": round(span["s"] * 1e6, 3),
            "args": span.get("args", {}),
        }
    for event in events:
        if event["kind"] not in MARKS:
            continue
        yield from place("run", "events")
        args = {key: value for key, value in event.items() if key not in ("t", "at", "kind")}
        pid, tid = processes["run"], threads["run", "events"]
        mark = {"ph": "i", "s": "p", "name": event["kind"], "pid": pid, "tid": tid, "ts": round(event["at"] * 1e6)}
        yield {**mark, "args": args}


def write_trace(run: str | Path, target: str | Path | None = None) -> Path:
    """Write the trace of a run's folder; returns the file, by default ``trace.json`` in it.

    Raises:
        ForgeError: there are no spans.
    """
    paths = RunPaths(run)
    if not paths.spans.exists():
        raise ForgeError(f"{paths.spans} does not exist: {run} is no run folder, or metrics.status_every_s was 0")
    target = paths.path / "trace.json" if target is None else Path(target)
    content = {"traceEvents": list(trace_events(read(paths.spans), read(paths.events))), "displayTimeUnit": "ms"}
    write_whole(target, json.dumps(content, separators=(",", ":")))
    return target
