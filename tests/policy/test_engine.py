"""The engine against HF transformers: every log-prob, before, across and after swaps, for each kind of model."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_async.policy.config import SamplingConfig
from forge_async.policy.life_cycle import spans_of
from tests.policy.engine_child import CONFIG, LONG_PROMPT, WAYS, record
from tests.policy.reference import TOLERANCE, Seen, perturbed, picked

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

KINDS = {
    "llama_tied": ("llama", True),
    "llama_untied": ("llama", False),
    "qwen3_tied": ("qwen3", True),
    "qwen3_moe": ("qwen3_moe", False),
}


def shaped_logits(logits: torch.Tensor, sampling: SamplingConfig) -> torch.Tensor:
    """The distribution that is sampled from, token by token and by definition."""
    out = torch.full_like(logits, -torch.inf)
    for row, line in enumerate(logits / sampling.temperature):
        order = line.argsort(descending=True)
        kept = order[line[order].softmax(-1) >= sampling.min_p * line.softmax(-1).max()]
        kept = kept[: sampling.top_k] if sampling.top_k else kept
        if sampling.top_p < 1:
            mass = line[kept].softmax(-1).cumsum(-1)
            kept = kept[: int((mass < sampling.top_p).sum()) + 1]
        out[row, kept] = line[kept]
    return out


@pytest.fixture(scope="module", params=KINDS)
def seen(
    request: pytest.FixtureRequest,
    tiny_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    recorder: Connection,
) -> Seen:
    family, tied = KINDS[request.param]
    folder = tiny_model(family, tied=tied)
    work = tmp_path_factory.mktemp(request.param)
    weights = [load_file(folder / "model.safetensors")]
    assert ("lm_head.weight" in weights[0]) == (not tied)
    files = []
    for version in (1, 2):
        weights.append(perturbed(weights[0], seed=version))
        published = dict(weights[-1])
        if tied and version == 2:  # a trainer may publish the tied tensor under both names
            published["lm_head.weight"] = published["model.embed_tokens.weight"].clone()
        files.append(str(work / f"{version}.safetensors"))
        save_file(published, files[-1])
    recorder.send((record, str(folder), files, str(work / "seen.pickle")))
    assert recorder.poll(280), "the engine did not finish in time"
    assert recorder.recv() == 0
    return Seen(folder, work, weights, pickle.loads((work / "seen.pickle").read_bytes()))


def test_logprobs_equal_transformers(seen: Seen) -> None:
    for completion in seen["plain"]:
        assert completion.policy_versions.tolist() == [0] * 40
        assert np.abs(completion.logprobs - seen.logprobs(completion)).max() < TOLERANCE


def test_logprobs_are_those_of_the_distribution_sampled_from(seen: Seen) -> None:
    for completion, sampling in seen["shaped"]:
        logits = shaped_logits(seen.logits(completion), sampling)
        assert np.abs(completion.logprobs - picked(logits, completion)).max() < TOLERANCE
        unshaped = seen.logprobs(completion)
        assert np.abs(completion.logprobs - unshaped).max() > 0.05


def test_the_recorded_mask_is_the_set_that_was_kept(seen: Seen) -> None:
    """With top-k, top-p, both, and min-p: the ids at which transformers' shaped logits are finite."""
    for completion, sampling in seen["shaped"]:
        mask = completion.sampling_mask
        expected = shaped_logits(seen.logits(completion), sampling).isfinite()
        assert len(mask) == len(completion.token_ids) and mask.has(completion.token_ids).all()
        recorded = torch.zeros_like(expected)
        recorded[mask.rows(), mask.token_ids.astype(np.int64)] = True
        assert len(mask.token_ids) == recorded.sum(), "no id twice"
        # A nucleus may end a token apart where its mass is within rounding of top_p.
        assert (recorded != expected).sum() <= (0 if sampling.top_p == 1 else 1)
    assert all(completion.sampling_mask is None for completion in seen["plain"])
    other, same = seen["unrecorded"], seen["shaped"][1][0]
    assert other.sampling_mask is None and other.token_ids.tolist() == same.token_ids.tolist()


def test_swapped_logprobs_equal_transformers(seen: Seen) -> None:
    """The first prompt is one that version 0 had in its prefix cache."""
    for completion in seen["after"]:
        assert set(completion.policy_versions) == set(completion.kv_versions) == {1}
        assert np.abs(completion.logprobs - seen.logprobs(completion)).max() < TOLERANCE


def test_requests_in_flight_go_on_across_a_swap_with_exact_versions(seen: Seen) -> None:
    completions, report = seen["kept"]["completions"], seen["kept"]["report"]
    assert (report.version, report.previous_version, report.in_flight) == (1, 0, 8)
    for completion in completions:
        assert completion.finish_reason == "length" and len(completion.token_ids) == 40
        assert [version for version, _, _ in spans_of(completion.policy_versions)] == [0, 1]
        assert set(completion.kv_versions) == {0}
        assert np.abs(completion.logprobs - seen.logprobs(completion)).max() < TOLERANCE
        boundary = spans_of(completion.policy_versions)[0][2]
        for shifted in (boundary - 1, boundary + 1):  # one token off either way is another distribution
            versions = np.array([0] * shifted + [1] * (40 - shifted))
            assert np.abs(completion.logprobs - seen.logprobs(completion, versions=versions)).max() > 100 * TOLERANCE


def test_recomputed_kv_is_that_of_the_new_weights(seen: Seen) -> None:
    assert seen["recomputed"]["report"].in_flight == 8
    for completion in seen["recomputed"]["completions"]:
        (_, _, boundary), (new, _, _) = spans_of(completion.policy_versions)
        assert new == 2 and len(completion.token_ids) == 40
        assert completion.kv_versions.tolist() == [1] * boundary + [2] * (40 - boundary)
        before = seen.logprobs(completion, versions=np.full(40, 1))[:boundary]
        after = seen.logprobs(completion, versions=np.full(40, 2))[boundary:]
        assert np.abs(completion.logprobs - np.concatenate([before, after])).max() < TOLERANCE


def test_live_parameters_are_the_published_ones_bit_by_bit(seen: Seen) -> None:
    for found, version in ((seen["unchanged"], 0), (seen["live"], 1)):
        assert found.keys() == seen.weights[version].keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in seen.weights[version].items())
    tied = "lm_head.weight" not in seen.weights[1]
    head = seen.weights[1]["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert torch.equal(seen["alias"], head)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_every_way_of_a_swap_gives_the_new_weights(seen: Seen, way: tuple[str, str]) -> None:
    done = seen["ways"][way]
    new = seen.weights[done["weights"]]
    assert all(torch.equal(tensor, new[name]) for name, tensor in done["live"].items())
    assert done["prepared_equal"] and done["live"].keys() == new.keys()
    matrices = [t for n, t in new.items() if t.ndim > 1 and "embed" not in n and ("gate.weight" not in n)]
    assert (done["packed"] >= sum(tensor.numel() for tensor in matrices)) == (way[1] == "packed")
    for completion in done["completions"]:
        expected = seen.logprobs(completion, versions=np.full(40, done["weights"]))
        assert np.abs(completion.logprobs - expected).max() < TOLERANCE
    assert all(len(completion.token_ids) == 40 for completion in done["crossing"])


def test_a_wrong_mapping_is_found_before_a_flip_and_the_old_weights_stay(seen: Seen) -> None:
    case = seen["wrong_mapping"]
    kind, message = case["error"]
    assert kind == "DigestMismatchError" and any(name in message for name in case["names"])
    assert case["before"].token_ids.tolist() == case["after"].token_ids.tolist()
    assert np.abs(case["before"].logprobs - case["after"].logprobs).max() < TOLERANCE


def test_updates_that_do_not_fit_are_refused_and_name_the_tensor(seen: Seen) -> None:
    for case, words in (
        ("wrong_shape", ["model.layers.0.self_attn.k_proj.weight", "shape"]),
        ("missing", ["model.layers.0.self_attn.k_proj.weight", "not among"]),
        ("unknown", ["model.layers.9.x", "no such tensor"]),
    ):
        kind, message = seen[case]
        assert kind == "WeightMismatchError" and all(word in message for word in words)
    assert "never decrease" in seen["older"][1]


def test_more_requests_than_places_wait_their_turn(seen: Seen) -> None:
    assert len(seen["crowd"]) == 2 * CONFIG.max_num_seqs
    assert {len(completion.token_ids) for completion in seen["crowd"]} == {8}


def test_greedy_decoding_takes_the_likeliest_token_and_stops_at_a_stop_token(seen: Seen) -> None:
    line, stopped = seen["greedy"], seen["stopped"]
    assert seen.logits(line).argmax(-1).tolist() == line.token_ids.tolist()
    end = line.token_ids.tolist().index(line.token_ids[4]) + 1
    assert stopped.token_ids.tolist() == line.token_ids[:end].tolist()
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", int(line.token_ids[4]))


def test_prompts_that_cannot_be_served_are_refused_and_the_engine_lives(seen: Seen) -> None:
    kind, message = seen["too_long"]
    assert kind == "DataError" and message.startswith("the prompt has 256 tokens, allowed are 1 to 255")
    assert len(seen["longest"].token_ids) == 1 and seen["longest"].finish_reason == "length"
    assert seen["empty"][0] == seen["outside"][0] == "DataError" and "100000" in seen["outside"][1]
    assert seen["twice"][0] == "DataError" and "queued" in seen["twice"][1]


def test_an_aborted_request_returns_what_there_is(seen: Seen) -> None:
    queued, running = seen["aborted"]
    assert queued.finish_reason == running.finish_reason == "abort"
    assert len(queued.token_ids) == 0 and queued.prompt_token_ids.tolist() == LONG_PROMPT
    assert len(running.token_ids) == len(running.logprobs) == len(running.policy_versions) < 200


def test_status_counts(seen: Seen) -> None:
    status = seen["status"]
    assert (status["version"], status["swaps"]) == (2 + len(WAYS), 2 + len(WAYS))
    assert 2 <= status["swaps_in_flight"] <= status["swaps"]
    assert (status["aborted"], status["abort_requested"]) == (0, 2)
    assert status["generated_tokens"] > 40 * 25 and status["busy_s"] > 0 and len(status["swap_ms"]) == 1, "the last one"


def test_a_dying_engine_fails_every_request_with_the_cause(seen: Seen) -> None:
    assert len(seen["died"]) == CONFIG.max_num_seqs - 1
    for kind, message in (*seen["died"], seen["dead"]):
        assert kind == "EngineDied" and "division by zero" in message
