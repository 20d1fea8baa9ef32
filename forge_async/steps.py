"""One optimizer step and what a run counts: plain data, and the way from a batch to training sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from forge_async.buffer.ages import Ages
from forge_async.config import Config
from forge_async.rollout.sequences import training_sequences
from forge_async.trainer.advantages import batch_advantages
from forge_async.types import Group, StepStats, TrainingSequence


@dataclass
class Tally:
    """What a whole run counts, for its summary and its invariants."""

    swaps: int = 0
    """Versions that became live in a replica during the loop."""
    swaps_in_flight: int = 0
    """Those that happened while the replica had requests running."""
    digest_mismatches: int = 0
    trained_tokens: int = 0
    tokens_without_version: int = 0
    max_staleness: int = 0
    max_kv_staleness: int = 0
    staleness_histogram: Counter[int] = field(default_factory=Counter)
    """Trained tokens by staleness."""
    failed_episodes: Counter[str] = field(default_factory=Counter)
    """Episodes without a reward, by reason."""
    requeued: int = 0
    """Requests that were sent again because their replica died."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each optimizer step's batch."""
    digests: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One optimizer step as the caller of the loop sees it."""

    index: int
    """From 1 in this run's numbering; equals ``stats.version`` unless steps were skipped."""
    stats: StepStats
    groups: tuple[Group, ...] = field(repr=False)
    sequences: tuple[TrainingSequence, ...] = field(repr=False)
    """What was trained of the groups."""
    reward: float
    """Mean over the episodes of the batch."""
    reward_parts: dict[str, float]
    staleness: Ages
    """Of trained tokens: trainer version at the step minus token version."""
    kv_staleness: Ages
    """The same of the oldest keys and values that each of them attended to."""
    uniform: float
    """Share of groups whose rewards are all equal."""
    completion_length: float
    """Mean sampled tokens per episode."""
    truncated: float
    """Share of episodes that ended by their token limit."""
    wait_s: float
    """How long the trainer waited for this batch."""
    publish_s: float
    """How long training stood still to hand the new weights over; the rest of publishing runs beside the next step."""
    wall_s: float
    """Since the previous step ended."""


def batch_sequences(config: Config, batch: Sequence[Group]) -> list[TrainingSequence]:
    """What is trained of a batch: its episodes' sequences with their advantages."""
    advantages = batch_advantages(batch, config.trainer.loss.resolved(), config.policy.sampling.max_tokens)
    return [
        sequence
        for group, values in zip(batch, advantages, strict=True)
        for sequence in training_sequences(group, values, config.rollout.truncated)
    ]
