"""A step's sums over all ranks -> what it reports."""

from __future__ import annotations

from collections.abc import Mapping

from forge_async.trainer.aggregation import LossWeights
from forge_async.trainer.loss import METRICS
from forge_async.types import StepStats


def taken_step(
    totals: Mapping[str, float],
    weighted: LossWeights,
    *,
    version: int,
    learning_rate: float,
    grad_norm: float,
    ratio_max: float,
    wall_s: float,
    phase_s: dict[str, float],
) -> StepStats:
    """The report of a step that was applied.

    Args:
        totals: sums over tokens of :data:`METRICS`; ``row_tokens`` computed, ``whole_tokens`` that they stand for, and
            ``places`` that the ranks' rows have for them.
        version: after the step.
    """
    mean = {name: totals[name] / weighted.tokens for name in METRICS}
    return StepStats(
        version=version,
        loss=totals["loss"] / weighted.denominator,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        ratio_mean=mean["ratio"],
        ratio_max=ratio_max,
        clip_fraction=mean["clipped_low"] + mean["clipped_high"],
        entropy=mean["entropy"],
        trained_tokens=weighted.tokens,
        total_tokens=int(totals["row_tokens"]),
        nonfinite_tokens=weighted.nonfinite,
        wall_s=wall_s,
        clip_fraction_low=mean["clipped_low"],
        clip_fraction_high=mean["clipped_high"],
        effective_sample_size=mean["ratio"] ** 2 / mean["ratio_squared"],
        truncated_fraction=mean["truncated"],
        masked_fraction=mean["masked"],
        mismatch_kl_k1=mean["mismatch_k1"],
        mismatch_kl_k3=mean["mismatch_k3"],
        padding_fraction=1 - totals["row_tokens"] / totals["places"],
        prefix_sharing=totals["whole_tokens"] / totals["row_tokens"],
        phase_s=phase_s,
        reference_kl=mean["reference_kl"],
    )


def skipped_step(version: int, learning_rate: float, nonfinite: int, wall_s: float) -> StepStats:
    """The report of a step without a countable token, which was not applied."""
    return StepStats(
        version=version,
        loss=0.0,
        grad_norm=0.0,
        learning_rate=learning_rate,
        ratio_mean=0.0,
        ratio_max=0.0,
        clip_fraction=0.0,
        entropy=0.0,
        trained_tokens=0,
        total_tokens=0,
        nonfinite_tokens=nonfinite,
        wall_s=wall_s,
        skipped=True,
    )
