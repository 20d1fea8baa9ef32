from __future__ import annotations

import math
from statistics import stdev

import numpy as np
import pytest

from forge_async.trainer.advantages import advantages, batch_advantages, overlong
from forge_async.trainer.loss_config import BASELINES, SCALES, LossConfig
from forge_async.types import Completion, Episode, Group, Prompt, Turn


def group(rewards: list[float], lengths: list[int] | None = None, task: str = "", failed: int = 0) -> Group:
    episodes = []
    for index, (reward, length) in enumerate(zip(rewards, lengths or [1] * len(rewards), strict=True)):
        nothing = np.zeros(length, np.int32)
        completion = Completion(nothing, nothing, np.zeros(length, np.float32), nothing, nothing, "stop")
        episodes.append(Episode(str(index), "p", (Turn(completion),), reward))
    return Group(Prompt("p", (), np.zeros(1, np.int32), metadata={"task": task}), tuple(episodes), failed)


def test_groups_of_unequal_size_have_their_own_baselines() -> None:
    # Rewards 1, 3 and 5 in groups of 2 and 1: over the batch the baseline would be 3.
    assert advantages([[1.0, 3.0], [5.0]], scale="none") == [[-1.0, 1.0], [0.0]]


def test_standard_deviation_is_the_groups_own() -> None:
    # Rewards 1 and 3: mean 2, sample deviation sqrt(2).
    first, second = advantages([[1.0, 3.0]])[0]
    assert first == pytest.approx(-1 / math.sqrt(2))
    assert second == pytest.approx(1 / math.sqrt(2))


def test_leave_one_out_is_the_distance_to_the_mean_of_the_others() -> None:
    found = advantages([[1.0, 2.0, 6.0], [3.0, 4.0]], "leave_one_out", "none")
    assert found[0] == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5])
    assert found[1] == pytest.approx([-1, 1])


def test_a_batchs_mean_and_deviation() -> None:
    # REINFORCE++: rewards 1, 3, 5 over two groups: mean 3, deviation 2. A group of one is not lost.
    assert advantages([[1.0, 3.0], [5.0]], "batch_mean", "batch_std") == [[-1.0, 0.0], [1.0]]
    assert advantages([[1.0, 3.0], [5.0]], "none", "none") == [[1.0, 3.0], [5.0]]


def test_a_tasks_deviation_is_over_its_groups() -> None:
    rewards = [[0.0, 1.0], [0.0, 10.0], [0.0, 4.0]]
    found = advantages(rewards, "group_mean", "task_std", ["sum", "count", "sum"])
    assert found[1] == pytest.approx([-5 / stdev([-5, 5]), 5 / stdev([-5, 5])])
    own = stdev([-0.5, 0.5, -2.0, 2.0])
    assert found[0] + found[2] == pytest.approx([-0.5 / own, 0.5 / own, -2 / own, 2 / own])


def test_a_group_of_one_and_a_group_of_equals_get_zeros() -> None:
    equal = [0.1 + 0.2, 0.3]  # differ by rounding only
    for baseline in ("group_mean", "leave_one_out"):
        for scale in SCALES:
            assert advantages([[7.0], [], equal], baseline, scale) == [[0.0], [], [0.0, 0.0]]


def test_no_choice_gives_nan() -> None:
    for rewards in ([[7.0]], [[1.0, 1.0], [1.0]], [[]], []):
        for baseline in BASELINES:
            for scale in SCALES:
                found = advantages(rewards, baseline, scale)
                assert [len(values) for values in found] == [len(values) for values in rewards]
                assert all(math.isfinite(value) for values in found for value in values)


def test_a_reward_that_is_not_finite_is_named() -> None:
    with pytest.raises(ValueError, match="group 1, episode 2"):
        advantages([[1.0], [0.0, 1.0, math.nan]])


def test_a_failed_episode_leaves_the_rest_of_its_group() -> None:
    batch = [group([1.0, 3.0], failed=1), group([2.0, 4.0, 6.0])]
    found = batch_advantages(batch, LossConfig(algorithm="dr_grpo").resolved(), 8)
    assert found == [[-1.0, 1.0], [-2.0, 0.0, 2.0]]


def test_tasks_come_from_the_prompts() -> None:
    batch = [group([0.0, 1.0], task="sum"), group([0.0, 10.0], task="count")]
    found = batch_advantages(batch, LossConfig(scale="task_std").resolved(), 8)
    assert found[0] == pytest.approx(found[1])


def test_overlong_rewards_fall_over_the_last_share_of_the_limit() -> None:
    assert [overlong(length, 100, 0.2) for length in (1, 80, 90, 100, 120)] == pytest.approx([0, 0, 0.5, 1, 1])
    assert overlong(100, 100, 0.0) == 0.0
    dapo = LossConfig(algorithm="dapo", scale="none").resolved()
    # Rewards 1 and 1, of 9 and 10 of at most 10 tokens: shaped 0.5 and 0.
    assert batch_advantages([group([1.0, 1.0], [9, 10])], dapo, 10)[0] == pytest.approx([0.25, -0.25])
    assert batch_advantages([group([1.0, 1.0], [9, 10])], LossConfig(scale="none").resolved(), 10) == [[0.0, 0.0]]
