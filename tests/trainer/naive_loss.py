"""Losses token by token and sequence by sequence, each algorithm written out from its paper: what the packed ones must
equal. Plain Python over scalars; slow, and independent of ``forge_async.trainer.loss``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass
class Sample:
    """One sequence's sampled tokens."""

    logprobs: list[torch.Tensor]
    """Scalars with gradient."""
    behaviour: list[float]
    advantage: float
    episode: str
    staleness: list[int]
    reference: list[float] = field(default_factory=list)
    """Log-probs under the reference policy; empty: no penalty."""

    @property
    def counted(self) -> list[int]:
        return [t for t, value in enumerate(self.behaviour) if math.isfinite(value)]


def clip(value: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.clamp(value, low, high)


def all_tokens(samples: list[Sample]) -> int:
    return sum(len(sample.counted) for sample in samples)


def episode_tokens(samples: list[Sample], episode: str) -> int:
    return sum(len(sample.counted) for sample in samples if sample.episode == episode)


def grpo(samples: list[Sample], clip_high: float = 0.2) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        for t in sample.counted:
            total = total - ppo_term(sample.logprobs[t] - sample.behaviour[t], sample.advantage, 0.2, clip_high)
    return total / all_tokens(samples)


def ppo_term(log_ratio: torch.Tensor, advantage: float, low: float, high: float, dual: float = 10.0) -> torch.Tensor:
    ratio = torch.exp(log_ratio)
    term = torch.min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
    return torch.max(term, torch.tensor(dual * advantage, dtype=term.dtype)) if advantage < 0 else term


def dapo(samples: list[Sample]) -> torch.Tensor:
    return grpo(samples, clip_high=0.28)


def dr_grpo(samples: list[Sample], length: int = 100) -> torch.Tensor:
    return grpo(samples) * all_tokens(samples) / (length * len({s.episode for s in samples if s.counted}))


def gspo(samples: list[Sample]) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        if not sample.counted:
            continue
        mean = sum(sample.logprobs[t] - sample.behaviour[t] for t in sample.counted) / len(sample.counted)
        ratio = torch.exp(mean)
        term = torch.min(ratio * sample.advantage, clip(ratio, 1 - 3e-4, 1 + 4e-4) * sample.advantage)
        # A part of an episode that forked counts by its share of the episode's tokens.
        total = total - term * len(sample.counted) / episode_tokens(samples, sample.episode)
    return total / len({s.episode for s in samples if s.counted})


def cispo(samples: list[Sample]) -> torch.Tensor:
    return weighted(samples, 5.0)


def policy_gradient(samples: list[Sample]) -> torch.Tensor:
    return weighted(samples, 2.0)


def weighted(samples: list[Sample], bound: float) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        for t in sample.counted:
            weight = min(math.exp(float(sample.logprobs[t].detach()) - sample.behaviour[t]), bound)
            total = total - weight * sample.advantage * sample.logprobs[t]
    return total / all_tokens(samples)


ALGORITHMS: dict[str, Callable[[list[Sample]], torch.Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "rloo": policy_gradient,
    "reinforce_pp": grpo,
    "policy_gradient": policy_gradient,
}


def corrected(
    samples: list[Sample],
    importance: str,
    level: str,
    proximal: str,
    surrogate: str,
    low: float,
    high: float,
    *,
    aggregation: str = "token_mean",
    kl_coefficient: float = 0.0,
) -> torch.Tensor:
    """GRPO's bounds with a correction; the penalty is k2, which has the exact KL's gradient as it stands."""
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        old = {}
        for t in sample.counted:
            current, sampled = float(sample.logprobs[t]), sample.behaviour[t]
            if proximal == "recompute":
                old[t] = current
            elif proximal == "interpolate":
                age = sample.staleness[t]
                old[t] = current if age == 0 else sampled + (age - 1) / age * (current - sampled)
            else:
                old[t] = sampled
        for t in sample.counted:
            target = {s: float(sample.logprobs[s]) if proximal == "none" else old[s] for s in sample.counted}
            exponents = [target[s] - sample.behaviour[s] for s in ([t] if level == "token" else sample.counted)]
            weight = math.exp(sum(exponents))
            if importance == "mask" and not low <= weight <= high:
                continue
            if importance == "truncate":
                weight = min(weight, high)
            if surrogate == "policy_gradient":
                term = sample.advantage * sample.logprobs[t]
                factor = 1.0 if importance == "none" else weight
            else:
                term = ratio_term(sample, t, old, surrogate)
                factor = 1.0 if proximal == "none" else weight
            loss = -factor * term
            if sample.reference:
                bounded = min(math.exp(float(sample.logprobs[t]) - sample.behaviour[t]), 10.0)
                loss = loss + kl_coefficient * bounded * (sample.logprobs[t] - sample.reference[t]) ** 2 / 2
            total = total + loss / share(samples, sample, aggregation)
    return total


def ratio_term(sample: Sample, t: int, old: dict[int, float], surrogate: str) -> torch.Tensor:
    if surrogate == "token_clip":
        return ppo_term(sample.logprobs[t] - old[t], sample.advantage, 0.2, 0.2)
    if surrogate == "sequence_clip":
        mean = sum(sample.logprobs[s] - old[s] for s in sample.counted) / len(sample.counted)
        return ppo_term(mean, sample.advantage, 0.2, 0.2)
    bounded = min(max(math.exp(float(sample.logprobs[t]) - old[t]), 0.8), 1.2)  # cispo
    return bounded * sample.advantage * sample.logprobs[t]


def share(samples: list[Sample], sample: Sample, aggregation: str, length: int = 100) -> float:
    """What a token's loss is divided by."""
    episodes = len({s.episode for s in samples if s.counted})
    if aggregation == "sequence_mean":
        return episodes * episode_tokens(samples, sample.episode)
    return episodes * length if aggregation == "constant" else all_tokens(samples)
