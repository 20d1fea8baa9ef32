"""How the losses of a step's tokens add up: weights and the denominator, known before the first row is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge_async.types import TrainingSequence


@dataclass(frozen=True)
class LossWeights:
    """loss = sum over tokens of weight x token loss, divided by ``denominator``; the same on every rank."""

    weight_S: np.ndarray
    """float32 [S]: of each countable token of sequence s."""
    denominator: float
    """0 where no token counts."""
    tokens: int
    """Countable tokens: under the loss mask, with a finite behaviour log-prob."""
    nonfinite: int = 0
    """Tokens under the loss mask that do not count."""


def loss_weights(sequences: Sequence[TrainingSequence], aggregation: str, constant_length: int) -> LossWeights:
    """With N countable tokens in the step, E episodes that have any, and n_e of an episode, over all its sequences:

    token_mean     weight 1, denominator N                    DAPO, arXiv 2503.14476, eq. 8
    sequence_mean  weight 1 / n_e, denominator E              GRPO, arXiv 2402.03300, eq. 3
    constant       weight 1, denominator E constant_length    Dr. GRPO, arXiv 2503.20783

    So an episode that forks into several sequences weighs as one. What a correction masks stays in the denominator,
    which would otherwise not be known before the forward passes.
    """
    counts = [int(np.isfinite(sequence.logprobs[sequence.loss_mask]).sum()) for sequence in sequences]
    trained = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
    tokens = sum(counts)
    episodes: dict[str | int, int] = {}
    names = [sequence.episode_id or index for index, sequence in enumerate(sequences)]
    for name, count in zip(names, counts, strict=True):
        if count:
            episodes[name] = episodes.get(name, 0) + count
    weight_S = np.ones(len(sequences), dtype=np.float32)
    if aggregation == "token_mean":
        denominator = tokens
    elif aggregation == "sequence_mean":
        weight_S = np.array([1 / episodes.get(name, 1) for name in names], dtype=np.float32)
        denominator = len(episodes)
    else:
        denominator = len(episodes) * constant_length
    return LossWeights(weight_S, float(denominator), tokens, trained - tokens)
