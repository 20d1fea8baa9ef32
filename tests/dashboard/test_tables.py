"""Reading a run's files while they grow, as they are: half written, broken, missing, rewritten."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest

from forge_async.dashboard import view
from forge_async.dashboard.episodes import EpisodeTable
from forge_async.dashboard.lines import GrowingFile
from forge_async.dashboard.tables import EventTable, MetricsTable
from forge_async.dashboard.timeline import SHOWN_WHOLE, SpanTable
from forge_async.dashboard.view import RunView
from forge_async.errors import ConfigError
from forge_async.observability.alive import this_process
from forge_async.observability.run_folder import RunPaths
from forge_async.testing.run_folder import write_run


def test_a_line_is_read_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    file = GrowingFile(path)
    assert list(file.new_lines()) == []
    path.write_bytes(b'{"n": 1}\n{"n"')
    assert list(file.new_lines()) == [(0, b'{"n": 1}')]
    assert list(file.new_lines()) == []
    with path.open("ab") as more:
        more.write(b': "\xc3\xa9"}\n{"n": 3}\n')
    assert [line.decode() for _, line in file.new_lines()] == ['{"n": "é"}', '{"n": 3}']
    assert file.line_at(9) == '{"n": "é"}\n'.encode()


def test_lines_longer_than_a_chunk_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_async.dashboard.lines.CHUNK_BYTES", 7)
    lines = [b"x" * n for n in (0, 3, 6, 7, 8, 40)]
    (tmp_path / "a").write_bytes(b"\n".join(lines) + b"\nrest")
    assert [line for _, line in GrowingFile(tmp_path / "a").new_lines()] == lines


def test_a_file_that_was_made_anew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}\n')
    table = MetricsTable(path)
    table.want(["loss"])
    table.update()
    generation = table.generation
    path.write_text('{"step": 1, "loss": 5.0}\n')
    table.update()
    assert (table.steps, table.columns["loss"]) == ([1], [5.0])
    assert table.generation != generation
    path.unlink()
    table.update()
    path.write_text('{"step": 1, "loss": 7.0}\n')
    table.update()
    assert table.columns["loss"] == [7.0]


def test_metrics_have_a_value_per_step_and_the_last_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"step": 1, "at": 10.0, "loss": 1.0, "histogram": [1, 2], "name": "a"},
        {"step": 2, "at": 11.0, "loss": "nan", "mine": 0.5},
        {"step": 3, "at": 12.0},
        {"step": 2, "at": 20.0, "loss": 4.0},  # after a resume from version 1
        {"step": 3, "at": 21.0, "loss": 0.123456789},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    table = MetricsTable(path)
    table.want(["loss", "never"])
    table.update()
    assert table.columns == {"loss": [1.0, None, None], "never": [None, None, None]}
    table.want(["mine", "loss"])
    table.update()
    assert table.columns["mine"] == [None, 0.5, None]
    assert (table.steps, table.columns["loss"]) == ([1, 2, 3], [1.0, None, None])
    assert table.keys == ["at", "loss", "mine"]
    generation = table.generation
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table.update()
    assert (table.steps, table.columns["loss"]) == ([1, 2, 3], [1.0, 4.0, 0.123457])
    assert table.generation != generation, "what a page has is void"
    assert table.since(1, ["loss", "never"]) == {"loss": [4.0, 0.123457], "never": [None, None]}


def test_broken_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "start", "at": 1}\nnot json\n[1]\n{"no kind": 1}\n\n{"kind": "ready", "at": 2}\n')
    table = EventTable(path)
    table.update()
    assert (table.count, table.broken) == (2, 3)
    assert [event["n"] for event in table.recent(after=1)] == [2]


def test_episodes_are_found_without_parsing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_run(tmp_path, steps=30, episodes_per_step=3)
    with paths.episodes.open("a") as file:
        file.write('{"step": 31, "episode_id": "cut off", "rew')
    with monkeypatch.context() as patch:
        patch.setattr("forge_async.dashboard.tables.json", None)
        table = EpisodeTable(paths.episodes)
        table.update()
    records = [json.loads(line) for line in paths.episodes.read_text().splitlines()[:-1]]
    assert len(table) == len(records) == 90
    everything = table.rows(table.select("oldest", False, None))
    assert everything == [
        [i, r["step"], r["episode_id"], r["reward"], r["tokens"], r["oldest"], r["newest"]]
        for i, r in enumerate(records)
    ]
    assert table.record(41) == records[41]
    mixed = [row[0] for row in table.rows(table.select("newest", True, None))]
    assert mixed == [i for i, r in reversed(list(enumerate(records))) if len(r["turns"][0]["versions"]) > 1]
    assert [row[1] for row in table.rows(table.select("newest", False, 7))] == [7, 7, 7]
    best = [row[3] for row in table.rows(table.select("best", False, None))]
    assert best == sorted((r["reward"] for r in records), reverse=True)
    assert [row[0] for row in table.rows(table.select("newest", False, None, of=3))] == [2, 1, 0]
    assert len(table.select("worst", False, 999)) == 0


def test_an_episode_whose_reward_is_no_number_is_listed(tmp_path: Path) -> None:
    turns = [{"versions": [[3, 2]], "tokens": 2}]
    head = {"step": 1, "episode_id": 'a "quoted" é', "reward": "nan", "tokens": 2, "oldest": 3, "newest": 3}
    (tmp_path / "e").write_text(
        json.dumps(head | {"turns": turns})
        + "\n"
        + json.dumps({"reward": 1, "step": 2, "episode_id": "b", "turns": turns})
        + "\n"
    )
    table = EpisodeTable(tmp_path / "e")
    table.update()
    rows = table.rows(table.select("oldest", False, None))
    assert rows[1] == [1, 2, "b", 1.0, 2, 3, 3]
    assert rows[0][3] is None
    assert [row[0] for row in table.rows(table.select("best", False, None))] == [1, 0]


def test_a_window_of_the_timeline_has_what_is_in_it(tmp_path: Path) -> None:
    paths = write_run(tmp_path, steps=10)
    table = SpanTable(paths.spans)
    table.update()
    lanes = {lane["lane"]: lane["spans"] for lane in table.window(table.first, table.last, 800)}
    assert list(lanes) == ["trainer 0", "generator 0", "generator 0 weights", "rewards worker 0"]
    assert len(lanes["generator 0"]) == 30
    names = list(table.names)
    first = lanes["generator 0"][0]
    assert (names[first[0]], first[2], first[3], first[4]) == ("generate", 0.6, 0, 1)
    at = table.first + 2
    inside = {lane["lane"]: lane["spans"] for lane in table.window(at, at + 0.9, 800)}
    assert [names[span[0]] for span in inside["trainer 0"]] == ["wait", "train"]


def test_a_page_that_has_spans_gets_those_that_came_since(tmp_path: Path) -> None:
    paths = write_run(tmp_path, steps=10)
    run = RunView(paths.path)
    had = run.timeline(None, None, 800)
    with paths.spans.open("a") as file:
        for name, at in (("train", 1e9), ("train", 1e9 + 1.001), ("other", 1e9 + 3)):
            lane = {"actor": "trainer 0", "lane": "new" if name == "other" else "main"}
            file.write(json.dumps({**lane, "name": name, "at": at, "s": 1.0}) + "\n")
    found = run.timeline(None, None, 800, after=had["count"], generation=had["generation"])
    assert (had["adds"], found["adds"], found["count"]) == (False, True, 83)
    train, other = found["names"].index("train"), found["names"].index("other")
    assert [(lane["lane"], lane["spans"]) for lane in found["lanes"] if lane["spans"]] == [
        ("trainer 0", [[train, 1e9, 2.001, -1, 1]]),
        ("trainer 0 new", [[other, 1e9 + 3, 1.0, -1, 1]]),
    ]
    for after, generation in ((83 - view.NEW_SPANS, 0), (0, 0), (84, 0), (80, 1)):
        assert not run.timeline(None, None, 800, after, generation)["adds"], "all of them"


def test_more_spans_than_pixels_show_what_took_most_of_each(tmp_path: Path) -> None:
    with (tmp_path / "spans.jsonl").open("w") as file:
        for i in range(4 * SHOWN_WHOLE):  # per second 0.7 s of a, then 0.2 s of b; in the middle a long c
            name, at, s = ("a", i / 2, 0.7) if i % 2 == 0 else ("b", i / 2 + 0.25, 0.2)
            file.write(json.dumps({"actor": "x", "lane": "main", "name": name, "at": at, "s": s}) + "\n")
        file.write(json.dumps({"actor": "x", "lane": "main", "name": "c", "at": 1000.0, "s": 500.0}) + "\n")
    table = SpanTable(tmp_path / "spans.jsonl")
    table.update()
    (lane,) = table.window(0.0, 3000.0, 300)
    names = [list(table.names)[span[0]] for span in lane["spans"]]
    assert names == ["a", "c", "a"]
    starts, seconds, counts = (np.array([span[i] for span in lane["spans"]]) for i in (1, 2, 4))
    np.testing.assert_allclose(starts, [0, 1000, 1500], atol=10)
    np.testing.assert_allclose(seconds, [1000, 500, 1500], atol=20)
    assert abs(counts.sum() - 4 * SHOWN_WHOLE - 1) < 1


def test_what_the_page_draws_is_read_ahead(tmp_path: Path) -> None:
    curves = (Path(view.__file__).parent / "static/curves.js").read_text()
    keys = re.findall(r'"?([\w/]+)"?: \["[^"]+", "--', curves.partition("export const SERIES")[0])
    assert set(keys) == set(view.DRAWN)
    run = RunView(write_run(tmp_path, steps=50).path)
    run.read_ahead().join(10)
    assert (len(run.metrics.steps), run.events.count, len(run.episodes.steps)) == (50, 153, 200)


def test_an_empty_folder_is_a_run_that_has_not_begun(tmp_path: Path) -> None:
    empty = RunView(tmp_path)
    state = empty.state(0, 0, 0, ["reward"])
    assert state["run"] == {"state": "empty"}
    assert state["missing"] == ["metrics.jsonl", "events.jsonl", "episodes.jsonl", "spans.jsonl"]
    assert empty.episode_rows(0, 10, "best", True, None)["rows"] == []
    assert empty.timeline(None, None, 100)["lanes"] == []
    with pytest.raises(ConfigError, match="RUN"):
        RunView(tmp_path / "nowhere")


def test_how_a_run_stands_is_told_by_its_events(tmp_path: Path) -> None:
    def told(*events: dict[str, object]) -> dict[str, object]:
        (tmp_path / "events.jsonl").write_text("".join(json.dumps({"t": 0, **event}) + "\n" for event in events))
        return dict(RunView(tmp_path).state(0, 0, 0, [])["run"])

    def state(*events: dict[str, object]) -> object:
        return told(*events)["state"]

    now = time.time()
    start, ready = {"at": now, "kind": "start"}, {"at": now, "kind": "ready"}
    assert state(start) == "starting"
    mine = this_process()
    gone = mine | {"pid": 2**22 + 1}
    assert state(start | {"process": mine}) == "starting"
    assert state(start | {"process": gone}) == "killed"
    assert state(start | {"process": gone}, ready, {"at": now, "kind": "end", "outcome": "stopped"}) == "stopped"
    assert state(start | {"process": gone}, ready, start | {"process": mine}, ready) == "running", "it was resumed"
    assert state(start, ready) == "running"
    (tmp_path / "status.json").write_text('{"state": "paused"}')
    assert state(start, ready) == "paused"
    (tmp_path / "status.json").write_text('{"sta')  # not whole
    assert state(start, ready) == "running"
    assert state(start, ready, {"at": now, "kind": "end", "outcome": "failed"}) == "failed"
    resumed = (start, ready, {"at": now, "kind": "end", "outcome": "failed"}, start)
    assert state(*resumed) == "starting", "its engines are built anew"
    assert state(*resumed, ready) == "running"
    monarch, end = {"at": now, "kind": "monarch_dashboard", "url": "its page"}, {"at": now, "kind": "end"}
    assert told(start, monarch, ready)["monarch"] == "its page"
    assert told(start, monarch, ready, end)["monarch"] is None
    assert told(start, monarch, {"at": now + 9, "kind": "start"})["monarch"] is None, "it was of the process before"
    (tmp_path / "status.json").unlink()
    assert state({"at": now - 3600, "kind": "start"}) == "silent"
    assert state({"at": now - 100, "kind": "start"}) == "starting", "engines take their time, and say nothing meanwhile"
    long_ago = ({"at": now - 3600, "kind": "start"}, {"at": now - 3000, "kind": "ready"})
    assert state(*long_ago, start) == "starting", "not silent because the process before is"


@pytest.mark.parametrize(
    ("config", "quiet_s", "state"),
    [
        ("metrics: {status_every_s: 2}", 45, "silent"),
        ("", 45, "silent"),
        ("metrics:", 45, "silent"),
        ("metrics: {status_every_s: 60}", 45, "running"),
        ("metrics: {status_every_s: 60}", 170, "running"),
        ("metrics: {status_every_s: 60}", 190, "silent"),
        ("metrics: {status_every_s: 0}", 100_000, "running"),
    ],
)
def test_when_a_run_is_called_silent_goes_by_how_often_it_looks(
    tmp_path: Path, config: str, quiet_s: float, state: str
) -> None:
    at = time.time() - quiet_s
    RunPaths(tmp_path).config.write_text(config)
    RunPaths(tmp_path).events.write_text(f'{{"kind": "start", "at": {at - 9}}}\n{{"kind": "ready", "at": {at}}}\n')
    run = RunView(tmp_path).state(0, 0, 0, [])["run"]
    assert (run["state"], run["seen"]) == (state, pytest.approx(at))


def test_what_the_process_before_a_resume_left_is_not_shown(tmp_path: Path) -> None:
    paths, now = RunPaths(tmp_path), time.time()
    paths.summary.write_text('{"swaps": 7}')
    paths.status.write_text(json.dumps({"at": now - 50, "state": "stopped"}))
    before = [
        {"kind": "start", "at": now - 100},
        {"kind": "published", "version": 9, "at": now - 60},
        {"kind": "swapped", "replica": 0, "version": 9, "at": now - 60},
        {"kind": "end", "outcome": "failed", "at": now - 50},
    ]
    paths.events.write_text("".join(json.dumps(event) + "\n" for event in before))
    view = RunView(tmp_path)
    state = view.state(0, 0, 0, [])
    assert (state["status"]["state"], state["summary"], state["events"]["swaps"][0]["version"]) == (
        *("stopped", {"swaps": 7}, 9),
    )
    with paths.events.open("a") as file:
        file.write(json.dumps({"kind": "start", "at": now}) + "\n")
    state = view.state(0, 0, 0, [])
    assert (state["run"]["state"], state["status"], state["summary"]) == ("starting", None, None)
    assert (state["events"]["swaps"], state["events"]["published"]) == ({}, None)
    paths.status.write_text(json.dumps({"at": now + 1, "state": "paused"}))
    with paths.events.open("a") as file:
        file.write(json.dumps({"kind": "ready", "at": now}) + "\n")
    assert view.state(0, 0, 0, [])["run"]["state"] == "paused"


def test_a_page_that_has_an_older_event_log_gets_the_new_one(tmp_path: Path) -> None:
    path, view = tmp_path / "events.jsonl", RunView(tmp_path)
    path.write_text("".join(f'{{"kind": "step", "at": {i}}}\n' for i in range(9)))
    had = view.state(0, 0, 0, [])["events"]
    assert view.state(0, 0, had["count"], [], had["generation"])["events"]["new"] == []
    path.write_text('{"kind": "start", "at": 1}\n{"kind": "ready", "at": 2}\n')
    new = view.state(0, 0, had["count"], [], had["generation"])["events"]
    assert [event["kind"] for event in new["new"]] == ["start", "ready"]


def test_a_file_in_the_place_of_another_is_read_whatever_its_length(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"1\n")
    file = GrowingFile(path)
    assert [line for _, line in file.new_lines()] == [b"1"]
    (tmp_path / "b.jsonl").write_bytes(b"2\n3\n")
    (tmp_path / "b.jsonl").replace(path)
    assert [line for _, line in file.new_lines()] == [b"2", b"3"]
    assert file.restarts == 1


@pytest.mark.parametrize("name", ["metrics", "events", "episodes", "spans"])
def test_an_emptied_file_is_empty_at_once_and_broken_lines_are_counted_once(tmp_path: Path, name: str) -> None:
    paths = write_run(tmp_path, steps=3)
    with (tmp_path / f"{name}.jsonl").open("a") as file:
        file.write("no JSON\n")
    view = RunView(paths.path)

    def broken() -> dict[str, int]:
        view.episode_rows(0, 9, "best", False, None)
        view.timeline(None, None, 9)
        return dict(view.state(0, 0, 0, ["reward", "train/loss", f"new {len(view.metrics.columns)}"])["broken"])

    assert broken() == broken() == broken() == {f"{name}.jsonl": 1}
    generation = getattr(view, name).generation
    (tmp_path / f"{name}.jsonl").write_text("")
    assert broken() == {}
    assert getattr(view, name).generation != generation
    assert (len(view.metrics.steps), view.events.count, len(view.episodes), len(view.spans.lanes)) == tuple(
        0 if name == own else length for own, length in (("metrics", 3), ("events", 12), ("episodes", 12), ("spans", 4))
    )


def test_pages_of_a_list_are_of_one_moment(tmp_path: Path) -> None:
    paths = write_run(tmp_path, steps=5)
    view = RunView(paths.path)
    first = view.episode_rows(0, 10, "newest", False, None)
    lines = paths.episodes.read_text().splitlines(keepends=True)
    with paths.episodes.open("a") as file:
        file.writelines(lines[:4])
    for mixed in (False, True):
        rest = view.episode_rows(0, 1000, "newest", mixed, None, of=first["all"])
        assert max(row[0] for row in rest["rows"]) == 19
    second = view.episode_rows(10, 10, "newest", False, None, of=first["all"])
    assert [row[0] for row in first["rows"] + second["rows"]] == list(range(19, -1, -1))
    assert view.state(0, 0, 0, [])["episodes"]["count"] == 24


def test_columns_are_sent_with_six_digits(tmp_path: Path) -> None:
    values = [
        0.0,
        -0.0,
        1.0,
        -123456.7891,
        1e-7 / 3,
        1e300 / 7,
        5e-324,
        2 / 3,
        1e22 + 1e10,
        0.1234565,
        999999.5,
        None,
        "nan",
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "x": value}) + "\n" for step, value in enumerate(values))
    )
    table = MetricsTable(tmp_path / "metrics.jsonl")
    table.want(["x"])
    table.update()
    (found,) = table.since(0, ["x"]).values()
    assert found[-2:] == [None, None]
    assert found[:-2] == pytest.approx([float(f"{value:.6g}") for value in values[:-2]], rel=1e-5, abs=0)
    assert found[3] == -123457.0 and found[7] == 0.666667
