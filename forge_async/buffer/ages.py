"""How stale a batch is, token by token, in the one unit there is: the trainer's version minus the token's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from forge_async.types import Group, VersionArray


@dataclass(frozen=True)
class Ages:
    """Staleness of the tokens of one batch, in optimizer steps."""

    tokens: int
    mean: float
    max: int
    histogram: tuple[int, ...]
    """Tokens of staleness 0, 1, 2, ..."""


def ages(version: int, versions: Sequence[VersionArray]) -> Ages:
    """Of tokens of these versions, when the trainer is at ``version``."""
    staleness = version - np.concatenate([np.zeros(0, np.int32), *versions])
    if not len(staleness):
        return Ages(0, 0.0, 0, ())
    # No token is newer than the trainer; one without a version (-1) is older than all others.
    counts = np.bincount(staleness)
    return Ages(len(staleness), float(staleness.mean()), int(staleness.max()), tuple(counts.tolist()))


def kv_versions(groups: Iterable[Group], truncated: str) -> list[VersionArray]:
    """Of the tokens that ``training_sequences`` puts under the loss, episode by episode."""
    return [
        episode.kv_versions[episode.policy_versions >= episode.trained_since]
        for group in groups
        for episode in group.episodes
        if not (truncated == "mask" and episode.truncated)
    ]
