"""Log-probs of chosen tokens from hidden states, by chunks: [tokens, vocabulary] logits are never held at once.

The output projection may be whole, or split by rows of the vocabulary over the ranks of a process group; logits are
then never gathered either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
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


@dataclass(frozen=True)
class VocabularySplit:
    """Which rows of the output projection this rank holds."""

    group: dist.ProcessGroup
    """The ranks that hold all rows together, each some."""
    start: int
    """This rank's first row."""


def selected_logprobs(
    hidden_KD: torch.Tensor, weight_VD: torch.Tensor, predictions: Predictions, split: VocabularySplit | None = None
) -> torch.Tensor:
    """Log-probs and entropies, float32 [2, K].

    log p_k = z_k[label_k] - logsumexp(z_k), z_k = W h_k / temperature_k; H_k = logsumexp(z_k) - sum_v p_kv z_kv.
    The entropy carries no gradient. Where there is more than one chunk, logits are recomputed in the backward pass.

    With ``split`` this is collective over its group: ``weight_VD`` are this rank's rows, hidden states are the same on
    every rank, so is the result, and the gradient of the hidden states is this rank's part of their sum.
    """
    size = predictions.chunk_size
    count = hidden_KD.shape[0]
    if count <= size:
        return _chunk(hidden_KD, weight_VD, predictions.label_K, predictions.inverse_temperature_K, split)
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
                split,
                use_reentrant=False,
            )
        )
    return torch.cat(parts, dim=1)


def _chunk(
    hidden_KD: torch.Tensor,
    weight_VD: torch.Tensor,
    label_K: torch.Tensor,
    inverse_temperature_K: torch.Tensor,
    split: VocabularySplit | None,
) -> torch.Tensor:
    logits_KV = F.linear(hidden_KD, weight_VD).float() * inverse_temperature_K[:, None]
    if split is None:
        log_total_K = torch.logsumexp(logits_KV, dim=-1)
        chosen_K = logits_KV.gather(1, label_K[:, None])[:, 0]
    else:
        log_total_K, chosen_K = _split_sums(logits_KV, label_K, split)
    logprob_K = chosen_K - log_total_K
    with torch.no_grad():
        probability_KV = torch.exp(logits_KV - log_total_K[:, None])
        expected_K = torch.einsum("kv,kv->k", probability_KV, logits_KV)
        if split is not None:
            dist.all_reduce(expected_K, group=split.group)
        entropy_K = log_total_K - expected_K
    return torch.stack([logprob_K, entropy_K])


def _split_sums(
    logits_KV: torch.Tensor, label_K: torch.Tensor, split: VocabularySplit
) -> tuple[torch.Tensor, torch.Tensor]:
    """logsumexp over the whole vocabulary, and the labels' logits, from each rank's columns: float32 [K] both."""
    highest_K = logits_KV.detach().amax(dim=-1)
    dist.all_reduce(highest_K, op=dist.ReduceOp.MAX, group=split.group)
    total_K = torch.exp(logits_KV - highest_K[:, None]).sum(dim=-1)
    column_K = label_K - split.start
    own_K = (column_K >= 0) & (column_K < logits_KV.shape[1])
    chosen_K = logits_KV.gather(1, torch.where(own_K, column_K, 0)[:, None])[:, 0]
    total_K, chosen_K = _SumOverRanks.apply(torch.stack([total_K, torch.where(own_K, chosen_K, 0)]), split.group)
    return highest_K + torch.log(total_K), chosen_K


class _SumOverRanks(torch.autograd.Function):
    """Sum of every rank's tensor. What follows is the same on all ranks, so each rank's gradient is already whole."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
