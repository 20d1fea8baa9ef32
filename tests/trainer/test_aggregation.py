"""Weights and denominators by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from trainer_samples import sequence

from forge_async.trainer.aggregation import loss_weights
from forge_async.types import TrainingSequence

# Four countable tokens in one episode, one of three in another, none in the third.
GIVEN = [
    sequence("a", [1], [2] * 4),
    sequence("b", [1], [2] * 3, logprobs=[-1.0, math.nan, -math.inf]),
    dataclasses.replace(sequence("c", [1], [2]), loss_mask=np.zeros(2, dtype=bool)),
]


@pytest.mark.parametrize(
    ("aggregation", "weights", "denominator"),
    [("token_mean", [1, 1], 5), ("sequence_mean", [1 / 4, 1], 2), ("constant", [1, 1], 2 * 16)],
)
def test_every_aggregation_by_hand(aggregation: str, weights: list[float], denominator: float) -> None:
    found = loss_weights(GIVEN, aggregation, 16)
    assert found.weight_S[:2].tolist() == pytest.approx(weights)
    assert (found.denominator, found.tokens, found.nonfinite) == (denominator, 5, 2)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_an_episode_that_forks_into_three_sequences_weighs_as_one(aggregation: str) -> None:
    whole = sequence("a", [1], [2] * 6)
    forks = [dataclasses.replace(sequence(f"a/{i}", [1], [2] * n), episode_id="a") for i, n in enumerate((1, 2, 3))]
    other = sequence("b", [1], [2] * 2)

    def share(given: list[TrainingSequence]) -> tuple[float, float]:
        """What all tokens of the first episode weigh in the step, and what the other's do."""
        found = loss_weights(given, aggregation, 16)
        each = [w * s.loss_mask.sum() / found.denominator for w, s in zip(found.weight_S, given, strict=True)]
        return sum(each[:-1]), each[-1]

    assert share([*forks, other]) == pytest.approx(share([whole, other]))


def test_nothing_to_train_has_denominator_zero() -> None:
    for aggregation in ("token_mean", "sequence_mean", "constant"):
        assert loss_weights([GIVEN[2]], aggregation, 16).denominator == 0
        assert loss_weights([], aggregation, 16).tokens == 0
