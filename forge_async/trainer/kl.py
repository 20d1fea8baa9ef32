"""The distance to a reference policy, estimated from sampled tokens."""

from __future__ import annotations

import torch


def kl_estimate(
    logprob_K: torch.Tensor, reference_K: torch.Tensor, estimator: str, max_log_ratio: float = 20.0
) -> torch.Tensor:
    """KL(pi || pi_ref) at each sampled token: the value by ``estimator``, the gradient that of the exact KL. [K]

    With d = log pi - log pi_ref, clamped to +- max_log_ratio (Schulman 2020, joschu.net/blog/kl-approx.html):

        k1 = d            unbiased, high variance, may be negative
        k2 = d^2 / 2      biased, low variance
        k3 = e^-d - 1 + d unbiased, low variance, never negative

    Differentiated as they stand, k1 has gradient 0 in expectation and k3 that of KL(pi_ref || pi). The exact gradient
    is E_pi[d grad log pi]: k2's own, and k1's and k3's once the score function is added (arXiv 2505.17508). So that is
    what every estimator gets here. On tokens from another policy mu it is exact when weighted by pi / mu.
    """
    d_K = (logprob_K - reference_K).detach().clamp(-max_log_ratio, max_log_ratio)
    if estimator == "k1":
        value_K = d_K
    elif estimator == "k2":
        value_K = d_K**2 / 2
    else:
        value_K = torch.expm1(-d_K) + d_K
    return value_K + d_K * (logprob_K - logprob_K.detach())
