"""The gradient test passes on what is right and fails on what is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from trainer_samples import DoubleTrainer, forked, masked, sequence

from forge_async.errors import ForgeError
from forge_async.testing.models import ModelFactory
from forge_async.trainer.config import TrainerConfig
from forge_async.trainer.engine import TrainerEngine
from forge_async.trainer.gradient_check import GradientCheck, gradient_check, spread_over
from forge_async.trainer.loss import LossSums, PolicyTokens, policy_loss
from forge_async.trainer.loss_config import CorrectionConfig, KLConfig, LossConfig, LossParts
from forge_async.trainer.segments import ancestors
from tests.trainer.faulty_trainers import NextLabels, ShiftedLabels

CONFIG = TrainerConfig(micro_batch_tokens=64, logprob_chunk=16)


def failed(result: GradientCheck) -> set[str]:
    return {name for name, value in result.deviations.items() if not value <= result.tolerance}


@pytest.mark.parametrize(
    "loss",
    [
        LossConfig(),
        LossConfig(algorithm="gspo", clip_low=0.1, clip_high=0.1, kl=KLConfig(coefficient=0.1)),
        LossConfig(algorithm="dr_grpo", correction=CorrectionConfig(proximal="interpolate", importance="truncate")),
        LossConfig(algorithm="rloo", correction=CorrectionConfig(level="sequence"), aggregation="sequence_mean"),
        LossConfig(algorithm="cispo", correction=CorrectionConfig(importance="mask", level="sequence", low=0.2)),
        LossConfig(algorithm="dapo"),
        LossConfig(algorithm="reinforce_pp"),
        LossConfig(algorithm="policy_gradient"),
    ],
    ids=lambda loss: loss.algorithm,
)
@pytest.mark.parametrize(("engine", "tolerance"), [(DoubleTrainer, 1e-6), (TrainerEngine, 1e-5)], ids=["exact", "f32"])
def test_every_split_and_packing_gives_the_same_gradient(
    tiny_llama: Path, loss: LossConfig, engine: type[TrainerEngine], tolerance: float
) -> None:
    """``exact``: float64 but for torchtitan's rotary embedding, which rounds to float32, about 5e-8 of a gradient."""
    config = dataclasses.replace(CONFIG, loss=loss)
    result = gradient_check(config, tiny_llama, engine=engine, processes=1, tolerance=tolerance)
    assert result.passed, str(result)
    assert set(result.deviations) == {"one_by_one", "micro_batches", "packing", "row_order"}
    assert result.tokens > 50


def test_forks_in_float32_keep_to_its_own_rounding(tiny_llama: Path) -> None:
    result = gradient_check(CONFIG, tiny_llama, forked(), processes=1, tolerance=1e-5)
    assert result.passed, str(result)


@pytest.mark.parametrize("algorithm", ["grpo", "gspo"])
def test_a_tree_of_shared_prefixes_changes_no_gradient(tiny_llama: Path, algorithm: str) -> None:
    """Forks of episodes, turns trained in several sequences with their own advantages, sampling masks, temperatures."""
    loss = LossConfig(algorithm=algorithm, kl=KLConfig(coefficient=0.1), aggregation="sequence_mean")
    config = dataclasses.replace(CONFIG, loss=loss)
    result = gradient_check(config, tiny_llama, masked(forked()), engine=DoubleTrainer, processes=1, tolerance=1e-6)
    assert result.passed, str(result)


def test_a_tree_saves_what_it_shares(tiny_llama: Path) -> None:
    engine = TrainerEngine(dataclasses.replace(CONFIG, micro_batch_tokens=4096), tiny_llama)
    (row,) = engine._rows(forked())
    depths = {len(ancestors(row.segments, index)) for index in range(len(row.segments))}
    assert depths == {0, 1, 2, 3}
    assert row.whole_tokens == sum(len(s.token_ids) - 1 for s in forked())
    assert row.tokens < 0.6 * row.whole_tokens


def test_a_mixture_of_experts_does_so_too(tiny_qwen3_moe: Path) -> None:
    result = gradient_check(CONFIG, tiny_qwen3_moe, processes=1)
    assert result.passed, str(result)


def test_mixed_precision_is_held_to_its_own_rounding_and_leaves_no_group(tiny_llama: Path) -> None:
    """PyTorch's bfloat16 kernels for AVX-512 round so much more that a token at the edge of a clip changes sides."""
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    for algorithm in ("grpo", "policy_gradient"):
        result = gradient_check(
            dataclasses.replace(config, loss=LossConfig(algorithm=algorithm)), tiny_llama, processes=1
        )
        edges = algorithm == "grpo" and torch.backends.cpu.get_cpu_capability() == "AVX512"
        assert result.passed, str(result)
        assert 1e-4 < max(result.deviations.values()) < (result.tolerance if edges else 0.02), str(result)
    assert not dist.is_initialized()


def per_row_mean(tokens: PolicyTokens, parts: LossParts) -> LossSums:
    """The mean of each row in place of the sum: a denominator per micro-batch."""
    sums = policy_loss(tokens, parts)
    return dataclasses.replace(sums, loss=sums.loss / max(1, len(tokens.logprob_K)))


@pytest.mark.timeout(180)
def test_processes_agree(tiny_model: ModelFactory) -> None:
    folder = tiny_model("qwen3", tied=True)
    result = gradient_check(dataclasses.replace(CONFIG, loss=LossConfig(kl=KLConfig(coefficient=0.1))), folder)
    assert result.passed, str(result)
    assert "processes" in result.deviations


def test_more_processes_than_cuda_devices_run_on_the_cpu_whatever_the_attention() -> None:
    for config in (TrainerConfig(attention="flex"), TrainerConfig(attention="varlen", dtype="bfloat16", device="cuda")):
        spread = spread_over(config, 2, cuda_devices=1)
        assert (spread.procs, spread.device, spread.attention) == (2, "cpu", "auto")
        spread = spread_over(config, 2, cuda_devices=2)
        assert (spread.procs, spread.device, spread.attention) == (2, config.device, config.attention)


def test_labels_shifted_by_one_are_found(tiny_llama: Path) -> None:
    assert "one_by_one" in failed(gradient_check(CONFIG, tiny_llama, engine=ShiftedLabels, processes=1))
    result = gradient_check(CONFIG, tiny_llama, engine=NextLabels, processes=1)
    assert failed(result) == {"one_by_one"}  # no packing shows it


def test_a_denominator_per_micro_batch_is_found(tiny_llama: Path) -> None:
    assert "micro_batches" in failed(gradient_check(CONFIG, tiny_llama, loss=per_row_mean, processes=1))


def test_nothing_to_compare_is_an_error(tiny_llama: Path) -> None:
    unusable = [sequence("a", [5], [6], logprobs=[float("nan")])]
    with pytest.raises(ForgeError, match="no token"):
        gradient_check(CONFIG, tiny_llama, unusable, processes=1)
