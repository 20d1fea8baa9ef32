"""Log-probs of chosen tokens from hidden states, by chunks: [tokens, vocabulary] logits are never held at once.

The output projection may be whole, or split by rows of the vocabulary over the ranks of a process group; logits are
then never gathered either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from forge_async.types import SamplingMask


@dataclass(frozen=True)
class KeptIds:
    """The ids over which each prediction's softmax is taken: N in all, on the device, cut by prediction on the host."""

    id_N: torch.Tensor
    """int64 [N]."""
    row_N: torch.Tensor
    """int64 [N]: the prediction which each belongs to; ascending."""
    whole_K: torch.Tensor
    """bool [K]: predictions over the whole vocabulary; they have no ids."""
    end_K: np.ndarray
    """int64 [K]: where each prediction's ids end. On the host, so that cutting does not wait for the device."""

    @classmethod
    def on(cls, device: torch.device, mask: SamplingMask) -> KeptIds:
        return cls(
            torch.from_numpy(mask.token_ids.astype(np.int64)).to(device),
            torch.from_numpy(mask.rows()).to(device),
            torch.from_numpy(mask.counts == 0).to(device),
            np.cumsum(mask.counts),
        )

    def part(self, start: int, stop: int) -> KeptIds:
        """Those of the predictions from ``start`` to before ``stop``."""
        first, last = (int(self.end_K[index - 1]) if index else 0 for index in (start, stop))
        return KeptIds(
            self.id_N[first:last],
            self.row_N[first:last] - start,
            self.whole_K[start:stop],
            self.end_K[start:stop] - first,
        )

    def dense(self, first_id: int, columns: int) -> torch.Tensor:
        """bool [K, V]: whether each of the ids from ``first_id`` on is kept."""
        column_N = self.id_N - first_id
        own_N = (column_N >= 0) & (column_N < columns)
        kept_KV = self.whole_K[:, None].repeat(1, columns + 1)
        kept_KV[self.row_N, torch.where(own_N, column_N, columns)] = True  # one more column takes other ranks' ids
        return kept_KV[:, :columns]


@dataclass(frozen=True)
class Predictions:
    """What a row is asked: K times, the log-prob of ``label`` under the hidden state at ``source``."""

    source_K: torch.Tensor
    """int64 [K]: row index of the token *before* the predicted one."""
    label_K: torch.Tensor
    """int64 [K]: the predicted token's id."""
    inverse_temperature_K: torch.Tensor
    """float32 [K]: logits are multiplied by it before the softmax."""
    kept: KeptIds | None = None
    """Ids that the sampler kept; None: every id, for each prediction."""
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
    """Log-probs and entropies [2, K], float32 (float64 for a model in float64).

    log p_k = z_k[label_k] - logsumexp(z_k), z_k = W h_k / temperature_k; H_k = logsumexp(z_k) - sum_v p_kv z_kv.
    Sums run over the ids that the sampler kept at k (``predictions.kept``): top-k, top-p and min-p choose among the
    scaled logits, and what is sampled from is their softmax over the chosen ones. A label that is not kept has -inf.

    The entropy carries no gradient. Where there is more than one chunk, logits are recomputed in the backward pass.

    With ``split`` this is collective over its group: ``weight_VD`` are this rank's rows, hidden states are the same on
    every rank, so is the result, and the gradient of the hidden states is this rank's part of their sum.
    """
    size = predictions.chunk_size
    count = hidden_KD.shape[0]
    if count <= size:
        return _chunk(
            hidden_KD, weight_VD, predictions.label_K, predictions.inverse_temperature_K, predictions.kept, split
        )
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
                None if predictions.kept is None else predictions.kept.part(start, stop),
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
    kept: KeptIds | None,
    split: VocabularySplit | None,
) -> torch.Tensor:
    logits_KV = at_least_float32(F.linear(hidden_KD, weight_VD)) * inverse_temperature_K[:, None]
    if kept is not None:
        kept_KV = kept.dense(split.start if split is not None else 0, logits_KV.shape[1])
        logits_KV = logits_KV.masked_fill_(~kept_KV, -torch.inf)
    if split is None:
        log_total_K = torch.logsumexp(logits_KV, dim=-1)
        chosen_K = logits_KV.gather(1, label_K[:, None])[:, 0]
    else:
        log_total_K, chosen_K = _split_sums(logits_KV, label_K, split)
    logprob_K = chosen_K - log_total_K
    with torch.no_grad():
        probability_KV = torch.exp(logits_KV - log_total_K[:, None])
        finite_KV = logits_KV if kept is None else torch.where(kept_KV, logits_KV, 0)
        expected_K = torch.einsum("kv,kv->k", probability_KV, finite_KV)
        if split is not None:
            dist.all_reduce(expected_K, group=split.group)
        entropy_K = log_total_K - expected_K
    return torch.stack([logprob_K, entropy_K])


def at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    """The same in float32, or as they are in float64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


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
