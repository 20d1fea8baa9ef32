"""Losses over predicted tokens: each returns a *sum*; the trainer divides by one global token count.

So the gradient depends neither on packing nor on the micro-batch split nor on the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forge_async.trainer.config import LossConfig


@dataclass(frozen=True)
class TokenSums:
    """Sums over K predicted tokens; add them up over rows and ranks (``ratio_max`` by maximum)."""

    loss: torch.Tensor
    """Scalar with gradient."""
    tokens: int
    """Tokens that count: those with a finite behaviour log-prob."""
    ratio: float = 0.0
    ratio_max: float = 0.0
    clipped: float = 0.0
    entropy: float = 0.0


def grpo_loss(
    logprob_K: torch.Tensor,
    entropy_K: torch.Tensor,
    behaviour_K: torch.Tensor,
    advantage_K: torch.Tensor,
    config: LossConfig,
) -> TokenSums:
    """GRPO with the importance ratio taken against the behaviour log-probs (arXiv 2402.03300, eq. 3; per token).

    With d_t = clamp(log pi(y_t) - log mu(y_t), +-max_log_ratio), r_t = exp(d_t) and advantage A_t:

        s_t = min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)      for A_t >= 0
        s_t = max(the same, max_ratio A_t)                                  for A_t < 0 (dual clip, arXiv 1912.09729)
        loss = - sum_t s_t

    A token whose behaviour log-prob is NaN or infinite has no ratio: it leaves loss and count.
    """
    finite_K = torch.isfinite(behaviour_K)
    behaviour_K = torch.where(finite_K, behaviour_K, logprob_K.detach())
    log_ratio_K = (logprob_K - behaviour_K).clamp(-config.max_log_ratio, config.max_log_ratio)
    ratio_K = log_ratio_K.exp()
    clipped_K = ratio_K.clamp(1 - config.clip_low, 1 + config.clip_high)
    surrogate_K = torch.minimum(ratio_K * advantage_K, clipped_K * advantage_K)
    bounded_K = torch.maximum(surrogate_K, config.max_ratio * advantage_K)
    surrogate_K = torch.where(advantage_K < 0, bounded_K, surrogate_K)
    loss = -torch.where(finite_K, surrogate_K, torch.zeros_like(surrogate_K)).sum()
    with torch.no_grad():
        counted = int(finite_K.sum())
        # A token is clipped when the clip, not the ratio, decides its loss: its gradient is then zero.
        stopped_K = ((ratio_K > 1 + config.clip_high) & (advantage_K > 0)) | (
            (ratio_K < 1 - config.clip_low) & (advantage_K < 0)
        )
        return TokenSums(
            loss=loss,
            tokens=counted,
            ratio=float(ratio_K[finite_K].sum()),
            ratio_max=float(ratio_K[finite_K].max()) if counted else 0.0,
            clipped=float((stopped_K & finite_K).sum()),
            entropy=float(entropy_K[finite_K].sum()),
        )


def cross_entropy_loss(logprob_K: torch.Tensor, entropy_K: torch.Tensor) -> TokenSums:
    """Supervised fine-tuning: loss = - sum_t log pi(y_t). Ratios are reported as 1."""
    count = logprob_K.shape[0]
    return TokenSums(
        loss=-logprob_K.sum(),
        tokens=count,
        ratio=float(count),
        ratio_max=1.0 if count else 0.0,
        entropy=float(entropy_K.detach().sum()),
    )
