"""Log-probs of chosen tokens from hidden states, by chunks: [tokens, vocabulary] logits are never held at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Predictions:
    """What a row is asked: K times, the log-prob of ``label`` under the hidden state at ``source``."""

    source_K: torch.Tensor
    """int64 [K]: row index of the token *before* the predicted one."""
    label_K: torch.Tensor
    """int64 [K]: the predicted token's id."""
    inverse_temperature_K: torch.Tensor
    """float32 [K]: logits are multiplied by it before the softmax."""
    chunk_size: int = 256
    """Predictions whose logits exist at the same time."""


def selected_logprobs(hidden_KD: torch.Tensor, weight_VD: torch.Tensor, predictions: Predictions) -> torch.Tensor:
    """Log-probs and entropies, float32 [2, K].

    log p_k = z_k[label_k] - logsumexp(z_k), z_k = W h_k / temperature_k; H_k = logsumexp(z_k) - sum_v p_kv z_kv.
    The entropy carries no gradient. Where there is more than one chunk, logits are recomputed in the backward pass.
    """
    size = predictions.chunk_size
    count = hidden_KD.shape[0]
    if count <= size:
        return _chunk(hidden_KD, weight_VD, predictions.label_K, predictions.inverse_temperature_K)
    parts = []
    for start in range(0, count, size):
        stop = min(start + size, count)
        parts.append(
            checkpoint(
                _chunk,
                hidden_KD[start:stop],
                weight_VD,
                predictions.label_K[start:stop],
                predictions.inverse_temperature_K[start:stop],
                use_reentrant=False,
            )
        )
    return torch.cat(parts, dim=1)


def _chunk(
    hidden_KD: torch.Tensor, weight_VD: torch.Tensor, label_K: torch.Tensor, inverse_temperature_K: torch.Tensor
) -> torch.Tensor:
    logits_KV = F.linear(hidden_KD, weight_VD).float() * inverse_temperature_K[:, None]
    log_total_K = torch.logsumexp(logits_KV, dim=-1)
    logprob_K = logits_KV.gather(1, label_K[:, None])[:, 0] - log_total_K
    with torch.no_grad():
        probability_KV = torch.exp(logits_KV - log_total_K[:, None])
        entropy_K = log_total_K - torch.einsum("kv,kv->k", probability_KV, logits_KV)
    return torch.stack([logprob_K, entropy_K])
