from __future__ import annotations

import json

import pytest

from forge_async.buffer import Ledger, LedgerError


def test_each_prompt_has_one_fate():
    ledger = Ledger()
    for prompt_id in ("a", "b", "c", "d"):
        ledger.admit(prompt_id)
    ledger.train("a")
    ledger.drop("b", "failed")
    ledger.drop("c", "failed")
    assert (ledger.admitted, ledger.trained, dict(ledger.dropped), ledger.in_flight) == (4, 1, {"failed": 2}, 1)
    assert ledger.balanced
    assert ledger.summary() == {"admitted": 4, "trained": 1, "dropped": {"failed": 2}}
    assert [ledger.fate(p) for p in ("a", "b", "d", "e")] == ["trained", "dropped (failed)", "in flight", None]


@pytest.mark.parametrize("second", ["train", "drop", "admit"])
@pytest.mark.parametrize("first", ["train", "drop"])
def test_a_second_fate_is_refused(first, second):
    ledger = Ledger()
    ledger.admit("p")
    ledger.train("p") if first == "train" else ledger.drop("p", "stale")
    before = ledger.summary()
    with pytest.raises(LedgerError, match=r"p .*(trained|stale)"):
        {"train": ledger.train, "admit": ledger.admit, "drop": lambda p: ledger.drop(p, "late")}[second]("p")
    assert ledger.summary() == before


def test_a_fate_without_admission_is_refused():
    with pytest.raises(LedgerError, match="never admitted"):
        Ledger().train("p")
    ledger = Ledger()
    ledger.admit("p")
    with pytest.raises(LedgerError, match="still open"):
        ledger.admit("p")


def test_a_checkpoint_reopens_what_was_open():
    ledger = Ledger()
    for prompt_id in ("a", "b", "c", "d"):
        ledger.admit(prompt_id)
    ledger.train("c")
    ledger.drop("a", "stale")
    state = json.loads(json.dumps(ledger.state()))
    resumed = Ledger()
    assert resumed.restore(state) == ["b", "d"]
    assert resumed.balanced and resumed.in_flight == 0 and resumed.admitted == 2
    resumed.admit("b")
    resumed.admit("d")
    resumed.train("b")
    resumed.drop("d", "stale")
    assert resumed.summary() == {"admitted": 4, "trained": 2, "dropped": {"stale": 2}}


def test_a_checkpoint_that_does_not_balance_is_refused():
    with pytest.raises(LedgerError, match="does not balance"):
        Ledger().restore({**Ledger().state(), "admitted": 5, "trained": 1, "in_flight": ["a"]})
