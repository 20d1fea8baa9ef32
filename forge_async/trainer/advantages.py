"""Advantages from rewards: how much better an episode was than the others of its own prompt."""

from __future__ import annotations

import math

DEVIATION_FLOOR = 1e-6
"""A group whose rewards deviate less than this counts as equal; it avoids amplifying rounding error."""


def group_advantages(rewards: list[list[float]], normalize_std: bool = True) -> list[list[float]]:
    """Advantage of every episode, group by group; the baseline is never taken over the batch.

    A_i = r_i - mean(r), divided by the sample standard deviation of the group when ``normalize_std`` (GRPO,
    arXiv 2402.03300, section 4.1.2; without it, Dr. GRPO, arXiv 2503.20783). Groups may differ in size. A group of one,
    or of equal rewards, gets zeros.

    Raises:
        ValueError: a reward is not finite; the message names group and episode.
    """
    result = []
    for group_index, group in enumerate(rewards):
        for index, reward in enumerate(group):
            if not math.isfinite(reward):
                raise ValueError(f"group {group_index}, episode {index}: reward is {reward}; rewards must be finite")
        if len(group) < 2:
            result.append([0.0] * len(group))
            continue
        mean = math.fsum(group) / len(group)
        centered = [reward - mean for reward in group]
        deviation = math.sqrt(math.fsum(value * value for value in centered) / (len(group) - 1))
        if deviation < DEVIATION_FLOOR:
            result.append([0.0] * len(group))
        else:
            result.append([value / deviation for value in centered] if normalize_std else centered)
    return result
