"""Steps: what is trained, by how much, and what does not change it."""

from __future__ import annotations

import dataclasses
import math
import resource
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from trainer_samples import forked, groups, sequence

from forge_async.errors import ConfigError, DataError, ForgeError
from forge_async.testing.models import ModelFactory
from forge_async.trainer.config import OptimizerConfig, TrainerConfig
from forge_async.trainer.engine import TrainerEngine
from forge_async.trainer.loss_config import CorrectionConfig, KLConfig, LossConfig

CONFIG = TrainerConfig(optimizer=OptimizerConfig(lr=1e-3))


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


def test_a_step_keeps_its_log_probs_before_the_update(tiny_llama: Path) -> None:
    engine = TrainerEngine(dataclasses.replace(CONFIG, micro_batch_tokens=40), tiny_llama)
    batch = groups()
    before = engine.logprobs(batch)
    engine.step(batch)
    chosen = [batch[0], batch[-1]]
    found = engine.token_logprobs([*(s.sequence_id for s in chosen), "another step's"])
    assert list(found) == [s.sequence_id for s in chosen]
    for each, expected in zip(chosen, (before[0], before[-1]), strict=True):
        np.testing.assert_allclose(found[each.sequence_id][each.loss_mask], expected[each.loss_mask], atol=1e-5)
        assert np.isnan(found[each.sequence_id][~each.loss_mask]).all()
    assert not np.allclose(engine.logprobs(batch)[0], before[0], atol=1e-4), "the weights have changed"
    trained = engine.step(batch[:2]).trained_tokens
    assert sum(len(kept) for _, kept in engine._last_rows) == trained, "those of one step only"


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
    first, second = engine.logprobs(ends)
    stats = engine.sft_step(ends)
    assert stats.trained_tokens == 3
    assert stats.loss == pytest.approx(-(first[2] + first[3] + second[3]) / 3, rel=1e-5)
    assert min(-first[3], -second[3]) > 0.1, "so that a token left out shows"


def test_the_gradient_is_the_one_a_step_applies_and_changes_nothing(tiny_llama: Path) -> None:
    engine = TrainerEngine(dataclasses.replace(CONFIG, max_grad_norm=1e9), tiny_llama)
    before = {name: value.clone() for name, value in engine.model.state_dict().items()}
    gradient = engine.gradient(groups())
    assert all(torch.equal(before[name], value) for name, value in engine.model.state_dict().items())
    assert engine.version == 0
    stats = engine.step(groups())
    squares = sum(float(tensor.double().square().sum()) for tensor in gradient.values())
    assert stats.grad_norm == pytest.approx(math.sqrt(squares), rel=1e-5)
    moments = engine.optimizers.optimizers[0].state
    for name, parameter in engine.model.named_parameters():  # after one step: (1 - beta) times the gradient
        torch.testing.assert_close(moments[parameter]["exp_avg"], 0.1 * gradient[name], atol=1e-7, rtol=1e-4)


def test_ten_tokens_on_one_rank_and_two_on_another_give_one_ranks_gradient(tiny_llama: Path) -> None:
    """What the ranks add up; that they do so in processes of their own is tested with the gradient check."""
    engine = TrainerEngine(CONFIG, tiny_llama)
    given = [sequence("a", [5, 6], list(range(7, 17))), sequence("b", [9], [8, 3], advantage=-2.0)]
    expected = engine.gradient(given)
    engine.data_ranks, found = 2, []
    for rank in (0, 1):
        engine.data_rank = rank
        assert sum(len(row.label) for row in engine._rows(given)) == (10, 2)[rank]
        found.append(engine.gradient(given))
    for name, whole in expected.items():
        torch.testing.assert_close(found[0][name] + found[1][name], whole, atol=1e-6, rtol=1e-4)


def test_what_a_step_reports_is_what_its_ratios_are(tiny_llama: Path) -> None:
    correction = CorrectionConfig(importance="mask", high=1.5)
    engine = TrainerEngine(dataclasses.replace(CONFIG, loss=LossConfig(correction=correction)), tiny_llama)
    random = np.random.default_rng(0)
    given, ratios, advantages = [], [], []
    for each, values in zip(groups(), engine.logprobs(groups()), strict=True):
        noise = random.normal(0, 0.5, len(values)).astype(np.float32)
        given.append(dataclasses.replace(each, logprobs=np.where(each.loss_mask, values - noise, 0)))
        ratios.append(np.exp(noise[each.loss_mask].astype(np.float64)))
        advantages.append(each.advantages[each.loss_mask])
    ratio, advantage = np.concatenate(ratios), np.concatenate(advantages)
    stats = engine.step(given)
    expected = {
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "effective_sample_size": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
        "clip_fraction_low": ((ratio < 0.8) & (advantage < 0)).mean(),
        "clip_fraction_high": ((ratio > 1.2) & (advantage > 0)).mean(),
        "masked_fraction": ((ratio < 0.5) | (ratio > 1.5)).mean(),
        "truncated_fraction": 0.0,
        "mismatch_kl_k1": -np.log(ratio).mean(),
        "mismatch_kl_k3": (ratio - 1 - np.log(ratio)).mean(),
        "reference_kl": 0.0,
    }
    for name, value in expected.items():
        assert getattr(stats, name) == pytest.approx(value, abs=2e-5), name
    assert min(stats.clip_fraction_low, stats.clip_fraction_high, stats.masked_fraction) > 0.05
    assert stats.clip_fraction == pytest.approx(stats.clip_fraction_low + stats.clip_fraction_high)


def test_a_recomputed_proximal_policy_is_that_of_the_steps_start(tiny_llama: Path) -> None:
    """Its ratio is 1, so that the gradient is the policy gradient's, weighted by what ``logprobs`` says before."""
    decoupled = LossConfig(correction=CorrectionConfig(proximal="recompute"))
    engine = TrainerEngine(dataclasses.replace(CONFIG, loss=decoupled), tiny_llama)
    random = np.random.default_rng(0)
    given, weighted = [], []
    for each, values in zip(groups(), engine.logprobs(groups()), strict=True):
        noise = random.normal(0, 1.0, len(values)).astype(np.float32)
        given.append(dataclasses.replace(each, logprobs=np.where(each.loss_mask, values - noise, 0)))
        weighted.append(dataclasses.replace(given[-1], advantages=each.advantages * np.exp(noise)))
    found = engine.gradient(given)
    plain = LossConfig(algorithm="policy_gradient", correction=CorrectionConfig(importance="none"))
    engine.config = dataclasses.replace(CONFIG, loss=plain)
    for name, expected in engine.gradient(weighted).items():
        torch.testing.assert_close(found[name], expected, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_penalty_is_taken_against_a_frozen_model(tiny_llama: Path, estimator: str) -> None:
    assert TrainerEngine(CONFIG, tiny_llama).reference is None
    penalty = LossConfig(kl=KLConfig(coefficient=0.5, estimator=estimator))
    engine = TrainerEngine(dataclasses.replace(CONFIG, loss=penalty), tiny_llama)
    start = engine.logprobs(groups())
    assert engine.step(groups()).reference_kl == pytest.approx(0.0, abs=1e-6)
    mask = np.concatenate([each.loss_mask for each in groups()])
    away = (np.concatenate(engine.logprobs(groups())) - np.concatenate(start))[mask]
    expected = away.mean() if estimator == "k1" else (np.expm1(-away) + away).mean()
    assert abs(expected) > 1e-4
    assert engine.step(groups()).reference_kl == pytest.approx(expected, rel=1e-2, abs=1e-5)


def test_a_penalty_keeps_the_policy_near_its_reference(tiny_llama: Path) -> None:
    distances = []
    for coefficient in (0.001, 3.0):
        penalty = LossConfig(kl=KLConfig(coefficient=coefficient))
        engine = TrainerEngine(dataclasses.replace(CONFIG, loss=penalty), tiny_llama)
        distances.append([engine.step(groups()).reference_kl for _ in range(8)][-1])
    assert distances[1] < 0.5 * distances[0]


def test_a_reference_with_another_vocabulary_is_named(tiny_model: ModelFactory) -> None:
    other = str(tiny_model(vocab_size=321))
    config = dataclasses.replace(CONFIG, loss=LossConfig(kl=KLConfig(coefficient=0.1, reference=other)))
    with pytest.raises(ConfigError, match=r"loss.kl.reference = .*: must be a model with the trained model's vocab"):
        TrainerEngine(config, tiny_model())


def test_a_forked_episode_weighs_as_one_in_a_step(tiny_llama: Path) -> None:
    """Two sequences of one episode against the other's one: under sequence_mean each episode is half of the loss."""
    config = dataclasses.replace(CONFIG, loss=LossConfig(aggregation="sequence_mean"))
    forks = [dataclasses.replace(sequence(f"a/{i}", [5, i + 6], [7]), episode_id="a") for i in range(2)]
    other = sequence("b", [9], [8, 10])
    given = [*forks, other]
    engine = TrainerEngine(config, tiny_llama)
    fresh = [
        dataclasses.replace(
            each, logprobs=np.where(each.loss_mask, values, 0).astype(np.float32), advantages=-each.advantages * k
        )
        for each, values, k in zip(given, engine.logprobs(given), (1, 3, 10), strict=True)
    ]
    assert engine.step(fresh).loss == pytest.approx(((1 + 3) / 2 + 10) / 2, rel=1e-4)


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


def test_a_checkpoint_that_cannot_be_written_is_an_error_and_leaves_the_one_before(
    tiny_llama: Path, tmp_path: Path
) -> None:
    engine = TrainerEngine(CONFIG, tiny_llama)
    (tmp_path / "taken").write_text("a file where the folder should be")
    with pytest.raises(ForgeError, match=r"the checkpoint .*version-0 could not be written: NotADirectoryError"):
        engine.save_checkpoint(tmp_path / "taken" / "version-0", {})
    folder = tmp_path / "version-0"
    engine.save_checkpoint(folder, {"saved": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most, more in (
        (100_000, ""),
        (50_000_000, "x" * 50_000_000),
    ):  # the shards, or only what comes last
        # As a full disk: its errors come while writing.
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        try:
            with pytest.raises(ForgeError, match=r"the checkpoint .*version-0 could not be written: .*File too large"):
                engine.save_checkpoint(folder, {"saved": 2, "more": more})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert engine.load_checkpoint(folder) == {"saved": 1}
    assert not engine.step(groups()).skipped
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["version-0"], "nothing else fills the disk"


def test_a_learning_rate_set_by_hand_counts_from_the_next_step_and_the_schedule_goes_on(
    tiny_llama: Path, tmp_path: Path
) -> None:
    config = dataclasses.replace(CONFIG, optimizer=OptimizerConfig(lr=1e-3, warmup_steps=2, decay="linear"))
    engine = TrainerEngine(config, tiny_llama, total_steps=6)
    assert engine.step(groups()).learning_rate == pytest.approx(0.5e-3)
    assert engine.set_learning_rate(1e-2) == pytest.approx(1e-2)
    before = {name: value.clone() for name, value in engine.model.state_dict().items()}
    assert engine.step(groups(seed=1)).learning_rate == pytest.approx(1e-2)
    moved = max(float((value - before[name]).abs().max()) for name, value in engine.model.state_dict().items())
    assert moved > 2e-3, "Adam moves by about the rate: it was applied, not only reported"
    assert engine.step(groups(seed=2)).learning_rate == pytest.approx(1e-2)
    assert engine.step(groups(seed=3)).learning_rate == pytest.approx(0.75e-2)
    engine.save_checkpoint(tmp_path / "version-4", {})
    resumed = TrainerEngine(config, tiny_llama, total_steps=6)
    resumed.load_checkpoint(tmp_path / "version-4")
    assert resumed.step(groups(seed=4)).learning_rate == pytest.approx(0.5e-3), "a resume goes by its own config"


def test_a_step_says_where_its_time_went(tiny_llama: Path) -> None:
    engine = TrainerEngine(dataclasses.replace(CONFIG, micro_batch_tokens=40), tiny_llama)
    noted: list[tuple[str, float, float]] = []
    engine.phases.note = lambda *span: noted.append(span)
    engine.logprobs(groups())
    assert not noted, "that is no step"
    waited = []
    engine.before_update = lambda: waited.append(time.sleep(0.05))
    began = time.monotonic()
    stats = engine.step(groups())
    parts = stats.phase_s
    assert set(parts) == {"data", "forward", "logprobs", "backward", "clip", "publish", "optimizer", "other"}
    assert sum(parts.values()) == pytest.approx(stats.wall_s, abs=0.01)
    assert 0.05 <= parts["publish"] < 0.2 and min(parts.values()) > 0
    rows = sum(name == "logprobs" for name, _, _ in noted)
    assert rows == len(engine._rows(groups())) > 1
    assert all(a[2] <= b[1] + 1e-9 for a, b in pairwise(noted)), "one after the other, none within another"
    assert began <= noted[0][1] and noted[-1][2] <= time.monotonic()
    supervised = engine.sft_step(groups()).phase_s
    assert supervised["forward"] > 0 and "reference" not in supervised
    penalty = dataclasses.replace(CONFIG, loss=LossConfig(kl=KLConfig(coefficient=0.1)))
    assert TrainerEngine(penalty, tiny_llama).step(groups()).phase_s["reference"] > 0


def test_a_step_says_what_sharing_saves(tiny_llama: Path) -> None:
    engine = TrainerEngine(CONFIG, tiny_llama)
    stats = engine.step(forked())
    whole = sum(len(each.token_ids) - 1 for each in forked())
    assert stats.prefix_sharing == pytest.approx(whole / stats.total_tokens)
    assert stats.prefix_sharing > 1.5 and stats.padding_fraction == 0
    engine.config = dataclasses.replace(CONFIG, share_prompts=False)
    assert engine.step(forked()).prefix_sharing == 1.0


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_activation_checkpointing_changes_no_gradient_and_no_name(tiny_llama: Path, tmp_path: Path, kind: str) -> None:
    plain = TrainerEngine(CONFIG, tiny_llama)
    saving = TrainerEngine(dataclasses.replace(CONFIG, activation_checkpointing=kind), tiny_llama)
    expected, found = plain.gradient(forked()), saving.gradient(forked())
    assert expected.keys() == found.keys()
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, atol=1e-7, rtol=1e-5)
    saving.step(groups())
    assert [s.name for s in saving.hf_shards()] == [s.name for s in plain.hf_shards()]
    saving.save_checkpoint(tmp_path / "ck", {})
    plain.load_checkpoint(tmp_path / "ck")
    for a, b in zip(plain.logprobs(groups()), saving.logprobs(groups()), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_compiled_layers_compute_the_same_gradient_under_the_same_names(
    tiny_model: ModelFactory, tmp_path: Path
) -> None:
    model = tiny_model(num_hidden_layers=1)  # compiling takes the time of it
    plain, compiled = (TrainerEngine(dataclasses.replace(CONFIG, compile=on), model) for on in (False, True))
    graphs = []
    for sequences in (forked(), groups()):  # rows of 123 and 93 tokens
        expected, found = plain.gradient(sequences), compiled.gradient(sequences)
        assert expected.keys() == found.keys()
        for name, wanted in expected.items():
            torch.testing.assert_close(found[name], wanted, atol=1e-6, rtol=1e-4)
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] == graphs[1], "another length is not compiled again"
    assert [s.name for s in compiled.hf_shards()] == [s.name for s in plain.hf_shards()]
    compiled.save_checkpoint(tmp_path / "ck", {})
    plain.load_checkpoint(tmp_path / "ck")


def test_flex_attention_sees_the_same_tree(tiny_llama: Path) -> None:
    """Its forward pass alone: it has no other on a CPU. The device is left open, as a run would on a GPU."""
    expected = TrainerEngine(CONFIG, tiny_llama).logprobs(forked())
    flex = TrainerEngine(dataclasses.replace(CONFIG, attention="flex"), tiny_llama)
    for got, wanted in zip(flex.logprobs(forked()), expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert (TrainerConfig().attention_on("cuda"), TrainerConfig().attention_on("cpu")) == ("flex", "segments")
    with pytest.raises(ConfigError, match="attention = 'flex': must be segments or auto with device cpu"):
        TrainerConfig(attention="flex", device="cpu")


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
