"""Submitted against trained: the figures worked out by hand."""

from __future__ import annotations

import json

import pytest

from forge_async.buffer import Ledger
from forge_async.buffer.selection import Selection, length_stratum


def test_shares_and_distance() -> None:
    """Submitted 6 : 2, trained 4 : 0. The long ones' share falls from 1/4 to 0, the others' rises from 3/4 to 1."""
    selection = Selection({"1-16": 6, "17-32": 2}, {"1-16": 4})
    assert selection.ratios == {"1-16": pytest.approx(4 / 3), "17-32": 0.0}
    assert selection.distance == pytest.approx(0.25)
    assert Selection({"a": 2, "b": 2}, {"a": 1, "b": 1}).distance == 0.0
    untrained = Selection({"a": 2}, {})
    assert (untrained.ratios, untrained.distance) == ({}, 0.0)
    assert selection.to_dict()["strata"]["17-32"] == {"submitted": 2, "trained": 0, "ratio": 0.0}


def test_lengths_are_sorted_by_powers_of_two() -> None:
    lengths = (0, 1, 16, 17, 32, 33, 1000)
    assert [length_stratum(n) for n in lengths] == ["1-16", "1-16", "1-16", "17-32", "17-32", "33-64", "513-1024"]


def test_a_slow_task_that_is_never_trained_shows() -> None:
    """Ten prompts each of a fast and a slow task; of the slow one all run out of time or still run."""
    ledger = Ledger()
    for index in range(20):
        ledger.admit(f"{index}", {"task": "slow" if index % 2 else "fast", "prompt_tokens": "1-16"})
    for index in range(0, 20, 2):
        ledger.finish(f"{index}", "17-32")
        ledger.train(f"{index}")
    for index in range(1, 9, 2):
        ledger.drop(f"{index}", "failed")
    selection = ledger.selection()
    assert selection["task"].ratios == {"fast": 2.0, "slow": 0.0}
    assert selection["task"].distance == 0.5
    assert selection["prompt_tokens"].distance == 0.0
    assert dict(selection["completion_tokens"].submitted) == {"none": 4, "17-32": 10}

    resumed = Ledger()
    assert len(resumed.restore(json.loads(json.dumps(ledger.state())))) == 6
    assert resumed.selection()["task"].submitted == {"fast": 10, "slow": 4}, "what was open is submitted anew"
