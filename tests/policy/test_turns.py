"""Recorded turns force an engine's schedule: the same commands before the same forward passes, whenever they come."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forge_async.policy import turns
from forge_async.policy.inbox import Inbox
from forge_async.policy.turns import Diverged, TurnLog, TurnSchedule, read_turns


def submit(name: str, seed: int = 7, prompt: tuple[int, ...] = (1, 2)) -> tuple[str, Any]:
    request = SimpleNamespace(request_id=name, params=SimpleNamespace(seed=seed), prompt=np.array(prompt, np.int32))
    return "submit", request


def swap(version: int, packs: bool = False) -> tuple[str, Any]:
    return "swap", (version, SimpleNamespace(packs=packs), Future())


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """a and b before turn 0, nothing before turn 1, a swap before c in turn 2, and a's end in turn 3."""
    inbox = Inbox()
    inbox.log = TurnLog(tmp_path / "replica-0.jsonl")
    for sampled, posted in ((0, [submit("a"), submit("b")]), (11, []), (12, [swap(1, True), submit("c")])):
        for command in posted:
            inbox.post(*command)
        assert inbox.take(runnable=True, sampled=sampled) == posted
    for command in (("abort", "a"), ("hold", (1, Future())), ("release", None)):
        inbox.post(*command)
    inbox.take(runnable=True, sampled=13)
    inbox.close(RuntimeError("the end"))
    return tmp_path / "replica-0.jsonl"


def test_a_log_that_cannot_be_written_ends_and_the_engine_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(file: Any, line: str) -> None:
        raise OSError(28, "No space left on device")

    inbox = Inbox()
    inbox.log = TurnLog(tmp_path / "replica-0.jsonl")
    with monkeypatch.context() as patched:
        patched.setattr(turns, "write_line", full)
        inbox.post(*submit("a"))
        assert len(inbox.take(runnable=True, sampled=0) or []) == 1
    inbox.post(*submit("b"))
    assert len(inbox.take(runnable=True, sampled=1) or []) == 1
    assert (tmp_path / "replica-0.jsonl").read_bytes() == b"" and caplog.text.count("a replay will end there") == 1


def replaying(path: Path) -> Inbox:
    inbox = Inbox()
    inbox.schedule = TurnSchedule(read_turns(path))
    return inbox


def test_commands_are_taken_before_the_recorded_turns_in_the_recorded_order(recorded: Path) -> None:
    inbox = replaying(recorded)
    assert inbox.schedule is not None
    assert inbox.schedule.swaps == [(1, True)]
    a, b, c, version, hold = submit("a"), submit("b"), submit("c"), swap(1, True), ("hold", (1, Future()))
    for command in (c, b, version, ("abort", "b"), hold, a):  # in any order, and with an abort of its own
        inbox.post(*command)
    assert inbox.take(runnable=False, sampled=0) == [a, b]
    assert inbox.take(runnable=True, sampled=11) == []
    assert inbox.take(runnable=True, sampled=12) == [version, c]
    assert inbox.take(runnable=True, sampled=13) == [("abort", "a"), hold, ("release", None)], "made by the replay"
    late = submit("late")
    inbox.post(*late)
    assert inbox.take(runnable=True, sampled=14) == [late], "after the last recorded turn it is free"


def test_what_was_posted_before_a_stop_is_given_back() -> None:
    """Its futures are failed by whoever closes the inbox."""
    inbox, command = Inbox(), submit("a")
    inbox.post(*command)
    inbox.stop()
    assert inbox.take(runnable=True, sampled=0) is None
    assert inbox.close(RuntimeError("stopped")) == [command]


def test_a_turn_waits_for_its_commands_and_says_for_which(recorded: Path) -> None:
    inbox = replaying(recorded)
    inbox.post(*submit("b"))
    assert inbox._now(runnable=True, sampled=0) is None
    assert inbox.lacks == "turn 0 waits for submit a"
    inbox.post(*submit("a"))
    assert len(inbox.take(runnable=True, sampled=0) or []) == 2


@pytest.mark.parametrize(
    ("posted", "sampled", "words"),
    [
        ([submit("a", seed=8), submit("b")], 0, "turn 0: submit a is .8, .*recorded was .7, "),
        ([submit("a"), submit("b", prompt=(1, 3))], 0, "turn 0: submit b is "),
        ([submit("a"), submit("b")], 5, "turn 0: the tokens sampled before it are not those recorded"),
    ],
)
def test_another_seed_prompt_or_token_is_a_divergence(
    recorded: Path, posted: list[tuple[str, Any]], sampled: int, words: str
) -> None:
    inbox = replaying(recorded)
    for command in posted:
        inbox.post(*command)
    with pytest.raises(Diverged, match=words):
        inbox.take(runnable=True, sampled=sampled)


def test_an_engine_that_has_nothing_to_do_where_the_recorded_one_had_is_a_divergence(recorded: Path) -> None:
    inbox = replaying(recorded)
    inbox.post(*submit("a"))
    inbox.post(*submit("b"))
    inbox.take(runnable=True, sampled=0)
    with pytest.raises(Diverged, match="turn 1: no request runs, but when recorded some did"):
        inbox.take(runnable=False, sampled=11)


def test_a_file_cut_off_by_a_kill_ends_with_its_last_whole_turn_and_a_shuffled_one_is_refused(recorded: Path) -> None:
    lines = recorded.read_text().splitlines(keepends=True)
    recorded.write_text("".join(lines)[:-5])
    assert [turn for turn, _, _ in read_turns(recorded)] == [0, 2]
    recorded.write_text("".join(lines[::-1]))
    with pytest.raises(Diverged, match=r"replica-0.jsonl:2 is not a turn after turn 3"):
        list(read_turns(recorded))
    recorded.write_text(json.dumps({"k": "run"}) + "\n")
    with pytest.raises(Diverged, match=r"replica-0.jsonl:1 is not a turn"):
        list(read_turns(recorded))
