"""Log-probs over the kept ids, against their definition: a loop over tokens and a softmax over a short list."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer_samples import DoubleTrainer, groups, masked

from forge_async.trainer import logprobs
from forge_async.trainer.config import TrainerConfig
from forge_async.trainer.engine import TrainerEngine
from forge_async.trainer.logprobs import KeptIds, Predictions, selected_logprobs
from forge_async.types import SamplingMask, TrainingSequence

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


def test_of_a_bfloat16_model_the_logits_are_not_rounded_and_the_gradient_once() -> None:
    """Each prediction in a chunk of its own, so that the projection's gradient is a sum of 23."""
    hidden_KD, weight_VD, label_K, inverse_K, mask = problem()
    exact = [x.detach().bfloat16().double().requires_grad_() for x in (hidden_KD, weight_VD)]
    rounded = [x.detach().bfloat16().requires_grad_() for x in (hidden_KD, weight_VD)]
    coefficient_K = torch.linspace(-1, 1, COUNT)
    expected = naive(*exact, label_K, inverse_K, mask)
    wanted = torch.autograd.grad((expected[0] * coefficient_K).sum(), exact)
    predictions = Predictions(label_K, label_K, inverse_K, KeptIds.on(torch.device("cpu"), mask), 1)
    actual = selected_logprobs(*rounded, predictions)
    torch.testing.assert_close(actual.double(), expected, atol=1e-6, rtol=1e-6)
    found = torch.autograd.grad((actual[0] * coefficient_K).sum(), rounded)
    for got, value in zip(found, wanted, strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), value, atol=1e-6, rtol=2**-8)


def test_recorded_ids_decide_where_logits_tie_at_the_cut() -> None:
    """In bfloat16 neighbours tie often. Which of them the sampler kept is a fact of its own, not of the logits."""
    hidden_KD = torch.ones(3, 8, dtype=torch.bfloat16)
    weight_VD = torch.zeros(6, 8, dtype=torch.bfloat16)
    weight_VD[0] += 0.5  # logit 4; ids 1 to 4 tie at 2, id 5 has 0
    weight_VD[1:5] += 0.25 * (1 + 1e-3 * torch.arange(4))[:, None]  # no difference is left in bfloat16
    mask = SamplingMask(np.array([0, 2, 0, 4, 3, 0, 1, 2, 3, 4], np.int32), np.array([2, 3, 5], np.int32))
    labels, ones = torch.tensor([2, 3, 1]), torch.ones(3)
    kept = KeptIds.on(torch.device("cpu"), mask)
    found = selected_logprobs(hidden_KD, weight_VD, Predictions(labels, labels, ones, kept))[0]
    expected = [-math.log1p(math.exp(2)), *(-math.log(count + math.exp(2)) for count in (2, 4))]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    gone = Predictions(labels[:1] + 1, labels[:1] + 1, ones[:1], kept.part(0, 1))
    assert selected_logprobs(hidden_KD[:1], weight_VD, gone)[0].item() == -math.inf, "id 3 ties with 2: not kept"


class MostLogits(TorchDispatchMode):
    """The most rows of the vocabulary's width that any operation makes."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            if isinstance(value, torch.Tensor) and value.ndim == 2 and value.shape[1] in (VOCABULARY, VOCABULARY + 1):
                self.rows = max(self.rows, value.shape[0] if value.shape[0] != WIDTH else 0)  # that is the projection
        return made


def test_logits_of_more_than_a_chunk_are_never_computed_at_once() -> None:
    hidden_KD, weight_VD, label_K, inverse_K, mask = problem()
    predictions = Predictions(label_K, label_K, inverse_K, KeptIds.on(torch.device("cpu"), mask), 4)
    with MostLogits() as most:
        selected_logprobs(hidden_KD, weight_VD, predictions)[0].sum().backward()
    assert most.rows == 4


@pytest.mark.parametrize(("held_chunks", "computed"), [(0, 12), (2, 10), (6, 6)])
def test_the_softmax_is_kept_for_the_backward_pass_up_to_a_bound(
    held_chunks: int, computed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six chunks. What is kept is not computed again, and no gradient depends on it."""
    hidden_KD, weight_VD, label_K, inverse_K, mask = problem()
    kept = KeptIds.on(torch.device("cpu"), mask)
    plain = Predictions(label_K, label_K, inverse_K, kept, COUNT)
    wanted = torch.autograd.grad(selected_logprobs(hidden_KD, weight_VD, plain)[0].sum(), (hidden_KD, weight_VD))
    calls: list[int] = []
    inner = logprobs._exponentials
    monkeypatch.setattr(logprobs, "_exponentials", lambda *args: (calls.append(args[-2]), inner(*args))[1])
    bounded = replace(plain, chunk_size=4, held_bytes=4 * 4 * VOCABULARY * held_chunks)
    values = selected_logprobs(hidden_KD, weight_VD, bounded)
    found = torch.autograd.grad(values[0].sum(), (hidden_KD, weight_VD))
    assert len(calls) == computed
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected)
    with torch.no_grad():
        assert not selected_logprobs(hidden_KD, weight_VD, bounded).requires_grad


def test_a_label_that_was_not_kept_adds_no_gradient_of_its_own() -> None:
    """Its log-prob is minus infinity, whatever its logit; what the others lose is that of the softmax over the kept."""
    hidden_KD, weight_VD = torch.randn(1, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    kept = KeptIds.on(torch.device("cpu"), SamplingMask(np.array([0, 2], np.int32), np.array([2], np.int32)))
    label = torch.tensor([3])
    found = selected_logprobs(hidden_KD, weight_VD, Predictions(label, label, torch.ones(1), kept))
    assert found[0].item() == -math.inf and math.isfinite(found[1].item())
    found[0].sum().backward()
    assert weight_VD.grad is not None and torch.equal(weight_VD.grad[[1, 3, 4]], torch.zeros(3, 4))


def test_a_single_kept_id_has_logprob_zero_and_no_gradient() -> None:
    hidden_KD, weight_VD, label_K, inverse_K, _ = problem()
    mask = SamplingMask(label_K.numpy().astype(np.int32), np.ones(COUNT, dtype=np.int32))
    predictions = Predictions(label_K, label_K, inverse_K, KeptIds.on(torch.device("cpu"), mask), 5)
    values = selected_logprobs(hidden_KD, weight_VD, predictions)
    values[0].sum().backward()
    assert hidden_KD.grad is not None and hidden_KD.grad.abs().max() < 1e-6
    assert values.abs().max() < 1e-6


PACKINGS: tuple[dict[str, Any], ...] = ({}, {"micro_batch_tokens": 16}, {"logprob_chunk": 3}, {"share_prompts": False})


def exact_logprobs(engine: TrainerEngine, sequences: list[TrainingSequence]) -> list[np.ndarray]:
    """``engine.logprobs``, float64."""
    found = [np.zeros(len(one.token_ids)) for one in sequences]
    for row in engine._rows(sequences, every_token=True):
        with torch.no_grad():
            values_K = engine._forward(row)[0].double().numpy()
        for value, index, token in zip(values_K, row.sequence_index, row.token_index, strict=True):
            found[index][token] = value
    return found


@pytest.mark.parametrize(
    ("trainer", "absolute", "relative"), [(DoubleTrainer, 1e-9, 0.0), (TrainerEngine, 1e-6, 1e-6)], ids=["exact", "f32"]
)
def test_masked_logprobs_do_not_depend_on_packing_or_chunks(
    tiny_llama: Path, trainer: type[TrainerEngine], absolute: float, relative: float
) -> None:
    """Alone, packed with others, in rows of a few tokens, in chunks of three: the same up to the last bits."""
    engine = trainer(TrainerConfig(), tiny_llama)
    sequences = masked(groups())
    expected = [exact_logprobs(engine, [one])[0] for one in sequences]
    unmasked = exact_logprobs(engine, [replace(one, sampling_mask=None) for one in sequences])
    assert max(np.abs(a - b).max() for a, b in zip(expected, unmasked, strict=True)) > 1
    for change in PACKINGS:
        engine.config = replace(TrainerConfig(), **change)
        for got, wanted in zip(exact_logprobs(engine, sequences), expected, strict=True):
            np.testing.assert_allclose(got, wanted, atol=absolute, rtol=relative)
