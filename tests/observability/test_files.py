"""The files of a run's folder: whole lines, the right content, and no clash of names."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from forge_async.errors import ConfigError
from forge_async.observability import EpisodeRecorder, EventLog, MetricsConfig, MetricsLogger, RunFolder
from forge_async.observability.episodes import spans
from forge_async.observability.jsonl import JsonLines, read
from forge_async.observability.run_folder import write_whole
from forge_async.types import Completion, Episode, Group, Prompt, Turn


def test_records_become_plain_json(tmp_path: Path) -> None:
    @dataclass
    class Point:
        x: int

    lines = JsonLines(tmp_path / "a.jsonl")
    lines.write({"array": np.array([1, 2], np.int32), "scalar": np.float32(0.5), "point": Point(3), "path": Path("/x")})
    lines.write({"nan": math.nan, "inf": -math.inf, "error": ValueError("bad"), "set": {2, 1}, "text": "é\n"})
    lines.close()
    first, second = read(tmp_path / "a.jsonl")
    assert first == {"array": [1, 2], "scalar": 0.5, "point": {"x": 3}, "path": "/x"}
    assert second == {"nan": "nan", "inf": "-inf", "error": "ValueError: bad", "set": [1, 2], "text": "é\n"}
    assert math.isnan(float(second["nan"]))


def test_a_line_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.write({"n": 1})
    assert list(read(tmp_path / "a.jsonl")) == [{"n": 1}]
    lines.close()
    with pytest.raises(ValueError, match="closed"):
        lines.write({"n": 2})


@pytest.mark.parametrize("tail", ['{"n": 2, "te', '{"n": 2}'])
def test_a_line_cut_by_a_kill_is_not_read_and_does_not_spoil_the_next(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n' + tail)
    assert list(read(path)) == [{"n": 1}]
    lines = JsonLines(path)
    lines.write({"n": 3})
    lines.close()
    assert list(read(path)) == [{"n": 1}, {"n": 3}]


def test_a_file_that_is_one_cut_line_starts_afresh(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("x" * 200_000)
    JsonLines(path).close()
    assert path.read_bytes() == b""


def test_a_cut_line_longer_than_a_block_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n' + "x" * 200_000)
    JsonLines(path).close()
    assert path.read_text() == '{"n": 1}\n'


def test_on_a_full_disk_a_line_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """Files may not grow beyond a limit here: the first part of the line finds room, the rest none."""
    path, limits = tmp_path / "a.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    warnings: list[str] = []
    strict, lenient = JsonLines(path), JsonLines(tmp_path / "b.jsonl", warnings.append)
    for lines in (strict, lenient):
        lines.write({"n": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            strict.write({"n": 2})
        for _ in range(3):
            lenient.write({"n": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for lines in (strict, lenient):
        lines.write({"n": 3})
        lines.close()
        assert lines.path.read_text() == '{"n": 1}\n{"n": 3}\n'
    assert len(warnings) == 1 and "b.jsonl cannot be written, the run goes on" in warnings[0]


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_whole(tmp_path / "folder", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_resumed_run_has_no_end_yet(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.forget_end()
    for path in (folder.summary, folder.status, folder.metrics):
        path.write_text("{}")
    folder.forget_end()
    assert sorted(path.name for path in folder.path.iterdir()) == ["checkpoints", "metrics.jsonl"]


def test_threads_lose_no_record(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "a.jsonl")
    threads = [
        threading.Thread(target=lambda k=k: [lines.write({"k": k, "i": i, "pad": "p" * 300}) for i in range(200)])
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines.close()
    records = list(read(tmp_path / "a.jsonl"))
    assert len(records) == 800
    for k in range(4):
        assert [r["i"] for r in records if r["k"] == k] == list(range(200))


def test_events_carry_kind_fields_and_growing_time(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("publish", version=3, digest="ab")
    log.write("swap", replica=0)
    log.close()
    first, second = read(tmp_path / "events.jsonl")
    assert (first["kind"], first["version"], first["digest"]) == ("publish", 3, "ab")
    assert 0 <= first["t"] <= second["t"]
    with pytest.raises(ValueError, match="t is written by the log"):
        EventLog(tmp_path / "other.jsonl").write("x", t=1)


def test_metrics_go_to_jsonl_and_tensorboard(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path)
    logger.log(1, {"reward": {"exact": 0.5, "format": 1.0}, "loss": np.float32(0.25), "idle": [0.1, 0.2], "name": "a"})
    logger.log(2, {"loss": 0.125})
    logger.close()
    first, second = read(tmp_path / "metrics.jsonl")
    assert first["step"] == 1 and first["reward/exact"] == 0.5 and first["idle"] == [0.1, 0.2] and first["name"] == "a"
    assert second["step"] == 2 and second["loss"] == 0.125

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert sorted(board.Tags()["scalars"]) == ["loss", "reward/exact", "reward/format"]
    assert [(e.step, e.value) for e in board.Scalars("loss")] == [(1, 0.25), (2, 0.125)]


def test_a_series_never_goes_back_and_nothing_is_written_then(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path, MetricsConfig(tensorboard=False))
    logger.log(5, {"loss": 1.0})
    logger.log(3, {"evaluation": 1.0})  # another series may be elsewhere
    with pytest.raises(ValueError, match="'loss': step 4 comes after step 5"):
        logger.log(4, {"evaluation": 1.0, "loss": 1.0})
    logger.log(5, {"loss": 0.5})
    logger.close()
    assert [(r["step"], r.get("loss")) for r in read(tmp_path / "metrics.jsonl")] == [(5, 1.0), (3, None), (5, 0.5)]


def test_switched_off_writers_leave_no_files(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path, MetricsConfig(tensorboard=False, jsonl=False, plot=False))
    logger.log(1, {"loss": 1.0})
    logger.close()
    recorder = EpisodeRecorder(tmp_path / "episodes.jsonl", episodes_per_step=0)
    assert recorder.record(1, [make_group(0)], Letters()) == 0
    recorder.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "key"), [({"episodes_per_step": -1}, "episodes_per_step"), ({"jsonl": False}, "jsonl")]
)
def test_metrics_config_names_the_wrong_key(values: dict, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MetricsConfig(**values)
    assert caught.value.key == key


class Letters:
    """1 is a, 2 is b, ..."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(96 + i) for i in token_ids)


def make_group(number: int, size: int = 4) -> Group:
    prompt = Prompt(f"p{number}", ({"role": "user", "content": "2+3="},), np.array([1], np.int32), answer="5")
    episodes = []
    for index in range(size):
        completion = Completion(
            prompt_token_ids=prompt.token_ids,
            token_ids=np.array([1, 2, 3], np.int32),
            logprobs=np.array([-1.0, -2.0, -3.0], np.float32),
            policy_versions=np.array([3, 3, 4], np.int32),
            kv_versions=np.array([3, 3, 3], np.int32),
            finish_reason="stop",
        )
        episodes.append(
            Episode(f"p{number}/{index}", prompt.prompt_id, (Turn(completion),), float(index), {"exact": 1.0})
        )
    return Group(prompt, tuple(episodes))


def test_episodes_are_readable_and_sampled_the_same_way_twice(tmp_path: Path) -> None:
    for name in ("a", "b"):
        recorder = EpisodeRecorder(tmp_path / name, episodes_per_step=3, seed=7)
        assert recorder.record(1, [make_group(0), make_group(1)], Letters()) == 3
        assert recorder.record(2, make_group(2, size=2), Letters()) == 2  # fewer than asked for
        recorder.close()
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    records = list(read(tmp_path / "a"))
    assert len({r["episode_id"] for r in records}) == 5
    record = records[-1]
    assert record["step"] == 2
    assert record["prompt"] == [{"role": "user", "content": "2+3="}]
    assert record["answer"] == "5"
    assert record["group_reward_mean"] == 0.5
    turn = record["turns"][0]
    assert turn == {
        "completion": "abc",
        "tokens": 3,
        "finish_reason": "stop",
        "versions": [[3, 2], [4, 1]],
        "kv_versions": [[3, 3]],
        "mean_logprob": -2.0,
        "trained": None,
        "pieces": ["a", "b", "c"],
        "logprobs": [-1.0, -2.0, -3.0],
        "trainer_logprobs": None,
        "reply": [],
    }
    assert (record["tokens"], record["oldest"], record["newest"]) == (3, 3, 4)


def test_spans_of_versions() -> None:
    assert spans(np.array([], np.int32)) == []
    assert spans(np.array([1, 2, 2, 5])) == [[1, 1], [2, 2], [5, 1]]


def test_a_taken_run_name_gets_a_number(tmp_path: Path) -> None:
    paths = [RunFolder.create(tmp_path / "runs", "grpo").path.name for _ in range(3)]
    assert paths == ["grpo", "grpo-2", "grpo-3"]
    assert (tmp_path / "runs/grpo/checkpoints").is_dir()


def test_a_run_folder_is_reopened_only_where_a_run_was(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "grpo")
    with pytest.raises(ConfigError, match=r"resume = .*must be a run folder"):
        RunFolder.open(folder.path)
    folder.write_config("steps: 3\n")
    folder.release()
    assert RunFolder.open(folder.path).config.read_text() == "steps: 3\n"
    assert sorted(p.name for p in folder.path.iterdir()) == [".lock", "checkpoints", "config.yaml"]


def test_a_run_folder_has_one_writer_until_it_is_released_or_its_process_ends(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "grpo")
    folder.write_config("steps: 3\n")
    with pytest.raises(ConfigError, match=rf"resume = .*grpo'?: must be .* \(process {os.getpid()} does\)"):
        RunFolder.open(folder.path)
    folder.release()
    claims = (
        "import os, signal, sys\n"
        "from forge_async.observability import RunFolder\n"
        "folder = RunFolder.open(sys.argv[1])\n"
        "print('claimed', flush=True)\n"
        "signal.pause()\n"
    )
    other = subprocess.Popen([sys.executable, "-c", claims, str(folder.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "claimed\n"
        with pytest.raises(ConfigError, match=rf"process {other.pid} does"):
            RunFolder.open(folder.path)
    finally:
        other.kill()
        other.wait()
    RunFolder.open(folder.path).release()


def test_an_unusable_output_folder_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        RunFolder.create(tmp_path / "file", "grpo")
    assert caught.value.key == "output_dir"


def test_every_line_of_a_log_is_json(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("odd", text='quote " newline \n tab \t', nothing=None, nested={"a": (1, 2)})
    log.close()
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(line)["nested"] == {"a": [1, 2]}


def test_a_backend_that_fails_costs_one_warning_and_the_others_go_on(tmp_path: Path) -> None:
    class Down:
        def write(self, step: int, scalars: dict[str, float]) -> None:
            raise ConnectionError("no route to host")

        def close(self) -> None:
            raise ConnectionError("still none")

    warnings: list[str] = []
    logger = MetricsLogger(tmp_path, MetricsConfig(tensorboard=False), warnings.append, {"Metrics Inc.": Down()})
    for step in (1, 2, 3):
        logger.log(step, {"loss": 1.0})
    logger.close()
    assert warnings == ["Metrics Inc. failed, the run goes on without it: ConnectionError: no route to host"]
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_tensorboard_folder_that_cannot_be_made_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file")
    warnings: list[str] = []
    logger = MetricsLogger(tmp_path, MetricsConfig(), warnings.append)
    logger.log(1, {"loss": 1.0})
    logger.close()
    assert len(warnings) == 1 and warnings[0].startswith("TensorBoard failed")
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [1]


def test_wandb_gets_one_run_whose_id_a_resume_keeps(tmp_path: Path) -> None:
    """Offline, its own files are there; and both parts of a resumed run have one id."""
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    import sys

    warnings: list[str] = []
    exit_before, hook_before = sys.exit, sys.excepthook
    for steps in ((1, 2), (2, 3)):
        logger = MetricsLogger(tmp_path, MetricsConfig(tensorboard=False, wandb="offline"), warnings.append)
        for step in steps:
            logger.log(step, {"loss": 0.5 / step})
        logger.close()
    assert warnings == []
    identity = (tmp_path / "wandb_id").read_text()
    files = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert {path.name for path in files} == {f"run-{identity}.wandb"}
    written = b"".join(path.read_bytes() for path in files)
    assert b"loss" in written and b"0.25" in written
    assert (sys.exit, sys.excepthook) == (exit_before, hook_before), "W&B leaves the process as it was"


def test_wandb_that_is_down_costs_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it fails
    warnings: list[str] = []
    logger = MetricsLogger(tmp_path, MetricsConfig(tensorboard=False, wandb="online"), warnings.append)
    for step in (1, 2):
        logger.log(step, {"loss": 1.0})
    logger.close()
    assert len(warnings) == 1 and "metrics.wandb" in warnings[0]
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [1, 2]
