"""Advantages from rewards: how much better an episode was than a baseline, in units of a deviation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from forge_async.trainer.loss_config import LossParts
from forge_async.types import Group

DEVIATION_FLOOR = 1e-6
"""Rewards that deviate less than this count as equal; it avoids amplifying rounding error."""


def batch_advantages(batch: Sequence[Group], parts: LossParts, max_tokens: int) -> list[list[float]]:
    """Advantage of every episode of a batch, group by group.

    A group has the episodes that succeeded, however many. Its task is ``metadata["task"]`` of its prompt.

    Args:
        max_tokens: limit of a completion, which overlong reward shaping refers to.
    """
    rewards = [
        [
            episode.reward
            - parts.overlong_penalty
            * overlong(max(len(turn.completion.token_ids) for turn in episode.turns), max_tokens, parts.overlong_share)
            for episode in group.episodes
        ]
        for group in batch
    ]
    tasks = [str(group.prompt.metadata.get("task", "")) for group in batch]
    return advantages(rewards, parts.baseline, parts.scale, tasks)


def overlong(length: int, limit: int, share: float) -> float:
    """DAPO's soft punishment (arXiv 2503.14476, eq. 13, negated): 0 up to ``(1 - share) limit`` tokens, 1 at ``limit``.

    ``length`` is the episode's longest completion.
    """
    width = share * limit
    return min(1.0, max(0.0, length - (limit - width)) / width) if width else 0.0


def advantages(
    rewards: Sequence[Sequence[float]],
    baseline: str = "group_mean",
    scale: str = "group_std",
    tasks: Sequence[str] | None = None,
) -> list[list[float]]:
    """A_i = (r_i - baseline) / scale, for groups of any sizes.

    =================  ===========================================================  ====================================
    ``group_mean``     mean of the group                                            GRPO, arXiv 2402.03300, 4.1.2
    ``leave_one_out``  mean of the group's others: n / (n - 1) (r_i - group mean)   RLOO, arXiv 2402.14740
    ``batch_mean``     mean of the batch's episodes                                 REINFORCE++, arXiv 2501.03262
    ``none``           0                                                            REINFORCE
    =================  ===========================================================  ====================================

    Scales are sample deviations (n - 1): of the group's rewards (``group_std``); of r - baseline over the groups of the
    same task (``task_std``) or over the batch (``batch_std``); or 1 (``none``; Dr. GRPO, arXiv 2503.20783).

    A group of one, or of equal rewards, gets zeros from a group's baseline; where a deviation is asked for and there is
    none, the advantages are zeros, too. Never NaN.

    Raises:
        ValueError: a reward is not finite; the message names group and episode.
    """
    for group_index, group in enumerate(rewards):
        for index, reward in enumerate(group):
            if not math.isfinite(reward):
                raise ValueError(f"group {group_index}, episode {index}: reward is {reward}; rewards must be finite")
    every = [reward for group in rewards for reward in group]
    centre = {"batch_mean": _mean(every), "none": 0.0}
    by_group = baseline not in centre
    centred = []
    for group in rewards:
        mean = _mean(group) if by_group else centre[baseline]
        values = [reward - mean for reward in group]
        if by_group and _deviation(group) < DEVIATION_FLOOR:
            values = [0.0] * len(group)
        elif baseline == "leave_one_out":
            values = [value * len(group) / (len(group) - 1) for value in values]
        centred.append(values)
    if scale == "none":
        return centred
    if scale == "group_std":
        deviations = [_deviation(group) for group in rewards]
    else:
        names = list(tasks or [""] * len(rewards)) if scale == "task_std" else [""] * len(rewards)
        pooled: dict[str, list[float]] = {}
        for name, values in zip(names, centred, strict=True):
            pooled.setdefault(name, []).extend(values)
        by_name = {name: _deviation(values) for name, values in pooled.items()}
        deviations = [by_name[name] for name in names]
    return [
        [value / deviation if deviation >= DEVIATION_FLOOR else 0.0 for value in values]
        for values, deviation in zip(centred, deviations, strict=True)
    ]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _deviation(values: Sequence[float]) -> float:
    """Sample standard deviation; 0 for fewer than two."""
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
