"""Corrections for asynchrony: tokens were sampled by mu (the behaviour policy), pi is in training.

Importance weights carry no gradient. Where they multiply the surrogate, and where they only decide what is left out, is
:attr:`LossParts.weighs`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forge_async.trainer.loss_config import LossParts


@dataclass(frozen=True)
class Correction:
    """What the surrogate of each of K tokens is multiplied by, without gradient."""

    factor_K: torch.Tensor
    """float32 [K]."""
    truncated_K: torch.Tensor
    """bool [K]: the weight was larger than its bound and is the bound."""
    masked_K: torch.Tensor
    """bool [K]: the weight was out of its range and is 0."""


def proximal_logprobs(
    logprob_K: torch.Tensor, behaviour_K: torch.Tensor, staleness_K: torch.Tensor, kind: str
) -> torch.Tensor | None:
    """Log-probs of the proximal policy of decoupled PPO (arXiv 2110.00641), float32 [K] without gradient.

    ``recompute``: the policy at the start of the step. A step updates once, so that the log-probs of its own forward
    pass are these, to the bit, and no second pass is needed.

    ``interpolate``: log pi_prox = log mu + a (log pi - log mu) with a = (d - 1) / d for a token d >= 1 versions old:
    the policy one version ago, if log-probs moved evenly (AReaL's approximation, arXiv 2512.06547). For d = 1 it is the
    sampler, for d = 0 the policy itself.
    """
    if kind == "none":
        return None
    current_K = logprob_K.detach()
    if kind == "recompute":
        return current_K
    share_K = torch.where(staleness_K > 0, (staleness_K - 1) / staleness_K.clamp(min=1), 1.0)
    return behaviour_K + share_K * (current_K - behaviour_K)


def correct(
    numerator_K: torch.Tensor,
    behaviour_K: torch.Tensor,
    finite_K: torch.Tensor,
    index_K: torch.Tensor,
    sequences: int,
    parts: LossParts,
) -> Correction:
    """Importance weights of K tokens, truncated or masked.

    With rho_t = exp(log p_t - log mu_t), p the proximal policy or else pi, and W = rho_t (level ``token``) or the
    product of the sequence's rho_t (level ``sequence``; the exponent is clamped to +- max_log_ratio in both):

        none      W                                 decoupled PPO, arXiv 2110.00641; AReaL, arXiv 2505.24298
        truncate  min(W, high)                      Ionides 2008; V-trace, arXiv 1802.01561; with a proximal policy TIS
        mask      W if low <= W <= high, else 0     IcePop, arXiv 2510.18855; MIS

    Where the surrogate's own ratio is taken against mu, it is the weight, and ``mask`` contributes 1 or 0.

    Args:
        numerator_K: log p, without gradient.
        finite_K: tokens that count; others are no part of their sequence's product, and have factor 1.
        index_K: int64 [K], the sequence of each token, from 0.
    """
    log_weight_K = torch.where(finite_K, numerator_K - behaviour_K, 0.0)
    if parts.level == "sequence":
        log_weight_K = sum_by_sequence(log_weight_K, index_K, sequences)[index_K]
    weight_K = log_weight_K.clamp(-parts.max_log_ratio, parts.max_log_ratio).exp()
    nothing_K = torch.zeros_like(finite_K)
    truncated_K = finite_K & (weight_K > parts.high) if parts.importance == "truncate" else nothing_K
    masked_K = nothing_K
    if parts.importance == "mask":
        masked_K = finite_K & ((weight_K < parts.low) | (weight_K > parts.high))
    factor_K = weight_K if parts.weighs else torch.ones_like(weight_K)
    if parts.importance == "truncate":
        factor_K = factor_K.clamp(max=parts.high)
    return Correction(torch.where(masked_K, 0.0, factor_K), truncated_K, masked_K)


def sum_by_sequence(value_K: torch.Tensor, index_K: torch.Tensor, sequences: int) -> torch.Tensor:
    """Sums over the tokens of each sequence, [sequences]."""
    return value_K.new_zeros(sequences).index_add(0, index_K, value_K)
