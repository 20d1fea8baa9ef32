"""Settings of the loss: an algorithm names a combination of parts, and every part can be set by itself."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

from forge_async.errors import require

SURROGATES = ("token_clip", "sequence_clip", "cispo", "policy_gradient")
BASELINES = ("group_mean", "leave_one_out", "batch_mean", "none")
SCALES = ("group_std", "task_std", "batch_std", "none")
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
IMPORTANCE = ("none", "truncate", "mask")
LEVELS = ("token", "sequence")
PROXIMALS = ("none", "recompute", "interpolate")
ESTIMATORS = ("k1", "k2", "k3")


@dataclass(frozen=True)
class Algorithm:
    """A combination of parts, none of them null; the defaults are GRPO's."""

    surrogate: str = "token_clip"
    baseline: str = "group_mean"
    scale: str = "group_std"
    aggregation: str = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    max_ratio: float = 10.0
    overlong_share: float = 0.0
    importance: str = "none"


ALGORITHMS = {
    # arXiv 2402.03300 with the dual clip of 1912.09729, and the mean over all tokens of a step (paper: sequence_mean).
    "grpo": Algorithm(),
    # arXiv 2503.20783: no division by the group's deviation nor by a sequence's own length.
    "dr_grpo": Algorithm(scale="none", aggregation="constant"),
    # arXiv 2503.14476: clip-higher, mean over tokens, overlong reward shaping over the last fifth of the limit.
    "dapo": Algorithm(clip_high=0.28, overlong_share=0.2),
    # arXiv 2507.18071: the sequence's ratio, normalised by its length.
    "gspo": Algorithm("sequence_clip", aggregation="sequence_mean", clip_low=3e-4, clip_high=4e-4, max_ratio=math.inf),
    # arXiv 2506.13585: the bounded ratio weighs log pi; no lower bound. The paper gives no upper one: 5 here.
    "cispo": Algorithm("cispo", clip_low=1.0, clip_high=4.0, max_ratio=math.inf),
    # arXiv 2402.14740: REINFORCE with the mean of the others as baseline. Truncated weights are for stale samples.
    "rloo": Algorithm("policy_gradient", baseline="leave_one_out", scale="none", importance="truncate"),
    # arXiv 2501.03262: advantages normalised over the batch, PPO's clip.
    "reinforce_pp": Algorithm(baseline="batch_mean", scale="batch_std"),
    # REINFORCE (Williams 1992), with truncated weights for stale samples.
    "policy_gradient": Algorithm("policy_gradient", baseline="none", scale="none", importance="truncate"),
}
"""What a null setting means under each name."""


@dataclass(frozen=True)
class LossParts(Algorithm):
    """A :class:`LossConfig` with its nulls resolved: what the computation reads."""

    max_log_ratio: float = 20.0
    level: str = "token"
    low: float = 0.5
    high: float = 2.0
    proximal: str = "none"
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"
    overlong_penalty: float = 1.0

    @property
    def weighs(self) -> bool:
        """Importance weights multiply the surrogate: its ratio, if it has one, does not hold them."""
        if self.proximal != "none":
            return True
        return self.surrogate == "policy_gradient" and self.importance != "none"


@dataclass(frozen=True)
class CorrectionConfig:
    """What is done about tokens sampled by another policy than the one in training; docs/losses.md has the formulas."""

    importance: str | None = None
    """``truncate``: importance weights, at most ``high``; ``mask``: tokens whose weight is outside [``low``, ``high``]
    are not trained; ``none``; null: as the algorithm says."""
    level: str = "token"
    """The weight is that of the ``token``, or of all of its ``sequence``."""
    low: float = 0.5
    """Smallest weight that ``mask`` lets pass."""
    high: float | None = None
    """Largest weight; null: 2 for ``truncate``, 5 for ``mask``."""
    proximal: str = "none"
    """Decoupled PPO: the surrogate's ratio is taken against a proximal policy, and that policy is weighted against the
    sampler. ``recompute``: the policy at the start of the step; ``interpolate``: between sampler and trainer, by the
    token's staleness; ``none``: the ratio is taken against the sampler."""

    def __post_init__(self) -> None:
        if self.importance is not None:
            require(
                self.importance in IMPORTANCE, "importance", self.importance, f"null or one of {', '.join(IMPORTANCE)}"
            )
        require(self.level in LEVELS, "level", self.level, f"one of {', '.join(LEVELS)}")
        require(self.proximal in PROXIMALS, "proximal", self.proximal, f"one of {', '.join(PROXIMALS)}")
        require(0 <= self.low <= 1, "low", self.low, "between 0 and 1")
        if self.high is not None:
            require(1 <= self.high < math.inf, "high", self.high, "null or at least 1")


@dataclass(frozen=True)
class KLConfig:
    """The penalty on the distance to a reference policy."""

    coefficient: float = 0.0
    """Weight of the penalty per token; 0: no reference model is built."""
    estimator: str = "k3"
    """Which estimate is reported as the penalty's value: k1, k2 or k3. The gradient is the exact KL's with each."""
    reference: str | None = None
    """Hugging Face folder of the reference model; null: the model that the run starts from."""

    def __post_init__(self) -> None:
        valid = self.coefficient >= 0 and math.isfinite(self.coefficient)
        require(valid, "coefficient", self.coefficient, "0 or more")
        require(self.estimator in ESTIMATORS, "estimator", self.estimator, f"one of {', '.join(ESTIMATORS)}")


@dataclass(frozen=True)
class LossConfig:
    """Advantages, surrogate, aggregation, correction and KL. Null means: as ``algorithm`` says."""

    algorithm: str = "grpo"
    """The combination of parts: grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce_pp or policy_gradient."""
    surrogate: str | None = None
    """``token_clip``: PPO's clipped token ratio; ``sequence_clip``: the sequence's ratio, clipped; ``cispo``: log-prob
    weighted by the bounded ratio; ``policy_gradient``: log-prob."""
    baseline: str | None = None
    """Subtracted from the reward: ``group_mean``, ``leave_one_out`` (mean of the group's others), ``batch_mean``,
    ``none``."""
    scale: str | None = None
    """What advantages are divided by: ``group_std``, ``task_std`` (all groups of the prompt's task in the batch),
    ``batch_std``, ``none``."""
    aggregation: str | None = None
    """``token_mean``: every token of a step weighs the same; ``sequence_mean``: every episode does; ``constant``: sum
    over tokens divided by ``constant_length`` per episode."""
    constant_length: int | None = None
    """Tokens, for ``constant``; null: ``trainer.max_sequence_tokens``."""
    clip_low: float | None = None
    """The ratio is clipped from below at ``1 - clip_low``."""
    clip_high: float | None = None
    """The ratio is clipped from above at ``1 + clip_high``; larger than ``clip_low`` favours exploration (DAPO)."""
    max_ratio: float | None = None
    """Ratio at which the loss of a token with negative advantage stops growing (dual clip); above 1 + clip_high."""
    max_log_ratio: float = 20.0
    """Log-ratios are clamped to +- this before the exponential, so that no ratio overflows."""
    overlong_share: float | None = None
    """Overlong reward shaping (DAPO): the reward falls linearly over this last share of ``policy.sampling.max_tokens``;
    0: not at all."""
    overlong_penalty: float = 1.0
    """By how much it has fallen at the limit."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    kl: KLConfig = field(default_factory=KLConfig)

    def __post_init__(self) -> None:
        require(self.algorithm in ALGORITHMS, "algorithm", self.algorithm, f"one of {', '.join(ALGORITHMS)}")
        for name, allowed in (
            ("surrogate", SURROGATES),
            ("baseline", BASELINES),
            ("scale", SCALES),
            ("aggregation", AGGREGATIONS),
        ):
            value = getattr(self, name)
            require(value is None or value in allowed, name, value, f"null or one of {', '.join(allowed)}")
        parts = self.resolved()
        low, high, share, length = parts.clip_low, parts.clip_high, parts.overlong_share, self.constant_length
        require(0 <= low <= 1, "clip_low", low, "between 0 and 1")
        require(high >= 0, "clip_high", high, "0 or more")
        require(parts.max_ratio > 1 + high, "max_ratio", parts.max_ratio, f"above 1 + clip_high ({1 + high:g})")
        require(0 < self.max_log_ratio <= 80, "max_log_ratio", self.max_log_ratio, "above 0 and at most 80")
        require(0 <= share <= 1, "overlong_share", share, "between 0 and 1")
        penalty = self.overlong_penalty
        require(0 <= penalty < math.inf, "overlong_penalty", penalty, "0 or more, and finite")
        require(length is None or length >= 1, "constant_length", length, "null or at least 1")
        has_ratio = parts.surrogate != "policy_gradient"
        require(
            not (has_ratio and parts.importance == "truncate" and parts.proximal == "none"),
            "correction.importance",
            parts.importance,
            f"none or mask with the surrogate {parts.surrogate}, whose ratio is the importance weight already",
            "To truncate weights beside a ratio set correction.proximal=recompute.",
        )
        require(
            has_ratio or parts.proximal == "none",
            "correction.proximal",
            parts.proximal,
            "none with the surrogate policy_gradient, which has no ratio",
            "Its importance weights are set by correction.importance.",
        )

    def resolved(self) -> LossParts:
        """The parts, with what is null taken from the algorithm."""
        said, correction = ALGORITHMS[self.algorithm], self.correction
        names = [item.name for item in dataclasses.fields(Algorithm) if item.name != "importance"]
        own = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        parts = dataclasses.replace(said, **own)
        # The algorithm's weights belong to its surrogate: another one has a ratio of its own.
        by_algorithm = said.importance if parts.surrogate == said.surrogate else "none"
        importance = by_algorithm if correction.importance is None else correction.importance
        high = correction.high
        return LossParts(
            **dataclasses.asdict(dataclasses.replace(parts, importance=importance)),
            max_log_ratio=self.max_log_ratio,
            level=correction.level,
            low=correction.low,
            high=(5.0 if importance == "mask" else 2.0) if high is None else high,
            proximal=correction.proximal,
            kl_coefficient=self.kl.coefficient,
            kl_estimator=self.kl.estimator,
            overlong_penalty=self.overlong_penalty,
        )
