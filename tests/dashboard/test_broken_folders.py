"""Folders as they are found: files half written, of another program, of another shape. Nothing of it hides a run."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from forge_async.dashboard.app import Answer
from forge_async.dashboard.prometheus import exposition
from forge_async.dashboard.view import RunView
from forge_async.testing.run_folder import write_run

SCALARS = (
    "5",
    "null",
    "true",
    '"text"',
    "[1, 2]",
    "{}",
    "[[]]",
    "-1e999",
    "NaN",
    "{",
    '{"a"',
    "\x00\x01",
    "\xe9",
    "[" * 5000,
)
"""What a line, or a whole file, may be instead of an object."""

ODD_NUMBERS = (
    "null",
    '"x"',
    "[]",
    "{}",
    "true",
    "NaN",
    "1e999",
    "-1e999",
    "1e30",
    "99999999999999",
    "-7",
    '"nan"',
    "9" * 400,
    "1.2.3",
)

CONFIGS = (
    *(
        "model:",
        "model: 5",
        "model: [1]",
        "policy: {update: }",
        "policy: {update: 7, num_replicas: x}",
        "5",
        "text",
        "- 1",
    ),
    *("metrics:", "metrics: {status_every_s: }", "metrics: {status_every_s: x}", "metrics: {status_every_s: .nan}"),
    *("a: [", "a: {b", "\ttab", "{? [a] : b}", "at: 2020-99-99", "steps: 2020-01-01", "&a [*a]", "\x00", "[" * 1500),
)

STATUSES = (*SCALARS, '{"state": 5}', '{"at": null}', '{"at": "x", "policy": 5}', '{"at": NaN, "buffer": null}')


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A run's files by name."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "whole", steps=5).path
    return {path.name: path.read_text() for path in folder.iterdir()}


def answers(folder: Path, files: dict[str, str]) -> dict[str, Any]:
    """What a page is told of a folder of ``files``, in the JSON that it gets; a fault of the server is raised here."""
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="latin-1")
    view = RunView(folder)
    content = {
        "state": view.state(0, 0, 0, []),
        "timeline": view.timeline(None, None, 1000),
        "episodes": view.episode_rows(0, 200, "newest", False, None),
        "best": view.episode_rows(0, 200, "best", True, 2),
        "window": view.timeline(0.0, 9e9, 1000),
    }
    content["state"] = view.state(0, 0, 0, ["reward", "train/loss", "odd"])
    assert b"forge_async_running" in exposition(view)
    for index in range(len(view.episodes)):
        with contextlib.suppress(ValueError):  # answered with 400
            view.episode(index)
    body = Answer(content).body
    found: dict[str, Any] = json.loads(bytes(body), parse_constant=pytest.fail)
    return found


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "episodes.jsonl", "spans.jsonl"])
def test_lines_that_are_no_objects_are_counted_and_hide_no_other(
    tmp_path: Path, whole: dict[str, str], name: str
) -> None:
    lines = whole[name].splitlines(keepends=True)
    mixed = "".join(
        itertools.chain.from_iterable(zip((f"{scalar}\n" for scalar in SCALARS), itertools.cycle(lines), strict=False))
    )
    good = answers(tmp_path / "whole", whole)
    found = answers(tmp_path / "broken", whole | {name: mixed + whole[name]})
    told = {key: (found[key], good[key]) for key in ("state", "episodes", "timeline")}
    if name == "metrics.jsonl":
        assert told["state"][0]["metrics"]["columns"] == told["state"][1]["metrics"]["columns"]
    elif name == "events.jsonl":
        assert told["state"][0]["run"] == told["state"][1]["run"]
    elif name == "spans.jsonl":
        assert told["timeline"][0]["lanes"][0]["lane"] == told["timeline"][1]["lanes"][0]["lane"]
    if name == "episodes.jsonl":
        assert found["episodes"]["rows"][0][1:] == good["episodes"]["rows"][0][1:]
    else:
        assert found["state"]["broken"][name] == len(SCALARS)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("metrics.jsonl", ("step", "at", "reward", "staleness/histogram")),
        ("events.jsonl", ("at", "t", "version", "replica", "pause_ms", "outcome", "digest")),
        ("episodes.jsonl", ("step", "episode_id", "reward", "tokens", "oldest", "turns")),
        ("spans.jsonl", ("actor", "name", "at", "s", "args")),
    ],
)
def test_no_value_of_any_field_is_a_fault(tmp_path: Path, whole: dict[str, str], name: str, keys: tuple[str]) -> None:
    numbered = itertools.count()
    lines = []
    for key, odd in itertools.product(keys, ODD_NUMBERS):
        for line in whole[name].splitlines()[-9:]:
            record = json.loads(line)
            if key in record:
                record[key] = f"odd {next(numbered)}"
                lines.append(json.dumps(record).replace(json.dumps(record[key]), odd) + "\n")
    assert len(lines) >= len(ODD_NUMBERS) * len(keys)
    found = answers(tmp_path / "all", whole | {name: whole[name] + "".join(lines)})
    assert found["state"]["run"]["state"] in ("finished", "running", "silent", "starting") or name == "events.jsonl"
    for index, line in enumerate(lines[:: max(1, len(lines) // 25)]):  # as the newest, which is looked at more closely
        answers(tmp_path / f"{index}", whole | {name: whole[name] + line})


def test_half_written_settings_status_and_summary_are_as_if_they_were_not_there(
    tmp_path: Path, whole: dict[str, str]
) -> None:
    for index, text in enumerate(CONFIGS):
        found = answers(tmp_path / f"config {index}", whole | {"config.yaml": text})["state"]
        assert (found["run"]["state"], found["config"]["model"]) == ("finished", None) or text == "model: 5"
    for index, text in enumerate(STATUSES):
        found = answers(tmp_path / f"status {index}", whole | {"status.json": text, "summary.json": text})["state"]
        assert found["run"]["state"] == "finished"
        assert isinstance(found["status"], dict | None)


def test_every_file_cut_off_anywhere(tmp_path: Path, whole: dict[str, str]) -> None:
    for name, share in itertools.product(whole, (0.0, 0.001, 0.13, 0.5, 0.999)):
        cut = whole | {name: whole[name][: int(share * len(whole[name]))]}
        found = answers(tmp_path / f"{name} {share}", cut)["state"]
        assert found["run"]["state"] in ("finished", "silent", "empty")
        assert found["broken"] == {}, "what is not whole yet is not broken"


def test_a_line_of_events_is_told_also_where_it_holds_no_json(tmp_path: Path) -> None:
    lines = ('{"kind": "start", "at": null}', '{"kind": "step", "reward": NaN, "text": "\\ud800", "at": 1e999}')
    state = answers(tmp_path / "run", {"events.jsonl": "".join(f"{line}\n" for line in lines)})["state"]
    assert [event["kind"] for event in state["events"]["new"]] == ["start", "step"]
    assert state["events"]["new"][1]["reward"] == "nan"
    assert (state["run"]["state"], state["run"]["started"]) == ("silent", None)
