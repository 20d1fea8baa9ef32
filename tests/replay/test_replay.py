"""What a replay reads, forces and compares, without processes."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forge_async.buffer import BufferConfig, RolloutBuffer
from forge_async.config import Config, to_yaml
from forge_async.errors import DataError
from forge_async.journal import Journal, completion_line, request_seed, runs, token_ids, turns_file
from forge_async.policy.turns import Diverged
from forge_async.replay import NotReplayable, Recorded, Replay
from forge_async.replay.buffer import RecordedBuffer
from forge_async.replay.command import watch
from forge_async.replay.recorded import session_of
from forge_async.types import Completion, Episode, Group, Prompt, SamplingMask, StepStats, TrainingSequence, Turn

THREADS = {"trainer": 1.0, "policy": 1.0}


def prompt(name: str) -> Prompt:
    return Prompt(name, (), np.array([1, 2], np.int32))


def completion(ids: tuple[int, ...] = (5, 6, 7), versions: tuple[int, ...] = (0, 0, 1)) -> Completion:
    logprobs = -np.array(ids, np.float32) / 7
    return Completion(
        np.array([1, 2], np.int32),
        np.array(ids, np.int32),
        logprobs,
        np.array(versions, np.int32),
        np.zeros(len(ids), np.int32),
        "stop",
    )


def group(name: str, episodes: tuple[int, ...] = (0, 1), reward: float = 1.0) -> Group:
    made = tuple(Episode(f"{name}.{i}", name, (Turn(completion()),), reward) for i in episodes)
    return Group(prompt(name), made)


def sequence(advantage: float = 0.5) -> TrainingSequence:
    return TrainingSequence(
        "s",
        np.arange(4, dtype=np.int32),
        np.array([False, True, True, True]),
        np.zeros(4, np.float32),
        np.zeros(4, np.int32),
        np.full(4, advantage, np.float32),
    )


def stats(version: int = 1, loss: float = 0.1) -> StepStats:
    return StepStats(version, loss, 2.0, 1e-3, 1.0, 1.0, 0.0, 3.0, 3, 4, 0, wall_s=float(np.random.rand()))


def test_a_schedule_that_cannot_be_written_any_more_ends_there_and_says_so_once(tmp_path: Path) -> None:
    warnings: list[str] = []
    journal, path = Journal(tmp_path, warnings.append), tmp_path / "loop.jsonl"
    journal.admitted("0-0")
    before, limits = path.read_text(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))  # a disk that is nearly full
    try:
        journal.admitted("0-1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    journal.admitted("0-2")
    journal.close()
    assert path.read_text() == before, "neither a part of a line nor what follows a gap"
    assert len(warnings) == 1 and "a replay will end here" in warnings[0]


def write(run: Path, config: Config | None = None, device: str = "cpu") -> Journal:
    """A run of two steps, whose prompt 0-1 was lost once and admitted again after the first batch."""
    journal = Journal(run / "schedule")
    journal.started(device, THREADS, to_yaml(config or Config()))
    journal.published(0, "d0")
    journal.admitted("0-0")
    journal.admitted("0-1")
    journal.completed("0-0.0~0", completion())
    journal.failed("0-1.0", "timeout", "too slow")
    journal.batch(1, [group("0-0")], [sequence()])
    journal.trained(1, stats())
    journal.published(1, "d1")
    journal.admitted("0-1")
    journal.batch(2, [group("0-1", (1,))], [sequence()])
    journal.trained(2, stats(2))
    lines = [[0, 0, [["swap", 0, False], ["submit", "0-0.0~0", 1, 2], ["submit", "check-0", 1, 2]]]]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "schedule" / turns_file(0)).write_text(text)
    return journal


def test_a_recorded_run_is_read_and_its_time_limits_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, Config(seed=3)).close()
    recorded = Recorded.read(tmp_path)
    assert (recorded.steps, recorded.config.seed) == (2, 3)
    assert recorded.sessions == {"0-0": 0, "check-0": 0}
    assert recorded.warnings == []
    config = recorded.replay_config()
    assert (config.name, config.output_dir, config.steps) == ("replay", str(tmp_path), 60)
    assert config.rollout.timeout_s == config.policy.update.timeout_s > 1e6
    assert not config.metrics.record_schedule


def test_what_depends_on_more_than_the_schedule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotReplayable, match="has no schedule/loop.jsonl.*metrics.record_schedule"):
        Recorded.read(tmp_path)
    journal = write(tmp_path)
    with pytest.raises(NotReplayable, match="--steps 3: .* has 2 steps that can be replayed"):
        Recorded.read(tmp_path, 3)
    journal.fault("respawned")
    journal.batch(3, [group("0-2")], [sequence()])
    journal.close()
    with pytest.raises(NotReplayable, match=r"a replica was lost \(respawned\) after step 2.*--steps 2"):
        Recorded.read(tmp_path)
    assert Recorded.read(tmp_path, 2).steps == 2

    resumed = write(tmp_path / "resumed")
    resumed.started("cpu", THREADS, to_yaml(Config(resume="runs/x")))
    resumed.close()
    with pytest.raises(NotReplayable, match="the run was resumed after step 2.*--steps 2"):
        Recorded.read(tmp_path / "resumed")
    write(tmp_path / "later", Config(resume="runs/x")).close()
    with pytest.raises(NotReplayable, match="was resumed from a checkpoint"):
        Recorded.read(tmp_path / "later")
    write(tmp_path / "gpu", device="cuda").close()
    with pytest.raises(NotReplayable, match="ran on cuda: only runs on CPU"):
        Recorded.read(tmp_path / "gpu")
    write(tmp_path / "lost").close()
    (tmp_path / "lost/schedule" / turns_file(0)).unlink()
    with pytest.raises(NotReplayable, match="replica-0.jsonl is missing"):
        Recorded.read(tmp_path / "lost")


def test_a_schedule_whose_turns_end_early_is_replayed_up_to_there(tmp_path: Path) -> None:
    """An engine could not write its own for a moment, the loop could."""
    journal = write(tmp_path)
    journal.completed("0-1.1~0", completion())
    journal.batch(3, [group("0-1")], [sequence()])
    journal.trained(3, stats(3))
    journal.close()
    with pytest.raises(NotReplayable, match=r"turns of an engine were not written to their end.*--steps 2"):
        Recorded.read(tmp_path)
    assert Recorded.read(tmp_path, 2).steps == 2


def test_an_episode_that_ended_before_it_was_sent_ends_so_again(tmp_path: Path) -> None:
    """It waited for a place in the engines for too long. Its siblings were sent; another prompt's never was."""
    write(tmp_path).close()
    replay = Replay(Recorded.read(tmp_path), tell=lambda line: None)
    replay.asked("0-0.0~0")
    replay.asked("0-7.0~0")  # of a prompt that was open when the run ended: it may wait
    with pytest.raises(DataError, match="0-1.0~0: its episode ended before it was sent"):
        replay.asked("0-1.0~0")


@pytest.mark.parametrize(
    ("file", "number", "text", "words"),
    [
        ("loop.jsonl", 1, '{"k": "run", "config": "", "threads": {}, "machine": {}}', "device is None"),
        ("loop.jsonl", 1, '{"k": "run", "config": "", "device": "cpu", "threads": [1], "machine": {}}', "threads is"),
        (
            "loop.jsonl",
            1,
            '{"k": "run", "config": "old: 3", "device": "cpu", "threads": {}, "machine": {}}',
            "a config that this version does not read: old = 3: must be a known setting.*recorded it",
        ),
        ("loop.jsonl", 4, '{"k": ["admit"]}', "no line of a schedule"),
        ("loop.jsonl", 4, '{"k": "unheard of"}', "no line of a schedule"),
        ("loop.jsonl", 4, '{"k": "adm', "is not JSON"),
        ("loop.jsonl", 4, '{"k": "admit"}', "prompt is None"),
        ("loop.jsonl", 4, "\udcff", "is not JSON"),
        ("replica-0.jsonl", 1, "\udcff", "is not a turn"),
        ("replica-0.jsonl", 1, '[0, 0, [["submit"]]]', "is not a turn"),
        ("replica-0.jsonl", 1, '[0, 0, [["submit", 5, 1, 1]]]', "is not a turn"),
        ("replica-0.jsonl", 1, '[0, 0, [["unheard of", 5]]]', "is not a turn"),
    ],
)
def test_a_schedule_that_was_edited_or_is_another_versions_is_refused(
    tmp_path: Path, file: str, number: int, text: str, words: str
) -> None:
    write(tmp_path).close()
    path = tmp_path / "schedule" / file
    lines = path.read_text().splitlines()
    lines[number - 1] = text
    path.write_bytes(("\n".join(lines) + "\n").encode(errors="surrogateescape"))
    with pytest.raises(NotReplayable, match=words) as caught:
        Recorded.read(tmp_path)
    assert file in str(caught.value)


def test_a_run_that_was_killed_in_a_step_is_replayed_up_to_and_into_that_step(tmp_path: Path) -> None:
    journal = write(tmp_path)
    journal.batch(3, [group("0-2")], [sequence()])
    journal.close()
    path = tmp_path / "schedule/loop.jsonl"
    path.write_text(path.read_text() + '{"k":"step","st')
    recorded = Recorded.read(tmp_path)
    assert recorded.steps == 3
    told: list[str] = []
    Replay(recorded, told.append).trained(3, stats(3))
    assert "the recorded run ended in this step" in told[0]


@pytest.fixture
def replay(tmp_path: Path) -> Replay:
    write(tmp_path).close()
    return Replay(Recorded.read(tmp_path), lambda line: None)


def test_what_is_as_recorded_is_counted(replay: Replay) -> None:
    replay.started("cpu", THREADS, "")
    replay.published(0, "d0")
    replay.completed("0-0.0~0", completion())
    replay.failed("0-1.0", "error", "aborted")
    replay.batch(1, [group("0-0")], [sequence()])
    replay.trained(1, stats())
    assert replay.compared == {"versions": 1, "completions": 1, "tokens": 3, "steps": 1}


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (lambda r: r.completed("0-0.0~0", completion((5, 9, 7))), "0-0.0~0: token 1 is 9, recorded was 6"),
        (lambda r: r.completed("0-0.0~0", completion((5, 6), (0, 0))), "it has 2 tokens, recorded were 3"),
        (
            lambda r: r.completed("0-0.0~0", completion(versions=(0, 1, 1))),
            r"versions are \[\[0, 1\], \[1, 2\]\], recorded were \[\[0, 2\], \[1, 1\]\]",
        ),
        (
            lambda r: r.completed("0-0.0~0", replace(completion(), logprobs=completion().logprobs * np.float32(1.001))),
            "the log-prob of token 0 ",
        ),
        (lambda r: r.failed("0-0.1", "error", "boom"), "episode 0-0.1 failed here and not when recorded.*boom"),
        (lambda r: r.batch(1, [group("0-0", reward=2.0)], [sequence()]), r"step 1, prompt 0-0: its rewards are \[2.0"),
        (lambda r: r.batch(1, [group("0-0")], [sequence(0.25)]), "step 1: the batch's advantages are not those"),
        (
            lambda r: r.batch(1, [group("0-0")], [replace(sequence(), sampling_mask=SamplingMask.whole(4))]),
            "step 1: the batch's sampling_mask are not those",
        ),
        (lambda r: r.trained(1, stats(loss=0.1 + 2**-56)), "step 1: loss is .*, recorded was 0.1"),
        (lambda r: r.trained(1, replace(stats(), grad_norm=2.5)), "step 1: grad_norm is 2.5, recorded was 2.0"),
        (lambda r: r.published(1, "d9"), "version 1 has weights of digest d9, recorded was d1"),
    ],
)
def test_the_first_difference_is_named(replay: Replay, report: Any, words: str) -> None:
    with pytest.raises(Diverged, match=words):
        report(replay)


def test_other_threads_than_recorded_are_refused(replay: Replay) -> None:
    with pytest.raises(NotReplayable, match="'policy': 2.0.*placement"):
        replay.started("cpu", {"trainer": 1.0, "policy": 2.0}, "")


async def test_the_buffer_repeats_admissions_batches_and_lost_work(tmp_path: Path) -> None:
    write(tmp_path).close()
    recorded = Recorded.read(tmp_path)
    buffer, source = RecordedBuffer(recorded.config, recorded.lines), map(prompt, ("0-0", "0-1", "0-2"))
    admitted = [await buffer.admit(source), await buffer.admit(source)]
    assert [p.prompt_id for p in admitted if p] == ["0-0", "0-1"]
    again = asyncio.ensure_future(buffer.admit(source))
    await asyncio.sleep(0)
    assert not again.done(), "it was admitted again after the first batch"
    buffer.finish(group("0-1", ()))  # its work is lost
    batches = buffer.batches()
    first = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    assert not first.done(), "finished first, but not of the first batch"
    buffer.finish(group("0-0"))
    assert [g.prompt.prompt_id for g in await first] == ["0-0"]
    assert await again is admitted[1]
    buffer.trained([group("0-0")], 1)
    buffer.finish(group("0-1", (0, 1)))
    (second,) = await anext(batches)
    assert [e.episode_id for e in second.episodes] == ["0-1.1"], "the others were not in the recorded batch"
    with pytest.raises(StopAsyncIteration):
        await anext(batches)


async def test_stale_tokens_are_masked_again_as_they_were(tmp_path: Path) -> None:
    """The gate's choice is made again, and is that of the run: a group whose tokens span versions 0 to 2, at 3."""
    config = Config(buffer=BufferConfig(max_staleness=1, window=2, stale="mask", groups_per_step=1))
    spanning = Episode("0-0.0", "0-0", (Turn(completion(versions=(0, 2, 2))),), 1.0)
    fresh = Episode("0-0.1", "0-0", (Turn(completion(versions=(2, 2, 2))),), 0.0)
    finished = Group(prompt("0-0"), (spanning, fresh))
    lived = RolloutBuffer(config.buffer)
    await lived.admit(iter([prompt("0-0")]))
    lived.finish(finished)
    lived.trainer_version = 3
    recorded = [g async for batch in _first(lived.batches()) for g in batch]
    assert [episode.trained_since for episode in recorded[0].episodes] == [2, 0]

    journal = write(tmp_path, config)
    journal.close()
    lines = [line for line in Recorded.read(tmp_path).lines if line["k"] in ("admit", "batch")][:3]
    again = RecordedBuffer(config, lines)
    again.trainer_version = 3
    await again.admit(iter([prompt("0-0")]))
    again.finish(finished)
    repeated = [g async for batch in _first(again.batches()) for g in batch]
    assert repeated == recorded


async def test_a_resumed_group_keeps_again_what_it_kept(tmp_path: Path) -> None:
    """What comes to a run's buffer comes to its replay's: the second attempt begins once the first has ended."""
    config = Config(buffer=BufferConfig(max_staleness=1, stale="resume", groups_per_step=1))
    made = [Episode(f"0-0.{i}", "0-0", (Turn(completion(versions=(v,) * 3)),), float(i)) for i, v in enumerate((2, 0))]
    anew = replace(made[1], turns=(Turn(completion(versions=(3, 3, 3))),))
    lived, journal = RolloutBuffer(config.buffer, version=3), Journal(tmp_path)
    source = iter([prompt("0-0")])

    async def admit(buffer: RolloutBuffer) -> Prompt:
        admitted = await buffer.admit(source)
        assert admitted is not None
        return admitted

    one = await admit(lived)
    journal.admitted("0-0", lived.kept("0-0"))
    lived.finish(Group(one, tuple(made)))
    assert lived.take() == []
    await admit(lived)
    journal.admitted("0-0", lived.kept("0-0"))
    lived.finish(Group(one, (made[0], anew)))
    recorded = lived.take()
    journal.batch(1, recorded, [sequence()])
    journal.close()

    lines = [json.loads(line) for line in (tmp_path / "loop.jsonl").read_text().splitlines()]
    again, source = RecordedBuffer(config, lines), iter([prompt("0-0")])
    again.trainer_version = 3
    one = await admit(again)
    assert again.kept("0-0") == ()
    second = asyncio.ensure_future(again.admit(source))
    await asyncio.sleep(0)
    assert not second.done(), "its attempt before still runs"
    again.finish(Group(one, tuple(made)))
    assert await second is one and again.kept("0-0") == (made[0],)
    again.finish(Group(one, (made[0], anew)))
    (repeated,) = [g async for batch in _first(again.batches()) for g in batch]
    assert repeated.episodes == recorded[0].episodes == (made[0], anew)


async def _first(batches: AsyncIterator[list[Group]]) -> AsyncIterator[list[Group]]:
    yield await anext(batches)


async def test_another_dataset_is_a_divergence(tmp_path: Path) -> None:
    write(tmp_path).close()
    recorded = Recorded.read(tmp_path)
    with pytest.raises(Diverged, match="next prompt is 0-9, recorded was 0-0"):
        await RecordedBuffer(recorded.config, recorded.lines).admit(iter([prompt("0-9")]))
    with pytest.raises(Diverged, match="the dataset has ended, recorded was prompt 0-0"):
        await RecordedBuffer(recorded.config, recorded.lines).admit(iter([]))


async def test_a_schedule_that_cannot_go_on_ends_and_says_what_it_waits_for() -> None:
    async def fan_out(*args: Any, **kwargs: Any) -> list[Any]:
        return [{"turn": 7, "version": 1, "lacks": "turn 7 waits for submit 0-3.1~0"}]

    async def call(*args: Any) -> list[Any]:
        return [{"version": 1, "busy_s": 3.0}]

    errors: list[Exception] = []
    engines = SimpleNamespace(policy=SimpleNamespace(fan_out=fan_out), trainer=SimpleNamespace(call=call))
    run = SimpleNamespace(engines=engines, fail=errors.append)
    await asyncio.wait_for(watch(run, stall_s=1.0), 10)  # type: ignore[arg-type]
    with pytest.raises(Diverged, match="the schedule cannot go on. replica 0: turn 7 waits for submit 0-3"):
        raise errors[0]


def test_lines_of_completions_keep_their_tokens() -> None:
    line = completion_line("r", completion())
    assert token_ids(line).tolist() == [5, 6, 7]
    assert line["versions"] == [[0, 2], [1, 1]] and line["kv"] == [[0, 3]]
    assert runs(np.full(3, 4, np.int32)) == [[4, 3]]
    assert runs(np.zeros(0, np.int32)) == []


def test_seeds_differ_by_run_prompt_episode_and_attempt() -> None:
    names = [f"{p}.{e}~{a}" for p in ("0-1", "0-11", "1-1") for e in range(3) for a in range(3)]
    seeds = {request_seed(run, name) for run in (0, 1) for name in names}
    assert len(seeds) == 2 * len(names)
    assert request_seed(0, names[0]) == request_seed(0, names[0])
    assert [session_of(name) for name in ("0-12.3~1", "check-4")] == ["0-12", "check-4"]
