"""Log-probs over the kept ids, against their definition: a loop over tokens and a softmax over a short list."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_samples import groups, masked

from forge_async.trainer.config import TrainerConfig
from forge_async.trainer.engine import TrainerEngine
from forge_async.trainer.logprobs import KeptIds, Predictions, selected_logprobs
from forge_async.types import SamplingMask

COUNT, WIDTH, VOCABULARY = 23, 16, 320


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, SamplingMask]:
    """Hidden states, weight, labels, inverse temperatures and a mask; every fifth token has the whole vocabulary."""
    random = np.random.default_rng(0)
    torch.manual_seed(0)
    hidden_KD = torch.randn(COUNT, WIDTH, requires_grad=True)
    weight_VD = torch.randn(VOCABULARY, WIDTH).mul(0.3).requires_grad_()
    label_K = torch.from_numpy(random.integers(0, VOCABULARY, COUNT))
    inverse_K = torch.from_numpy(random.uniform(0.5, 2.0, COUNT).astype(np.float32))
    parts: list[list[int]] = []
    for k in range(COUNT):
        others = random.permutation(np.delete(np.arange(VOCABULARY), label_K[k]))[: random.integers(0, 20)]
        parts.append([] if k % 5 == 4 else [int(label_K[k]), *others.tolist()])
    counts = np.array([len(part) for part in parts], dtype=np.int32)
    return hidden_KD, weight_VD, label_K, inverse_K, SamplingMask(np.concatenate(parts).astype(np.int32), counts)


def naive(hidden_KD, weight_VD, label_K, inverse_K, mask: SamplingMask) -> torch.Tensor:
    """float64 [2, K]: for each token the softmax of its kept ids' scaled logits, and its entropy."""
    columns, ends = [], np.cumsum(mask.counts)
    for k in range(COUNT):
        ids = mask.token_ids[ends[k] - mask.counts[k] : ends[k]].tolist() or list(range(VOCABULARY))
        logits = (weight_VD.double()[ids] @ hidden_KD.double()[k]) * inverse_K[k].double()
        logprobs = logits.log_softmax(-1)
        columns.append(torch.stack([logprobs[ids.index(int(label_K[k]))], -(logprobs.exp() * logprobs).sum()]))
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("chunk", [1, 4, 7, COUNT])
def test_masked_logprobs_equal_a_naive_softmax_over_the_kept_ids_for_every_chunk(chunk: int) -> None:
    hidden_KD, weight_VD, label_K, inverse_K, mask = problem()
    predictions = Predictions(label_K, label_K, inverse_K, KeptIds.on(torch.device("cpu"), mask), chunk)
    coefficient_K = torch.linspace(-1, 1, COUNT)
    expected = naive(hidden_KD, weight_VD, label_K, inverse_K, mask)
    wanted = torch.autograd.grad((expected[0] * coefficient_K).sum(), (hidden_KD, weight_VD))
    actual = selected_logprobs(hidden_KD, weight_VD, predictions)
    torch.testing.assert_close(actual.double(), expected, atol=1e-6, rtol=1e-6)
    (actual[0] * coefficient_K).sum().backward()
    torch.testing.assert_close(hidden_KD.grad, wanted[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weight_VD.grad, wanted[1], atol=1e-5, rtol=1e-5)


def test_a_single_kept_id_has_logprob_zero_and_no_gradient() -> None:
    hidden_KD, weight_VD, label_K, inverse_K, _ = problem()
    mask = SamplingMask(label_K.numpy().astype(np.int32), np.ones(COUNT, dtype=np.int32))
    predictions = Predictions(label_K, label_K, inverse_K, KeptIds.on(torch.device("cpu"), mask), 5)
    values = selected_logprobs(hidden_KD, weight_VD, predictions)
    values[0].sum().backward()
    assert hidden_KD.grad is not None and hidden_KD.grad.abs().max() < 1e-6
    assert values.abs().max() < 1e-6


def test_masked_logprobs_do_not_depend_on_packing_or_chunks(tiny_llama: Path) -> None:
    """Alone, packed with others, in rows of a few tokens, in chunks of three: the same to 1e-6 where rows are alike."""
    config = TrainerConfig()
    engine = TrainerEngine(config, tiny_llama)
    sequences = masked(groups())
    expected = [engine.logprobs([one])[0] for one in sequences]
    unmasked = engine.logprobs([replace(one, sampling_mask=None) for one in sequences])
    assert max(np.abs(a - b).max() for a, b in zip(expected, unmasked, strict=True)) > 1
    for change in ({}, {"micro_batch_tokens": 16}, {"logprob_chunk": 3}, {"share_prompts": False}):
        engine.config = replace(config, **change)
        for got, wanted in zip(engine.logprobs(sequences), expected, strict=True):
            np.testing.assert_allclose(got, wanted, atol=5e-6)
