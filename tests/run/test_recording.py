"""What is written down of each step, between a folder and fakes: rows, episodes, figures of replicas, a full disk."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forge_async.buffer import RolloutBuffer
from forge_async.buffer.ages import ages
from forge_async.config import Config, changed
from forge_async.observability import RunFolder, Summary, jsonl
from forge_async.observability.frames import metrics_frame
from forge_async.observability.jsonl import read
from forge_async.observability.seen import of_file
from forge_async.run.recording import Recording
from forge_async.steps import Step, Tally
from forge_async.types import Completion, Episode, Group, Prompt, StepStats, Turn


class Policy:
    """Replicas that answer with their counters; those in ``down`` do not."""

    def __init__(self, replicas: int = 2) -> None:
        self.down: set[int] = set()
        self.counters = [dict.fromkeys(("busy_s", "idle_s", "generated_tokens"), 0.0) for _ in range(replicas)]

    async def fan_out(self, name: str, timeout: float) -> list[Any]:
        more = {"discarded_tokens": 0, "recomputed_tokens": 0, "aborted": 0}
        return [None if i in self.down else counters | more for i, counters in enumerate(self.counters)]

    def work(self, index: int, busy_s: float, idle_s: float, tokens: int) -> None:
        for key, more in (("busy_s", busy_s), ("idle_s", idle_s), ("generated_tokens", tokens)):
            self.counters[index][key] += more


def make_step(index: int, version: int, reward: float, skipped: bool = False) -> Step:
    prompt = Prompt(f"0-{index}", ({"role": "user", "content": "2+3="},), np.array([1], np.int32), answer="5")
    ids, versions = np.array([1, 2], np.int32), np.zeros(2, np.int32)
    completion = Completion(prompt.token_ids, ids, np.zeros(2, np.float32), versions, versions, "stop")
    episodes = tuple(Episode(f"0-{index}.{i}", prompt.prompt_id, (Turn(completion),), reward, {}) for i in range(2))
    tokens = 0 if skipped else 4
    stats = StepStats(version, 0.5, 1, 1e-3, 1, 1, 0, 0, tokens, tokens, 0, 0.1, skipped=skipped)
    stale = ages(version, [])
    return Step(index, stats, (Group(prompt, episodes),), (), reward, {}, stale, stale, 0, 2, 0, 0.1, 0, 1)


class Letters:
    def decode(self, token_ids: list[int], **settings: Any) -> str:
        return "".join(chr(96 + i) for i in token_ids)


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # of the console
    config = changed(Config(), {"policy.num_replicas": 2, "metrics.tensorboard": False, "metrics.plot": False})
    made = Recording(config, RunFolder(tmp_path / "run"))
    made.tokenizer = Letters()
    yield made
    made.close("finished")


async def take(recording: Recording, policy: Any, *steps: Step) -> None:
    for step in steps:
        await recording.note(step, policy)
        recording.log(step, RolloutBuffer(recording.config.buffer), {})


def shown(recording: Recording) -> str:
    file = recording.console._file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


async def test_a_skipped_step_does_not_take_the_place_of_the_step_before_it(recording: Recording) -> None:
    policy: Any = Policy()
    await recording.begin(policy)
    steps = (make_step(1, 1, 0.75), make_step(2, 1, 0.25, skipped=True), make_step(3, 2, 0.5))
    await take(recording, policy, *steps)
    folder = recording.folder
    frame = metrics_frame(folder.metrics)
    assert frame["reward"].to_dict() == {1: 0.75, 2: 0.5} and len(list(read(folder.metrics))) == 2
    assert frame["train/trained_tokens"].tolist() == [4, 4]
    assert [(e["index"], e["version"]) for e in read(folder.events) if e["kind"] == "step"] == [(1, 1), (3, 2)]
    assert "skipped: no token had a loss" in shown(recording)
    assert [seen.record["episode_id"] for seen in recording.episodes(None)] == ["0-1.0", "0-1.1", "0-3.0", "0-3.1"]
    assert recording.steps == 2 and recording.last is steps[2]


async def test_an_episode_of_a_skipped_step_says_what_became_of_it(recording: Recording) -> None:
    policy: Any = Policy()
    await take(recording, policy, make_step(1, 1, 0.75), make_step(2, 1, 0.25, skipped=True))
    fates = [(record["episode_id"], record.get("fate")) for record in read(recording.folder.episodes)]
    dropped = "dropped: skipped_step"
    assert fates == [("0-1.0", None), ("0-1.1", None), ("0-2.0", dropped), ("0-2.1", dropped)]


async def test_who_sees_a_step_finds_its_episodes(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    def log(step: int, values: Any) -> None:
        found.append(len(of_file(recording.folder.episodes, step=step)))

    monkeypatch.setattr(recording._metrics, "log", log)
    await take(recording, Policy(), make_step(1, 1, 0.75))
    assert found == [2]


async def test_a_replica_that_is_down_at_the_first_look_does_not_lend_its_place_to_another(
    recording: Recording,
) -> None:
    policy: Any = Policy()
    policy.down = {0}
    policy.work(1, 5.0, 5.0, 700)
    await recording.begin(policy)
    policy.work(1, 3.0, 1.0, 100)
    await take(recording, policy, make_step(1, 1, 0.5))
    (row,) = read(recording.folder.metrics)
    assert row["idle/generator_1"] == 0.25 and "idle/generator_0" not in row, "what is not known is no 0"
    summary = recording.summary(Tally(), RolloutBuffer(recording.config.buffer))
    assert summary.idle_generators == [None, 0.25] and "generators - 25%" in dict(summary.lines())["idle"]
    policy.down = set()
    policy.work(0, 1.0, 0.0, 50)
    await recording.look(policy)
    assert sorted(recording.replicas) == [0, 1] and recording.replicas[1]["generated_tokens"] == 800
    policy.work(1, 1.0, 1.0, 10)
    await take(recording, policy, make_step(2, 2, 0.5))
    assert recording._generated.total == 110, "replica 0 is counted from its first word, replica 1 never twice"


async def test_a_full_disk_costs_a_warning_for_each_file_and_the_run_goes_on(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Any, line: str) -> None:
        raise OSError(28, "No space left on device")

    policy: Any = Policy()
    await take(recording, policy, make_step(1, 1, 0.75))
    with monkeypatch.context() as patched:
        patched.setattr(jsonl, "write_line", full)
        await take(recording, policy, make_step(2, 2, 0.5), make_step(3, 3, 0.5))
    await take(recording, policy, make_step(4, 4, 0.25))
    folder, out = recording.folder, shown(recording)
    warnings = [line for line in out.splitlines() if "the run goes on" in line]
    assert len(warnings) == 3 and out.count("No space left on device") == 3
    assert all(f"warning: {path} " in out for path in (folder.metrics, folder.episodes, folder.events))
    assert metrics_frame(folder.metrics).index.tolist() == [1, 4], "once there is room it is written again"
    assert [e["version"] for e in read(folder.events) if e["kind"] == "step"] == [1, 4]


def test_a_summary_that_cannot_be_written_costs_a_warning(recording: Recording) -> None:
    warnings: list[str] = []
    recording.console = SimpleNamespace(warn=warnings.append, close=lambda: None)  # type: ignore[assignment]
    recording.folder.summary.mkdir()
    recording.conclude(Summary(steps=0, wall_s=1, rewards=[]), "finished")
    assert len(warnings) == 1 and "summary" in warnings[0]
    assert not list(recording.folder.path.glob(".summary*")), "nothing is left of it"
