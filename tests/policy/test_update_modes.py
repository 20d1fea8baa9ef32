"""The five update modes in one real engine: versions, keys and values, log-probs, caps and counters in each."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_async.errors import ConfigError
from forge_async.policy import UpdateConfig
from forge_async.policy.life_cycle import spans_of
from forge_async.policy.updates import RULES
from forge_async.types import Completion
from tests.policy.modes_child import record_modes
from tests.policy.reference import TOLERANCE, Seen, perturbed

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

ALL = list(RULES)
KEEP, RECOMPUTE, RESUME = ALL[:3]
UNMIXED = [("abort_retry", "keep"), ("drain", "keep"), ("blocking", "keep")]
each = pytest.mark.parametrize("how", ALL, ids="-".join)


@pytest.fixture(scope="module")
def seen(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, recorder: Connection) -> Seen:
    folder, work = tiny_model("llama", tied=True), tmp_path_factory.mktemp("modes")
    weights = [load_file(folder / "model.safetensors")]
    weights += [perturbed(weights[0], seed=version) for version in (1, 2)]
    files = [str(work / f"{version}.safetensors") for version in range(3)]
    for tensors, file in zip(weights, files, strict=True):
        save_file(tensors, file)
    recorder.send((record_modes, str(folder), files, str(work / "seen.pickle")))
    assert recorder.poll(280), "the engine did not finish in time"
    assert recorder.recv() == 0
    return Seen(folder, work, weights, pickle.loads((work / "seen.pickle").read_bytes()))


def check(seen: Seen, completion: Completion) -> None:
    """Every log-prob is that of the weights, keys and values which the completion names."""
    assert np.abs(completion.logprobs - seen.logprobs(completion)).max() < TOLERANCE
    assert (np.diff(completion.policy_versions) >= 0).all() and (np.diff(completion.kv_versions) >= 0).all()
    assert (completion.kv_versions <= completion.policy_versions).all()


def versions_of(completion: Completion) -> list[int]:
    return [version for version, _, _ in spans_of(completion.policy_versions)]


@each
def test_an_update_while_eight_requests_run(seen: Seen, how: tuple[str, str]) -> None:
    one = seen["one"][how]
    report = one["report"]
    old, new = report.previous_version, report.version
    for completion in one["completions"]:
        assert len(completion.token_ids) == 80 and completion.finish_reason == "length"
        assert len(completion.prompt_token_ids) in (70, *range(25, 32)), "a resubmitted prefix is no prompt"
        check(seen, completion)
        expected = {
            KEEP: ([old, new], {old}),
            RECOMPUTE: ([old, new], {old, new}),
            RESUME: ([old, new], {old, new}),
            ("abort_retry", "keep"): ([new], {new}),
        }.get(how, ([old], {old}))
        assert (versions_of(completion), set(completion.kv_versions)) == expected
        if how in (RECOMPUTE, RESUME):
            assert (completion.kv_versions == completion.policy_versions).all()
    assert report.in_flight == (0 if how[0] in ("drain", "blocking") else 9)
    assert versions_of(one["waiting"]) == [new]
    assert len(one["waiting"].token_ids) == 20
    check(seen, one["waiting"])


@each
def test_minimum_and_stop_tokens_hold_across_an_update(seen: Seen, how: tuple[str, str]) -> None:
    stopping = seen["one"][how]["stopping"]
    assert stopping.finish_reason == "stop" and 60 < len(stopping.token_ids) < 80
    inside = [4 <= token < 160 for token in stopping.token_ids]
    assert inside[-1] and not any(inside[:-1]) and stopping.stop_reason == stopping.token_ids[-1]
    assert len(versions_of(stopping)) == (1 if how in UNMIXED else 2)
    mask = stopping.sampling_mask  # neither stop tokens nor the end token can be sampled while there is a minimum
    kept = np.split(mask.token_ids.astype(np.int64), np.cumsum(mask.counts)[:-1])
    allowed = set(range(320)) - set(range(4, 160)) - {seen.models[0].config.eos_token_id}
    assert all(set(ids) == allowed for ids in kept[:60]) and all(len(ids) == 320 for ids in kept[60:])
    logits = seen.logits(stopping)
    for row, ids in enumerate(kept):
        replayed = logits[row, stopping.token_ids[row]] - logits[row, torch.from_numpy(ids)].logsumexp(-1)
        assert abs(float(replayed) - stopping.logprobs[row]) < TOLERANCE


@each
def test_counters_say_what_the_update_cost(seen: Seen, how: tuple[str, str]) -> None:
    one = seen["one"][how]
    grown = {
        name: one["after"][name] - one["before"][name]
        for name in (
            *("swaps", "swaps_in_flight", "aborted", "abort_requested", "finished"),
            *("generated_tokens", "prompt_tokens", "discarded_tokens", "recomputed_tokens"),
        )
    }
    every = [*one["completions"], one["stopping"], one["waiting"]]
    kept = sum(len(completion.token_ids) for completion in every)
    assert (grown["swaps"], grown["finished"]) == (1, 10)
    assert grown["swaps_in_flight"] == (how[0] not in ("drain", "blocking"))
    assert grown["aborted"] == grown["abort_requested"] == 0
    assert grown["prompt_tokens"] == sum(len(completion.prompt_token_ids) for completion in every)
    assert grown["generated_tokens"] == kept + grown["discarded_tokens"]
    running = every[:-1]
    prompts = sum(len(completion.prompt_token_ids) for completion in running)
    if how in (RECOMPUTE, RESUME):
        done = sum(spans_of(completion.policy_versions)[0][2] for completion in running)
        # the last token of each was sampled, but had no keys and values yet
        assert (grown["discarded_tokens"], grown["recomputed_tokens"]) == (0, prompts + done - 9)
    elif how[0] == "abort_retry":
        assert grown["discarded_tokens"] >= 9 * 20 and grown["recomputed_tokens"] == prompts
    else:
        assert grown["discarded_tokens"] == grown["recomputed_tokens"] == 0


@each
def test_three_updates_during_one_long_request(seen: Seen, how: tuple[str, str]) -> None:
    three = seen["three"][how]
    versions = [three["reports"][0].previous_version, *(report.version for report in three["reports"])]
    long, longest = three["completions"]
    assert len(long.token_ids) == 150, "max_tokens counts over all submissions"
    assert len(longest.token_ids) == 156, "and max_model_len is 256"
    for completion in (long, longest):
        assert completion.finish_reason == "length"
        check(seen, completion)
        own = versions_of(completion)
        if how in UNMIXED:
            assert len(own) == len(set(completion.kv_versions)) == 1
            assert own == ([versions[-1]] if how[0] == "abort_retry" else [versions[0]])
        else:
            assert own == versions
            assert sorted(set(completion.kv_versions)) == ([versions[0]] if how == KEEP else versions)


@pytest.mark.parametrize("how", [KEEP, RECOMPUTE, RESUME, ("drain", "keep")], ids="-".join)
def test_preempted_requests_keep_their_promises(seen: Seen, how: tuple[str, str]) -> None:
    """vLLM runs out of cache and computes a request's keys and values again: by which weights shows in kv_versions."""
    completions = seen["preempted"][how]
    for completion in completions:
        assert len(completion.token_ids) == 215
        check(seen, completion)
        assert len(versions_of(completion)) == 1 or how not in UNMIXED
    if how == KEEP:  # it is the only mode in which this shows
        again = [completion for completion in completions if len(set(completion.kv_versions)) > 1]
        assert again, "none was preempted after an update, so that this test shows nothing"


def test_requests_can_be_aborted_while_the_engine_drains(seen: Seen) -> None:
    drained = seen["abort_while_draining"]
    old, new = drained["report"].previous_version, drained["report"].version
    for name, completion in drained["aborted"].items():
        assert completion.finish_reason == "abort"
        assert set(completion.policy_versions) == (set() if name == "given up" else {old})
    assert drained["still"]["draining"] and drained["still"]["version"] == old
    assert (drained["still"]["running"], drained["still"]["waiting"]) == (1, 1)
    assert versions_of(drained["third"]) == [old] and len(drained["third"].token_ids) == 150
    assert versions_of(drained["patient"]) == [new] and len(drained["patient"].token_ids) == 80


def test_a_held_engine_finishes_what_runs_and_generates_nothing_until_the_next_version(seen: Seen) -> None:
    held = seen["held"]
    assert held["open"] == (False, 4)
    (old,) = {version for completion in held["ran"] for version in completion.policy_versions}
    assert (held["held"]["running"], held["held"]["waiting"], held["held"]["held"]) == (0, 1, True)
    assert held["later"]["generated_tokens"] == held["held"]["generated_tokens"]
    assert held["later"]["held_s"] - held["held"]["held_s"] >= 0.25
    assert held["later"]["idle_s"] - held["held"]["idle_s"] >= 0.25
    assert versions_of(held["swapped"]) == [old + 1] and not held["freed"]["held"]
    assert versions_of(held["void"]) == versions_of(held["released"]) == [old + 1]
    assert held["aborted"].finish_reason == "abort" and len(held["aborted"].token_ids) == 0


def test_stopping_while_draining_fails_what_waits(seen: Seen) -> None:
    assert seen["ended"]
    assert [kind for kind, _ in seen["stopped"]] == ["EngineDied"] * 4


def test_what_is_left_of_a_requests_parameters(seen: Seen) -> None:
    rows = seen["remaining"]
    assert [row[:4] for row in rows] == [
        (4, 26, 6, [5]),
        (0, 30, 10, [5]),
        (4, 26, 6, [5]),
        (12, 18, 0, [5]),
        (12, 18, 0, [5]),
    ]
    assert [row[4] for row in rows[:2]] == [None, 7]
    assert len({7, *(row[4] for row in rows[2:])}) == 4, "each goes on with draws of its own"


def test_seeds_in_split_prefills(seen: Seen) -> None:
    """The token sampled after a part of a prompt is dropped, and so is its draw."""
    split, whole, other = seen["seeded"]
    assert split.token_ids.tolist() == whole.token_ids.tolist() != other.token_ids.tolist()
    check(seen, split)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="mode = 'restart': must be one of never_stop, abort_resume, abort_retry, dr"):
        UpdateConfig(mode="restart")
    with pytest.raises(ConfigError, match="kv = 'drop': must be one of keep, recompute"):
        UpdateConfig(kv="drop")
    for mode in ("abort_resume", "abort_retry", "drain", "blocking"):
        with pytest.raises(ConfigError, match=f"kv = 'recompute': must be 'keep', its default, with mode '{mode}'"):
            UpdateConfig(mode=mode, kv="recompute")
