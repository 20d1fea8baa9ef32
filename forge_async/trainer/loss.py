"""Losses over packed tokens: pure functions, each a *weighted sum*; the trainer divides by one global denominator.

The weights and the denominator are known before the first row (``aggregation.py``), so that the gradient depends
neither on packing nor on the micro-batch split nor on the number of ranks. A loss is composed of orthogonal parts:

    loss = sum_t w_t [ - c_t s_t + kl_coefficient rho_t k_t ]  /  denominator

with w the aggregation's weight, s the surrogate (:func:`surrogate`), c the correction's factor (``corrections.py``),
k the penalty (``kl.py``) and rho_t = min(pi / mu, 10) without gradient, 0 where the correction masks the token.
Advantages are in s (``advantages.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from forge_async.trainer.corrections import correct, proximal_logprobs, sum_by_sequence
from forge_async.trainer.kl import kl_estimate
from forge_async.trainer.loss_config import LossParts

METRICS = (
    "loss",
    "ratio",
    "ratio_squared",
    "clipped_low",
    "clipped_high",
    "truncated",
    "masked",
    "mismatch_k1",
    "mismatch_k3",
    "reference_kl",
    "entropy",
)
"""What :class:`LossSums` adds up, in this order."""
KL_WEIGHT_BOUND = 10.0
"""Largest importance weight of a token's penalty."""


@dataclass(frozen=True)
class PolicyTokens:
    """K predicted tokens of a packed row. Tensors are float32 [K] unless said otherwise."""

    logprob_K: torch.Tensor
    """Log-probs in training, with gradient."""
    entropy_K: torch.Tensor
    behaviour_K: torch.Tensor
    """Log-probs at sampling. A token whose value is NaN or infinite has no ratio: it counts nowhere."""
    advantage_K: torch.Tensor
    weight_K: torch.Tensor
    """Weight of each token's loss, before the division by the global denominator."""
    staleness_K: torch.Tensor
    """Age of each token in policy versions."""
    index_K: torch.Tensor
    """int64 [K]: the sequence of each token, from 0 in the row."""
    sequences: int
    """How many sequences the row's tokens belong to."""
    reference_K: torch.Tensor | None = None
    """Log-probs under the reference policy, where there is a penalty."""


@dataclass(frozen=True)
class LossSums:
    """Sums over K predicted tokens; add them up over rows and ranks (``ratio_max`` by maximum)."""

    loss: torch.Tensor
    """Scalar with gradient: the numerator."""
    totals: torch.Tensor
    """float64 [len(METRICS)], without gradient; all but the first over tokens with weight 1."""
    ratio_max: torch.Tensor
    """Scalar, 0 where no token counts."""


LossFunction = Callable[[PolicyTokens, LossParts], LossSums]


@dataclass(frozen=True)
class Surrogate:
    """What is maximised, per token, and which tokens' ratios the bounds decided."""

    value_K: torch.Tensor
    clipped_low_K: torch.Tensor
    clipped_high_K: torch.Tensor


def policy_loss(tokens: PolicyTokens, parts: LossParts) -> LossSums:
    """The loss of the module's docstring, and what is reported of it."""
    current_K = tokens.logprob_K.detach()
    finite_K = torch.isfinite(tokens.behaviour_K)
    behaviour_K = torch.where(finite_K, tokens.behaviour_K, current_K)
    proximal_K = proximal_logprobs(tokens.logprob_K, behaviour_K, tokens.staleness_K, parts.proximal)
    old_K = behaviour_K if proximal_K is None else proximal_K
    chosen = surrogate(tokens, old_K, finite_K, parts)
    numerator_K = current_K if proximal_K is None else proximal_K
    correction = correct(numerator_K, behaviour_K, finite_K, tokens.index_K, tokens.sequences, parts)
    loss_K = -(chosen.value_K * correction.factor_K)
    log_ratio_K = (current_K - behaviour_K).clamp(-parts.max_log_ratio, parts.max_log_ratio)
    ratio_K = log_ratio_K.exp()
    penalty_K = torch.zeros_like(current_K)
    if tokens.reference_K is not None:
        kl_K = kl_estimate(tokens.logprob_K, tokens.reference_K, parts.kl_estimator, parts.max_log_ratio)
        kept_K = ratio_K.clamp(max=KL_WEIGHT_BOUND).masked_fill(correction.masked_K, 0.0)
        loss_K = loss_K + parts.kl_coefficient * kept_K * kl_K
        penalty_K = kl_K.detach()
    loss = torch.where(finite_K, tokens.weight_K * loss_K, torch.zeros_like(loss_K)).sum()
    with torch.no_grad():
        seen = {
            "ratio": ratio_K,
            "ratio_squared": ratio_K.double() ** 2,
            "clipped_low": chosen.clipped_low_K,
            "clipped_high": chosen.clipped_high_K,
            "truncated": correction.truncated_K,
            "masked": correction.masked_K,
            "mismatch_k1": -log_ratio_K,
            "mismatch_k3": torch.expm1(log_ratio_K) - log_ratio_K,
            "reference_kl": penalty_K,
            "entropy": tokens.entropy_K,
        }
        sums = {name: torch.where(finite_K, value_K.double(), 0.0).sum() for name, value_K in seen.items()}
        highest = torch.where(finite_K, ratio_K, 0.0).max() if len(ratio_K) else ratio_K.new_zeros(())
        return LossSums(loss, torch.stack([{"loss": loss.double(), **sums}[name] for name in METRICS]), highest)


def surrogate(tokens: PolicyTokens, old_K: torch.Tensor, finite_K: torch.Tensor, parts: LossParts) -> Surrogate:
    """With d_t = clamp(log pi_t - log old_t, +- max_log_ratio), r_t = exp(d_t), advantage A_t and sg = no gradient:

    token_clip (PPO, arXiv 1707.06347; dual clip, 1912.09729)
        s_t = min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t); for A_t < 0 no less than max_ratio A_t
    sequence_clip (GSPO, arXiv 2507.18071)
        the same with the sequence's ratio, r = exp(mean_t d_t)
    cispo (MiniMax-M1, arXiv 2506.13585)
        s_t = sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t log pi_t
    policy_gradient (REINFORCE)
        s_t = A_t log pi_t
    """
    nothing_K = torch.zeros_like(finite_K)
    advantage_K, logprob_K = tokens.advantage_K, tokens.logprob_K
    if parts.surrogate == "policy_gradient":
        return Surrogate(advantage_K * logprob_K, nothing_K, nothing_K)
    low, high = 1 - parts.clip_low, 1 + parts.clip_high
    log_ratio_K = logprob_K - old_K
    if parts.surrogate == "sequence_clip":
        counted_K = finite_K.to(log_ratio_K.dtype)
        length_S = sum_by_sequence(counted_K, tokens.index_K, tokens.sequences).clamp(min=1)
        total_S = sum_by_sequence(torch.where(finite_K, log_ratio_K, 0.0), tokens.index_K, tokens.sequences)
        log_ratio_K = (total_S / length_S)[tokens.index_K]
    ratio_K = log_ratio_K.clamp(-parts.max_log_ratio, parts.max_log_ratio).exp()
    clipped_K = ratio_K.clamp(low, high)
    if parts.surrogate == "cispo":
        return Surrogate(clipped_K.detach() * advantage_K * logprob_K, ratio_K < low, ratio_K > high)
    value_K = torch.minimum(ratio_K * advantage_K, clipped_K * advantage_K)
    if math.isfinite(parts.max_ratio):
        bounded_K = torch.maximum(value_K, parts.max_ratio * advantage_K)
        value_K = torch.where(advantage_K < 0, bounded_K, value_K)
    # A token is clipped when the clip, not the ratio, decides its loss: its gradient is then zero.
    return Surrogate(value_K, (ratio_K < low) & (advantage_K < 0), (ratio_K > high) & (advantage_K > 0))


def cross_entropy_loss(logprob_K: torch.Tensor, entropy_K: torch.Tensor) -> LossSums:
    """Supervised fine-tuning: loss = - sum_t log pi(y_t). Ratios are reported as 1."""
    loss = -logprob_K.sum()
    with torch.no_grad():
        totals = loss.new_zeros(len(METRICS), dtype=torch.float64)
        totals[METRICS.index("loss")] = loss
        totals[METRICS.index("ratio")] = totals[METRICS.index("ratio_squared")] = len(logprob_K)
        totals[METRICS.index("entropy")] = entropy_K.double().sum()
        return LossSums(loss, totals, loss.new_tensor(1.0 if len(logprob_K) else 0.0))
