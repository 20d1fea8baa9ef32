from __future__ import annotations

import math

import pytest
import torch

from forge_async.errors import ConfigError
from forge_async.trainer.config import LossConfig
from forge_async.trainer.loss import cross_entropy_loss, grpo_loss

CONFIG = LossConfig(clip_low=0.2, clip_high=0.3, max_ratio=5.0)


def run(logprob: list[float], behaviour: list[float], advantage: list[float]):
    current = torch.tensor(logprob, requires_grad=True)
    sums = grpo_loss(current, torch.ones(len(logprob)), torch.tensor(behaviour), torch.tensor(advantage), CONFIG)
    sums.loss.backward()
    return sums, current.grad


def test_ratio_one_is_plain_policy_gradient() -> None:
    sums, grad = run([-1.0, -2.0], [-1.0, -2.0], [2.0, -1.0])
    assert float(sums.loss.detach()) == pytest.approx(-1.0)
    assert grad.tolist() == pytest.approx([-2.0, 1.0])  # d(-r A)/d logp = -r A
    assert (sums.tokens, sums.ratio, sums.ratio_max, sums.clipped, sums.entropy) == (2, 2.0, 1.0, 0.0, 2.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "gradient"),
    [
        (1.5, 1.0, 1.3, 0.0),  # above the clip, better than average: stopped
        (1.5, -1.0, -1.5, 1.5),  # above the clip, worse: still pushed down
        (0.5, 1.0, 0.5, -0.5),  # below the clip, better: still pushed up
        (0.5, -1.0, -0.8, 0.0),  # below the clip, worse: stopped
        (8.0, -1.0, -5.0, 0.0),  # dual clip at max_ratio
    ],
)
def test_clipping_by_hand(ratio: float, advantage: float, surrogate: float, gradient: float) -> None:
    sums, grad = run([-1.0], [-1.0 - math.log(ratio)], [advantage])
    assert float(sums.loss.detach()) == pytest.approx(-surrogate, rel=1e-5)
    assert grad.tolist() == pytest.approx([gradient], rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_a_token_without_a_finite_behaviour_logprob_leaves_loss_and_count(bad: float) -> None:
    sums, grad = run([-1.0, -2.0], [bad, -2.0], [3.0, 1.0])
    assert sums.tokens == 1
    assert float(sums.loss.detach()) == pytest.approx(-1.0)
    assert grad.tolist() == pytest.approx([0.0, -1.0])


@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_log_ratio_of_100_is_finite(log_ratio: float, advantage: float) -> None:
    sums, grad = run([-1.0], [-1.0 - log_ratio], [advantage])
    assert math.isfinite(float(sums.loss.detach()))
    assert math.isfinite(sums.ratio_max)
    assert torch.isfinite(grad).all()


def test_no_token_gives_zero_with_a_gradient_path() -> None:
    sums, grad = run([], [], [])
    assert float(sums.loss.detach()) == 0.0
    assert sums.tokens == 0
    assert grad.numel() == 0


def test_cross_entropy_is_the_negative_sum() -> None:
    sums = cross_entropy_loss(torch.tensor([-1.0, -2.5]), torch.tensor([0.5, 0.5]))
    assert float(sums.loss) == 3.5
    assert sums.tokens == 2
    assert sums.entropy == 1.0


@pytest.mark.parametrize(
    "wrong", [{"clip_low": 1.5}, {"clip_high": -0.1}, {"max_ratio": 1.0}, {"max_log_ratio": 200.0}]
)
def test_settings_out_of_range_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LossConfig(**wrong)
