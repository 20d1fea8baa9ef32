"""Spans from a worker's ring to the run's file and to a trace, on one clock."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from forge_async.errors import ForgeError
from forge_async.observability import trace
from forge_async.observability.jsonl import read
from forge_async.observability.spans import ClockOffset, SpanLog, SpanRing


def test_spans_that_go_on_are_joined_until_they_were_fetched() -> None:
    ring = SpanRing()
    ring.note("main", "generate", 0.0, 1.0, version=3)
    ring.note("main", "generate", 1.001, 2.0, version=3)
    ring.note("main", "generate", 2.001, 3.0, version=4)  # another version
    ring.note("weights", "pull", 2.5, 2.9)
    ring.note("main", "generate", 3.5, 4.0, version=4)  # after a gap
    first = ring.since(0)
    assert [(lane, name, start, end) for lane, name, start, end, _ in first["spans"]] == [
        ("main", "generate", 0.0, 2.0),
        ("main", "generate", 2.001, 3.0),
        ("weights", "pull", 2.5, 2.9),
        ("main", "generate", 3.5, 4.0),
    ]
    ring.note("main", "generate", 4.001, 5.0, version=4)  # what is with the controller does not change any more
    assert [span[2:4] for span in ring.since(first["cursor"])["spans"]] == [(4.001, 5.0)]
    assert ring.since(first["cursor"])["cursor"] == 5
    assert ring.since(5)["spans"] == []


def test_a_full_ring_forgets_the_oldest_and_says_what_is_left() -> None:
    ring = SpanRing(size=3)
    for i in range(5):
        ring.note("main", f"{i}", i, i + 0.5)
    assert [span[1] for span in ring.since(0)["spans"]] == ["2", "3", "4"]
    assert [span[1] for span in ring.since(4)["spans"]] == ["4"]
    assert [span[1] for span in ring.since(99)["spans"]] == ["2", "3", "4"], "the cursor of a process before it"


def test_what_is_open_is_told_and_waiting_before_it_is_a_span() -> None:
    clock = iter([1.0, 2.0, 5.0, 5.5, 6.0, 7.0])
    ring = SpanRing(now=lambda: next(clock))
    with ring.span("main", "train"):
        pass
    with ring.span("main", "publish", after_waiting=True):
        found = ring.since(0)
    assert [span[:2] for span in found["open"]] == [("main", "publish")]
    assert [span[1:4] for span in found["spans"]] == [("train", 1.0, 2.0), ("wait", 2.0, 5.0)]
    assert [span[1:4] for span in ring.since(2)["spans"]] == [("publish", 5.0, 6.0)]


def test_threads_lose_no_span() -> None:
    ring = SpanRing()
    threads = [
        threading.Thread(target=lambda k=k: [ring.note(f"{k}", f"{i}", i, i + 0.1) for i in range(500)])
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ring.since(0)["spans"]) == 2000


def test_clocks_of_other_hosts_are_put_on_the_controllers() -> None:
    offset = ClockOffset()
    offset.update(asked=10.0, theirs=1010.3, answered=10.4)
    assert offset.seconds == pytest.approx(1000.1)
    offset.update(asked=20.0, theirs=1020.9, answered=22.0)  # slower, so less certain
    assert offset.seconds == pytest.approx(1000.1)
    offset.update(asked=30.0, theirs=1030.005, answered=30.01)
    assert offset.seconds == pytest.approx(1000.0)
    same_host = ClockOffset()
    same_host.update(asked=5.0, theirs=5.009, answered=5.01)
    assert same_host.seconds == 0.0, "within the error, so it is the same clock"


def test_the_log_has_unix_times_whatever_the_workers_clock(tmp_path: Path) -> None:
    log = SpanLog(tmp_path / "spans.jsonl")
    ring = SpanRing(now=lambda: time.monotonic() + 5000)
    with ring.span("main", "train", version=3):
        pass
    asked = time.monotonic()
    doing = log.add("trainer 0", 7, ring.since(log.cursor("trainer 0", 7)), asked, time.monotonic())
    assert doing == ""
    assert log.cursor("trainer 0", 7) == 1
    assert log.cursor("trainer 0", 8) == 0, "another process counts from its own beginning"
    log.add("trainer 0", 7, ring.since(0), asked, time.monotonic())  # asked before the first answer was there
    log.close()
    (span,) = read(tmp_path / "spans.jsonl")
    assert (span["actor"], span["lane"], span["name"], span["args"]) == ("trainer 0", "main", "train", {"version": 3})
    assert abs(span["at"] - time.time()) < 1.0


def test_a_trace_has_a_process_per_actor_a_thread_per_lane_and_marks(tmp_path: Path) -> None:
    (tmp_path / "spans.jsonl").write_text(
        '{"actor": "generator 0", "lane": "main", "name": "generate", "at": 100.5, "s": 0.25, "args": {"version": 1}}\n'
        '{"actor": "generator 0", "lane": "weights", "name": "pull", "at": 100.6, "s": 0.1}\n'
        '{"actor": "trainer 0", "lane": "main", "name": "train", "at": 100.0, "s": 2.0}\n'
        '{"actor": "trainer 0", "lane"'  # half-written
    )
    (tmp_path / "events.jsonl").write_text(
        '{"t": 1, "at": 101.0, "kind": "swapped", "replica": 0, "version": 1}\n{"t": 2, "at": 102.0, "kind": "ready"}\n'
    )
    path = trace.write_trace(tmp_path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [e for e in events if e["ph"] == "X"]
    assert [(names[e["pid"], None], names[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"]) for e in spans] == [
        ("generator 0", "main", "generate", 100_500_000, 250_000),
        ("generator 0", "weights", "pull", 100_600_000, 100_000),
        ("trainer 0", "main", "train", 100_000_000, 2_000_000),
    ]
    assert [(e["name"], e["ts"], e["args"]) for e in events if e["ph"] == "i"] == [
        ("swapped", 101_000_000, {"replica": 0, "version": 1})
    ]


def test_a_folder_without_spans_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=r"metrics\.status_every_s"):
        trace.write_trace(tmp_path)
