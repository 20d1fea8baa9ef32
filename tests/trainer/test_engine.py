"""Steps: what is trained, by how much, and what does not change it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_samples import groups, sequence

from forge_async.errors import ConfigError, DataError, ForgeError
from forge_async.trainer.config import OptimizerConfig, TrainerConfig
from forge_async.trainer.engine import TrainerEngine

CONFIG = TrainerConfig(optimizer=OptimizerConfig(lr=1e-3))


def gradient_after(folder: Path, config: TrainerConfig, sequences: list) -> torch.Tensor:
    """The first AdamW moment after one unclipped step is (1 - beta) times the gradient."""
    engine = TrainerEngine(dataclasses.replace(config, max_grad_norm=1e9), folder)
    engine.step(sequences)
    states = engine.optimizers.optimizers[0].state
    return torch.cat([states[p]["exp_avg"].flatten() for p in engine.model.parameters()]) / 0.1


def test_unchanged_weights_give_ratio_one(tiny_llama: Path) -> None:
    engine = TrainerEngine(CONFIG, tiny_llama)
    for temperature in (1.0, 0.7):
        fresh = [dataclasses.replace(s, temperature=temperature) for s in groups()]
        own = [
            dataclasses.replace(s, logprobs=np.where(s.loss_mask, values, 0).astype(np.float32))
            for s, values in zip(fresh, engine.logprobs(fresh), strict=True)
        ]
        engine.config = dataclasses.replace(CONFIG, micro_batch_tokens=40)
        stats = engine.step(own)
        assert stats.ratio_mean == pytest.approx(1.0, abs=1e-5)
        assert stats.ratio_max == pytest.approx(1.0, abs=1e-4)
        assert stats.clip_fraction == 0.0


def test_the_loss_is_the_mean_over_all_tokens_and_the_version_counts_steps(tiny_llama: Path) -> None:
    engine = TrainerEngine(CONFIG, tiny_llama)
    sequences = [sequence("a", [5, 6], [7, 3]), sequence("b", [9], [8])]
    logprobs = engine.logprobs(sequences)
    expected = -(logprobs[0][2] + logprobs[0][3] + logprobs[1][1]) / 3
    stats = engine.sft_step(sequences)
    assert stats.loss == pytest.approx(expected, rel=1e-5)
    assert (stats.version, stats.trained_tokens, stats.skipped) == (1, 3, False)
    assert engine.sft_step(sequences).loss < stats.loss


def test_the_sampled_end_token_is_trained_even_where_it_is_the_padding_token(tiny_llama: Path) -> None:
    engine = TrainerEngine(CONFIG, tiny_llama)
    ends = [sequence("a", [5, 6], [7, 0]), sequence("b", [5, 6, 8], [0])]
    assert engine.sft_step(ends).trained_tokens == 3


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_gradient_depends_on_neither_packing_nor_order(tiny_model, family: str) -> None:
    folder = tiny_model(family, tied=False)
    sequences = groups()
    expected = gradient_after(folder, CONFIG, sequences)
    assert expected.abs().max() > 1e-4
    for config, given in (
        (dataclasses.replace(CONFIG, micro_batch_tokens=16), sequences),
        (dataclasses.replace(CONFIG, micro_batch_tokens=45, logprob_chunk=3), sequences[::-1]),
        (dataclasses.replace(CONFIG, share_prompts=False), sequences),
    ):
        actual = gradient_after(folder, config, given)
        torch.testing.assert_close(actual, expected, atol=2e-6 * float(expected.abs().max()) + 1e-7, rtol=1e-3)


def test_an_empty_loss_mask_takes_no_step(tiny_llama: Path) -> None:
    engine = TrainerEngine(CONFIG, tiny_llama)
    before = {name: value.clone() for name, value in engine.model.state_dict().items()}
    nothing = dataclasses.replace(sequence("a", [5], [6]), loss_mask=np.zeros(2, dtype=bool))
    unusable = sequence("b", [5], [6], logprobs=[math.nan])
    for sequences, nonfinite in (([], 0), ([nothing], 0), ([nothing, unusable], 1)):
        stats = engine.step(sequences)
        assert (stats.skipped, stats.version, stats.nonfinite_tokens) == (True, 0, nonfinite)
    assert all(torch.equal(before[name], value) for name, value in engine.model.state_dict().items())


def test_tokens_without_behaviour_logprob_are_counted_apart(tiny_llama: Path) -> None:
    engine = TrainerEngine(CONFIG, tiny_llama)
    stats = engine.step([sequence("a", [5], [6, 7, 8], logprobs=[-1.0, math.nan, -math.inf])])
    assert (stats.trained_tokens, stats.nonfinite_tokens) == (1, 2)
    assert math.isfinite(stats.loss)


def test_a_sequence_longer_than_the_rotary_table_is_named(tiny_llama: Path) -> None:
    engine = TrainerEngine(dataclasses.replace(CONFIG, max_sequence_tokens=8), tiny_llama)
    with pytest.raises(DataError, match="long: 9 tokens.*at most 8"):
        engine.step([sequence("long", [5] * 8, [6])])


def test_a_resumed_trainer_goes_on_as_if_never_stopped(tiny_llama: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, optimizer=OptimizerConfig(lr=1e-3, warmup_steps=2, decay="linear"))
    straight = TrainerEngine(config, tiny_llama, total_steps=6)
    for seed in range(2):
        straight.step(groups(seed=seed))
    straight.save_checkpoint(tmp_path / "ck", {"data": [1, "ü"]})
    resumed = TrainerEngine(config, tiny_llama, total_steps=6)
    assert resumed.load_checkpoint(tmp_path / "ck") == {"data": [1, "ü"]}
    for seed in range(2, 4):
        wanted, got = straight.step(groups(seed=seed)), resumed.step(groups(seed=seed))
        assert dataclasses.replace(wanted, wall_s=0) == dataclasses.replace(got, wall_s=0)
    assert got.version == 4


def test_a_resume_takes_its_own_settings_and_refuses_another_model(tiny_model, tmp_path: Path) -> None:
    first = TrainerEngine(CONFIG, tiny_model())
    first.step(groups())
    first.save_checkpoint(tmp_path / "ck", {})
    changed = OptimizerConfig(lr=5e-4, weight_decay=0.1, betas=[0.8, 0.9], eps=1e-6)
    resumed = TrainerEngine(dataclasses.replace(CONFIG, optimizer=changed), tiny_model())
    resumed.load_checkpoint(tmp_path / "ck")
    (group,) = resumed.optimizers.optimizers[0].param_groups
    assert (group["lr"], group["weight_decay"], group["betas"], group["eps"]) == (5e-4, 0.1, (0.8, 0.9), 1e-6)
    assert resumed.step(groups(seed=1)).learning_rate == 5e-4
    other = TrainerEngine(CONFIG, tiny_model(hidden_size=96, num_attention_heads=3, num_key_value_heads=3))
    with pytest.raises(ForgeError, match=r"the checkpoint .*ck does not fit this model: Size mismatch"):
        other.load_checkpoint(tmp_path / "ck")


def test_the_learning_rate_follows_its_schedule() -> None:
    linear = OptimizerConfig(lr=1.0, warmup_steps=2, decay="linear", min_lr_factor=0.2)
    assert [linear.factor(step, 6) for step in (0, 1, 2, 4, 6, 99)] == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2, 0.2])
    cosine = OptimizerConfig(lr=1.0, decay="cosine")
    assert [cosine.factor(step, 4) for step in (0, 2, 4)] == pytest.approx([1.0, 0.5, 0.0])
    assert OptimizerConfig(lr=1.0).factor(10**6, 1) == 1.0


def test_settings_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match="dtype"):
        TrainerConfig(dtype="float16")
    with pytest.raises(ConfigError, match="decay"):
        OptimizerConfig(decay="exponential")
