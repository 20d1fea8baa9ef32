"""The losses against examples worked out by hand and against token-by-token ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from naive_loss import ALGORITHMS, Sample, corrected
from trainer_samples import sequence

from forge_async.errors import ConfigError
from forge_async.trainer.aggregation import loss_weights
from forge_async.trainer.loss import METRICS, LossSums, PolicyTokens, cross_entropy_loss, policy_loss
from forge_async.trainer.loss_config import CorrectionConfig, KLConfig, LossConfig

CONFIG = LossConfig(clip_low=0.2, clip_high=0.3, max_ratio=5.0)


def run(
    logprob: list[float],
    behaviour: list[float],
    advantage: list[float],
    config: LossConfig = CONFIG,
    index: list[int] | None = None,
    reference: list[float] | None = None,
    staleness: list[float] | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[LossSums, list[float]]:
    """The loss with weights of 1, and its gradient; one sequence unless ``index`` says otherwise."""

    def values(given: list[float]) -> torch.Tensor:
        return torch.tensor(given, dtype=dtype)

    current = values(logprob).requires_grad_()
    places = index or [0] * len(logprob)
    sums = policy_loss(
        PolicyTokens(
            logprob_K=current,
            entropy_K=torch.ones_like(current).detach(),
            behaviour_K=values(behaviour),
            advantage_K=values(advantage),
            weight_K=torch.ones_like(current).detach(),
            staleness_K=values(staleness or [1.0] * len(logprob)),
            index_K=torch.tensor(places, dtype=torch.int64),
            sequences=len(set(places)),
            reference_K=None if reference is None else values(reference),
        ),
        config.resolved(),
    )
    sums.loss.backward()
    assert current.grad is not None
    return sums, current.grad.tolist()


def total(sums: LossSums, name: str) -> float:
    return float(sums.totals[METRICS.index(name)])


# -- by hand -------------------------------------------------------------------------------------------------------


def test_ratio_one_is_plain_policy_gradient() -> None:
    sums, grad = run([-1.0, -2.0], [-1.0, -2.0], [2.0, -1.0])
    assert float(sums.loss.detach()) == pytest.approx(-1.0)
    assert grad == pytest.approx([-2.0, 1.0])  # d(-r A)/d logp = -r A
    assert float(sums.ratio_max) == 1.0
    assert [total(sums, name) for name in ("ratio", "ratio_squared", "entropy")] == [2.0, 2.0, 2.0]
    assert [total(sums, name) for name in ("clipped_low", "clipped_high", "mismatch_k1", "mismatch_k3")] == [0.0] * 4


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "gradient", "clipped"),
    [
        (1.5, 1.0, 1.3, 0.0, (0, 1)),  # above the clip, better than average: stopped
        (1.5, -1.0, -1.5, 1.5, (0, 0)),  # above the clip, worse: still pushed down
        (0.5, 1.0, 0.5, -0.5, (0, 0)),  # below the clip, better: still pushed up
        (0.5, -1.0, -0.8, 0.0, (1, 0)),  # below the clip, worse: stopped
        (8.0, -1.0, -5.0, 0.0, (0, 0)),  # dual clip at max_ratio
    ],
)
def test_clipping_by_hand(
    ratio: float, advantage: float, surrogate: float, gradient: float, clipped: tuple[int, int]
) -> None:
    sums, grad = run([-1.0], [-1.0 - math.log(ratio)], [advantage])
    assert float(sums.loss.detach()) == pytest.approx(-surrogate)
    assert grad == pytest.approx([gradient])
    assert (total(sums, "clipped_low"), total(sums, "clipped_high")) == clipped


def test_gspo_by_hand() -> None:
    # Log-ratios 0.4 and 0: the sequence's ratio is exp(0.2), not clipped at clip_high 0.5; two tokens of A = 1.
    sums, grad = run([-1.0, -2.0], [-1.4, -2.0], [1.0, 1.0], LossConfig(algorithm="gspo", clip_high=0.5))
    assert float(sums.loss.detach()) == pytest.approx(-2 * math.exp(0.2))
    assert grad == pytest.approx([-math.exp(0.2)] * 2)  # each of the two terms has half the gradient of each log-prob
    sums, grad = run([-1.0, -2.0], [-1.4, -2.0], [1.0, 1.0], LossConfig(algorithm="gspo"))
    assert float(sums.loss.detach()) == pytest.approx(-2 * 1.0004)
    assert grad == [0.0, 0.0]
    assert total(sums, "clipped_high") == 2.0


def test_cispo_by_hand() -> None:
    # Ratios 2 and 8, bounded at 5; the gradient is -bounded ratio x A, also where it is bounded.
    sums, grad = run([-1.0, -1.0], [-1 - math.log(2), -1 - math.log(8)], [1.0, -1.0], LossConfig(algorithm="cispo"))
    assert float(sums.loss.detach()) == pytest.approx(2.0 - 5.0)
    assert grad == pytest.approx([-2.0, 5.0])
    assert total(sums, "clipped_high") == 1.0


def test_policy_gradient_by_hand() -> None:
    behaviour = [-2 - math.log(1.5), -2 - math.log(3)]
    sums, grad = run([-2.0, -2.0], behaviour, [1.0, 1.0], LossConfig(algorithm="policy_gradient"))
    assert float(sums.loss.detach()) == pytest.approx(2 * 1.5 + 2 * 2.0)  # weights min(r, 2)
    assert grad == pytest.approx([-1.5, -2.0])
    assert total(sums, "truncated") == 1.0
    plain = LossConfig(algorithm="policy_gradient", correction=CorrectionConfig(importance="none"))
    assert run([-2.0, -2.0], behaviour, [1.0, 1.0], plain)[1] == [-1.0, -1.0]


def test_decoupled_ppo_by_hand() -> None:
    # pi / mu is 4 and 1/4; the proximal policy is pi: its ratio is 1, unclipped, and pi / mu is a weight.
    behaviour = [-1 - math.log(4), -1 + math.log(4)]
    decoupled = LossConfig(correction=CorrectionConfig(proximal="recompute"))
    assert run([-1.0, -1.0], behaviour, [1.0, 1.0], decoupled)[1] == pytest.approx([-4.0, -0.25])
    truncated = LossConfig(correction=CorrectionConfig(proximal="recompute", importance="truncate"))
    assert run([-1.0, -1.0], behaviour, [1.0, 1.0], truncated)[1] == pytest.approx([-2.0, -0.25])
    masked = LossConfig(correction=CorrectionConfig(proximal="recompute", importance="mask"))
    sums, grad = run([-1.0, -1.0], behaviour, [1.0, 1.0], masked)
    assert grad == pytest.approx([-4.0, 0.0])
    assert (total(sums, "masked"), total(sums, "truncated")) == (1.0, 0.0)


def test_an_interpolated_proximal_policy_by_hand() -> None:
    # Log-ratio 0.8 at staleness 4: three quarters of it weigh, one quarter is the surrogate's ratio.
    config = LossConfig(correction=CorrectionConfig(proximal="interpolate"))
    _, grad = run([-1.0] * 3, [-1.8] * 3, [-1.0] * 3, config, staleness=[4.0, 0.0, 1.0])
    assert grad == pytest.approx([math.exp(0.6) * math.exp(0.2), math.exp(0.8), math.exp(0.8)])
    _, grad = run([-1.0] * 3, [-1.8] * 3, [1.0] * 3, config, staleness=[4.0, 0.0, 1.0])
    assert grad == pytest.approx([0.0, -math.exp(0.8), 0.0])  # exp(0.2) > 1.2: the clip binds, as at staleness 1


def test_sequence_level_weights_by_hand() -> None:
    # Ratios 2 and 3 in the first sequence, 1 in the second: products 6 and 1.
    behaviour = [-1 - math.log(2), -1 - math.log(3), -1.0]
    truncated = CorrectionConfig(importance="truncate", level="sequence", high=4.0)
    config = LossConfig(algorithm="policy_gradient", correction=truncated)
    sums, grad = run([-1.0] * 3, behaviour, [1.0] * 3, config, index=[0, 0, 1])
    assert grad == pytest.approx([-4.0, -4.0, -1.0])
    assert total(sums, "truncated") == 2.0
    masked = LossConfig(correction=CorrectionConfig(importance="mask", level="sequence"))
    sums, grad = run([-1.0] * 3, behaviour, [-1.0] * 3, masked, index=[0, 0, 1])
    assert grad == pytest.approx([0.0, 0.0, 1.0])
    assert total(sums, "masked") == 2.0


def test_what_is_reported_by_hand() -> None:
    # Ratios 2 and 1/2, one token without a ratio.
    sums, _ = run([-1.0] * 3, [-1 - math.log(2), -1 + math.log(2), math.nan], [0.0] * 3)
    ratio, squares = total(sums, "ratio"), total(sums, "ratio_squared")
    assert (ratio, squares) == pytest.approx((2.5, 4.25))
    assert total(sums, "mismatch_k1") == pytest.approx(0.0)  # -log 2 + log 2
    assert total(sums, "mismatch_k3") == pytest.approx((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2)))
    assert float(sums.ratio_max) == pytest.approx(2.0)
    assert total(sums, "entropy") == 2.0


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_token_without_a_finite_behaviour_logprob_leaves_loss_and_gradient(bad: float, algorithm: str) -> None:
    sums, grad = run([-1.0, -2.0], [bad, -2.0], [3.0, 1.0], LossConfig(algorithm=algorithm))
    alone, expected = run([-2.0], [-2.0], [1.0], LossConfig(algorithm=algorithm))
    assert float(sums.loss.detach()) == pytest.approx(float(alone.loss.detach()))
    assert grad == pytest.approx([0.0, *expected])
    assert sums.totals.tolist() == pytest.approx(alone.totals.tolist())


@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_log_ratio_of_100_is_finite(log_ratio: float, advantage: float, algorithm: str) -> None:
    """In the trainer's float32, where exp(100) is not."""
    for level in ("token", "sequence"):
        for estimator in ("k1", "k2", "k3"):
            config = LossConfig(
                algorithm=algorithm,
                correction=CorrectionConfig(level=level),
                kl=KLConfig(coefficient=0.1, estimator=estimator),
            )
            behaviour = [-1.0 - log_ratio] * 2
            reference = [-1.0 + log_ratio] * 2
            sums, grad = run([-1.0] * 2, behaviour, [advantage] * 2, config, None, reference, dtype=torch.float32)
            assert math.isfinite(float(sums.loss.detach()))
            assert torch.isfinite(sums.totals).all()
            assert all(math.isfinite(value) for value in grad)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_log_ratio_of_100_to_the_proximal_policy_is_finite(level: str) -> None:
    """Its weight has no bound of its own where ``importance`` is none."""
    config = LossConfig(correction=CorrectionConfig(level=level, proximal="recompute"))
    sums, grad = run([-1.0] * 2, [-101.0] * 2, [1.0] * 2, config, dtype=torch.float32)
    assert math.isfinite(float(sums.loss.detach())) and torch.isfinite(sums.totals).all()
    assert all(math.isfinite(value) for value in grad)


def test_no_token_gives_zero_with_a_gradient_path() -> None:
    for algorithm in ALGORITHMS:
        sums, grad = run([], [], [], LossConfig(algorithm=algorithm))
        assert (float(sums.loss.detach()), float(sums.ratio_max), grad) == (0.0, 0.0, [])


def test_cross_entropy_is_the_negative_sum() -> None:
    sums = cross_entropy_loss(torch.tensor([-1.0, -2.5]), torch.tensor([0.5, 0.5]))
    assert float(sums.loss) == 3.5
    assert (total(sums, "loss"), total(sums, "ratio"), total(sums, "entropy")) == (3.5, 2.0, 1.0)


# -- token by token --------------------------------------------------------------------------------------------------


def samples(seed: int) -> list[Sample]:
    """Seven sequences of six episodes (one forked), one token without a ratio; ratios from 0.2 to 5."""
    random = np.random.default_rng(seed)
    made = []
    for name in ("a", "b", "c", "c", "d", "e", "f"):
        count = int(random.integers(1, 8))
        logprobs = random.normal(-1.5, 0.5, count)
        behaviour = (logprobs + random.normal(0, 0.6, count)).tolist()
        leaves = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in logprobs]
        ages = random.integers(0, 5, count).tolist()
        made.append(Sample(leaves, behaviour, float(random.normal()), name, ages))
    made[1].behaviour[0] = math.nan
    made[5].advantage = made[3].advantage = made[2].advantage
    return made


def packed(given: list[Sample], config: LossConfig, rows: list[list[int]]) -> tuple[float, list[list[float]]]:
    """The same by ``policy_loss``, in rows of sequences; loss and gradient per sequence."""
    sequences = []
    for place, sample in enumerate(given):
        made = sequence(str(place), [1], [2] * len(sample.behaviour), logprobs=sample.behaviour)
        object.__setattr__(made, "episode_id", sample.episode)
        sequences.append(made)
    weighted = loss_weights(sequences, config.resolved().aggregation, 100)
    loss = 0.0
    gradients: list[list[float]] = [[] for _ in given]
    for row in rows:
        chosen = [given[place] for place in row]
        current = torch.stack([value.detach() for sample in chosen for value in sample.logprobs]).requires_grad_()
        lengths = torch.tensor([len(sample.behaviour) for sample in chosen])

        def per_token(values: list[Any], lengths: torch.Tensor = lengths) -> torch.Tensor:
            return torch.repeat_interleave(torch.tensor(values, dtype=torch.float64), lengths)

        sums = policy_loss(
            PolicyTokens(
                logprob_K=current,
                entropy_K=torch.zeros_like(current).detach(),
                behaviour_K=torch.tensor([v for s in chosen for v in s.behaviour], dtype=torch.float64),
                advantage_K=per_token([sample.advantage for sample in chosen]),
                weight_K=per_token([float(weighted.weight_S[place]) for place in row]),
                staleness_K=torch.tensor([v for s in chosen for v in s.staleness], dtype=torch.float64),
                index_K=torch.repeat_interleave(torch.arange(len(chosen)), lengths),
                sequences=len(chosen),
                reference_K=torch.tensor([v for s in chosen for v in s.reference], dtype=torch.float64)
                if given[0].reference
                else None,
            ),
            config.resolved(),
        )
        (sums.loss / weighted.denominator).backward()
        loss += float(sums.loss.detach()) / weighted.denominator
        assert current.grad is not None
        for place, part in zip(row, torch.split(current.grad, lengths.tolist()), strict=True):
            gradients[place] = part.tolist()
    return loss, gradients


PACKINGS = ([[0, 1, 2, 3, 4, 5, 6]], [[6, 3], [5, 4, 2, 1, 0]], [[i] for i in range(7)])


def check(given: list[Sample], expected: torch.Tensor, config: LossConfig) -> None:
    expected.backward()
    gradients = [[0.0 if leaf.grad is None else float(leaf.grad) for leaf in s.logprobs] for s in given]
    assert any(abs(value) > 1e-3 for values in gradients for value in values)
    for rows in PACKINGS:
        loss, found = packed(given, config, rows)
        assert loss == pytest.approx(float(expected.detach()), abs=1e-6)
        for got, wanted in zip(found, gradients, strict=True):
            assert got == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_equals_its_naive_version_however_packed(algorithm: str, seed: int) -> None:
    given = samples(seed)
    if algorithm == "gspo":  # its bounds are so narrow that nothing would be left
        for sample in given[::2]:
            shift = sum(sample.logprobs[t].item() - sample.behaviour[t] for t in sample.counted) / len(sample.counted)
            sample.behaviour = [value + shift for value in sample.behaviour]
    check(given, ALGORITHMS[algorithm](given), LossConfig(algorithm=algorithm, constant_length=100))


CORRECTIONS = [
    (importance, level, proximal, surrogate)
    for importance in ("none", "truncate", "mask")
    for level in ("token", "sequence")
    for proximal in ("none", "recompute", "interpolate")
    for surrogate in ("token_clip", "sequence_clip", "cispo", "policy_gradient")
    if not (surrogate == "policy_gradient" and proximal != "none")
    and not (surrogate != "policy_gradient" and proximal == "none" and importance == "truncate")
]


@pytest.mark.parametrize(("importance", "level", "proximal", "surrogate"), CORRECTIONS)
def test_every_correction_equals_its_naive_version_however_packed(
    importance: str, level: str, proximal: str, surrogate: str
) -> None:
    given = samples(7)
    correction = CorrectionConfig(importance=importance, level=level, proximal=proximal, low=0.4, high=1.7)
    expected = corrected(given, importance, level, proximal, surrogate, 0.4, 1.7)
    check(given, expected, LossConfig(surrogate=surrogate, correction=correction))


@pytest.mark.parametrize("aggregation", ["sequence_mean", "constant"])
@pytest.mark.parametrize("surrogate", ["token_clip", "cispo"])
def test_a_correction_with_a_penalty_adds_up_as_its_naive_version(surrogate: str, aggregation: str) -> None:
    given = samples(3)
    random = np.random.default_rng(1)
    for sample in given:
        sample.reference = [value.item() + random.normal(0, 0.5) for value in sample.logprobs]
    correction = CorrectionConfig(importance="mask", level="sequence", low=0.2, high=3.0)
    config = LossConfig(
        surrogate=surrogate,
        aggregation=aggregation,
        constant_length=100,
        correction=correction,
        kl=KLConfig(coefficient=0.3, estimator="k2"),
    )
    settings = ("mask", "sequence", "none", surrogate, 0.2, 3.0)
    expected = corrected(given, *settings, aggregation=aggregation, kl_coefficient=0.3)
    unpenalised = corrected(given, *settings, aggregation=aggregation)
    assert abs(float(expected.detach()) - float(unpenalised.detach())) > 1e-4
    check(given, expected, config)


@pytest.mark.parametrize("surrogate", ["token_clip", "sequence_clip"])
def test_a_ratio_above_the_dual_clips_bound_equals_its_naive_version(surrogate: str) -> None:
    given = samples(4)
    far = given[0]
    far.advantage, far.behaviour = -1.0, [value.item() - 2.5 for value in far.logprobs]  # ratio 12.2, bound 10
    expected = corrected(given, "none", "token", "none", surrogate, 0.4, 1.7)
    check(given, expected, LossConfig(surrogate=surrogate))
    assert all(leaf.grad is None or not leaf.grad.any() for leaf in far.logprobs), "the bound decides"


# -- KL --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("sampler", ["the policy itself", "another policy"])
def test_the_gradient_of_the_penalty_is_the_exact_kls_in_expectation(estimator: str, sampler: str) -> None:
    """Four tokens: the expectation is a sum over them, weighted by how often each is sampled."""
    logits = torch.tensor([0.3, -0.8, 1.1, 0.2], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([-0.5, 0.4, 0.1, 0.9], dtype=torch.float64), 0)
    logprobs = torch.log_softmax(logits, 0)
    other = torch.log_softmax(torch.tensor([0.5, -0.2, 0.6, 0.1], dtype=torch.float64), 0)
    behaviour = logprobs.detach() if sampler == "the policy itself" else other
    (expected,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    config = LossConfig(kl=KLConfig(coefficient=1.0, estimator=estimator))
    zeros = torch.zeros(4, dtype=torch.float64)
    tokens = PolicyTokens(
        logprobs, zeros, behaviour, zeros, behaviour.exp(), zeros, torch.arange(4), 4, reference_K=reference
    )
    (found,) = torch.autograd.grad(policy_loss(tokens, config.resolved()).loss, logits)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)


def test_the_value_of_the_penalty_by_hand() -> None:
    for estimator, value in (("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 1 + 0.5)):
        config = LossConfig(kl=KLConfig(coefficient=0.1, estimator=estimator))
        sums, grad = run([-1.0], [-1.0], [0.0], config, reference=[-1.5])
        assert float(sums.loss.detach()) == pytest.approx(0.1 * value)
        assert total(sums, "reference_kl") == pytest.approx(value)
        assert grad == pytest.approx([0.05])  # coefficient x d


def test_a_masked_token_is_not_penalised_either() -> None:
    config = LossConfig(correction=CorrectionConfig(importance="mask"), kl=KLConfig(coefficient=0.1))
    _, grad = run([-1.0, -1.0], [-1.0, -4.0], [0.0, 0.0], config, reference=[-1.5, -1.5])
    assert grad == pytest.approx([0.05, 0.0])


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"max_ratio": 1.0}, "max_ratio"),
        ({"max_log_ratio": 200.0}, "max_log_ratio"),
        ({"algorithm": "ppo2"}, "algorithm"),
        ({"surrogate": "clip"}, "surrogate"),
        ({"aggregation": "mean"}, "aggregation"),
        ({"overlong_share": 2.0}, "overlong_share"),
        ({"correction": {"importance": "truncate"}}, "correction.importance"),
        ({"algorithm": "rloo", "correction": {"proximal": "recompute"}}, "correction.proximal"),
    ],
)
def test_settings_out_of_range_are_named(wrong: dict[str, Any], key: str) -> None:
    if "correction" in wrong:
        wrong = wrong | {"correction": CorrectionConfig(**wrong["correction"])}
    with pytest.raises(ConfigError, match=key):
        LossConfig(**wrong)


def test_a_part_of_its_own_replaces_the_algorithms() -> None:
    assert LossConfig(algorithm="dapo").resolved().clip_high == 0.28
    assert LossConfig(algorithm="dapo", clip_high=0.4).resolved().clip_high == 0.4
    assert LossConfig(algorithm="rloo", surrogate="token_clip").resolved().importance == "none"
