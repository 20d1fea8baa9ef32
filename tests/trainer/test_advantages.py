from __future__ import annotations

import math

import pytest

from forge_async.trainer.advantages import group_advantages


def test_groups_of_unequal_size_have_their_own_baselines() -> None:
    assert group_advantages([[1.0, 3.0], [5.0]], normalize_std=False) == [[-1.0, 1.0], [0.0]]


def test_standard_deviation_is_the_groups_own() -> None:
    # Rewards 1 and 3: mean 2, sample deviation sqrt(2).
    first, second = group_advantages([[1.0, 3.0]], normalize_std=True)[0]
    assert first == pytest.approx(-1 / math.sqrt(2))
    assert second == pytest.approx(1 / math.sqrt(2))


def test_a_group_of_one_and_a_group_of_equals_get_zeros() -> None:
    equal = [0.1 + 0.2, 0.3]  # differ by rounding only
    assert group_advantages([[7.0], [], equal], normalize_std=True) == [[0.0], [], [0.0, 0.0]]


def test_a_reward_that_is_not_finite_is_named() -> None:
    with pytest.raises(ValueError, match="group 1, episode 2"):
        group_advantages([[1.0], [0.0, 1.0, math.nan]])
