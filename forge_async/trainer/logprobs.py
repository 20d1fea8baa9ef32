"""Log-probs of chosen tokens from hidden states, by chunks: memory for [tokens, vocabulary] logits is bounded.

The output projection may be whole, or split by rows of the vocabulary over the ranks of a process group; logits are
then never gathered either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from forge_async.types import SamplingMask

HELD_BYTES = 192 * 2**20
"""1024 predictions over 49152 ids; a fraction of what the activations of as many tokens take."""


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
    """Predictions whose logits are computed at the same time."""
    held_bytes: int = HELD_BYTES
    """Of their softmax, kept for the backward pass; what is above is computed again."""


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

    log p_k = z_k[label_k] - logsumexp(z_k), z_k = W h_k / temperature_k; H_k = -sum_v p_kv log p_kv.
    Sums run over the ids that the sampler kept at k (``predictions.kept``): top-k, top-p and min-p choose among the
    scaled logits, and what is sampled from is their softmax over the chosen ones. A label that is not kept has -inf.

    The entropy carries no gradient. Up to ``predictions.held_bytes`` the softmax of the forward pass is kept for the
    backward pass, further chunks are computed again.

    With ``split`` this is collective over its group: ``weight_VD`` are this rank's rows, hidden states are the same on
    every rank, so is the result, and the gradient of the hidden states is this rank's part of their sum.
    """
    held_bytes = predictions.held_bytes if torch.is_grad_enabled() else 0
    return _SelectedLogprobs.apply(hidden_KD, weight_VD, predictions, split, held_bytes)


class _SelectedLogprobs(torch.autograd.Function):
    """By hand, since autograd would keep several [K, V] tensors: d log p_k / d z_kv = [v = label_k] - p_kv."""

    @staticmethod
    def forward(
        context: Any,
        hidden_KD: torch.Tensor,
        weight_VD: torch.Tensor,
        predictions: Predictions,
        split: VocabularySplit | None,
        held_bytes: int,
    ) -> torch.Tensor:
        chunks = list(_chunks(len(hidden_KD), predictions.chunk_size))
        results, held = [], []
        for start, stop in chunks:
            logprob_KV = _log_softmax(hidden_KD, weight_VD, predictions, split, start, stop)
            chosen_K = _chosen(logprob_KV, predictions.label_K[start:stop], split)
            probability_KV = torch.exp(logprob_KV)
            if predictions.kept is not None:
                logprob_KV.masked_fill_(logprob_KV == -torch.inf, 0)  # p log p is 0 where p is
            entropy_K = -torch.einsum("kv,kv->k", probability_KV, logprob_KV)
            if split is not None:
                dist.all_reduce(chosen_K, group=split.group)
                dist.all_reduce(entropy_K, group=split.group)
            results.append(torch.stack([chosen_K, entropy_K]))
            held_bytes -= probability_KV.nbytes
            held.append(probability_KV if held_bytes >= 0 else None)
        context.save_for_backward(hidden_KD, weight_VD)
        context.predictions, context.split, context.chunks, context.held = predictions, split, chunks, held
        if not results:
            return hidden_KD.new_zeros((2, 0), dtype=torch.promote_types(hidden_KD.dtype, torch.float32))
        return torch.cat(results, dim=1)

    @staticmethod
    def backward(
        context: Any, gradient_2K: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        hidden_KD, weight_VD = context.saved_tensors
        predictions, split = context.predictions, context.split
        d_hidden_KD = torch.zeros_like(hidden_KD) if context.needs_input_grad[0] else None
        d_weight_VD = torch.zeros_like(weight_VD) if context.needs_input_grad[1] else None
        for index, (start, stop) in enumerate(context.chunks):
            p_KV, context.held[index] = context.held[index], None
            if p_KV is None:
                p_KV = _log_softmax(hidden_KD, weight_VD, predictions, split, start, stop).exp_()
            label_K = predictions.label_K[start:stop]
            column_K = label_K if split is None else label_K - split.start
            own_K = (column_K >= 0) & (column_K < p_KV.shape[1])
            one_K = own_K.to(p_KV.dtype)
            if predictions.kept is not None:  # the log-prob of a label that was not kept is constant
                part = predictions.kept.part(start, stop)
                first_id = 0 if split is None else split.start
                kept_KV = part.dense(first_id, p_KV.shape[1])
                one_K = one_K * kept_KV.gather(1, torch.where(own_K, column_K, 0)[:, None])[:, 0]
            d_KV = p_KV.neg_().scatter_add_(1, torch.where(own_K, column_K, 0)[:, None], one_K[:, None])
            d_KV *= (gradient_2K[0, start:stop] * predictions.inverse_temperature_K[start:stop])[:, None]
            d_KV = d_KV.to(weight_VD.dtype)
            if d_hidden_KD is not None:
                torch.mm(d_KV, weight_VD, out=d_hidden_KD[start:stop])
            if d_weight_VD is not None:
                d_weight_VD.addmm_(d_KV.T, hidden_KD[start:stop])
        return d_hidden_KD, d_weight_VD, None, None, None


def _chunks(predictions_K: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, predictions_K, size):
        yield start, min(start + size, predictions_K)


def _log_softmax(
    hidden_KD: torch.Tensor,
    weight_VD: torch.Tensor,
    predictions: Predictions,
    split: VocabularySplit | None,
    start: int,
    stop: int,
) -> torch.Tensor:
    """Log-probs [K, V] of the chunk over this rank's ids; -inf where an id was not kept."""
    logits_KV = at_least_float32(F.linear(hidden_KD[start:stop], weight_VD))
    logits_KV.mul_(predictions.inverse_temperature_K[start:stop, None])
    if predictions.kept is not None:
        kept = predictions.kept.part(start, stop)
        logits_KV.masked_fill_(~kept.dense(split.start if split is not None else 0, logits_KV.shape[1]), -torch.inf)
    if split is None:
        return logits_KV.sub_(torch.logsumexp(logits_KV, dim=-1, keepdim=True))
    highest_K = logits_KV.amax(dim=-1)
    dist.all_reduce(highest_K, op=dist.ReduceOp.MAX, group=split.group)
    total_K = torch.exp(logits_KV - highest_K[:, None]).sum(dim=-1)
    dist.all_reduce(total_K, group=split.group)
    return logits_KV.sub_((highest_K + torch.log(total_K))[:, None])


def _chosen(logprob_KV: torch.Tensor, label_K: torch.Tensor, split: VocabularySplit | None) -> torch.Tensor:
    """The labels' log-probs [K], 0 where another rank has the label."""
    if split is None:
        return logprob_KV.gather(1, label_K[:, None])[:, 0]
    column_K = label_K - split.start
    own_K = (column_K >= 0) & (column_K < logprob_KV.shape[1])
    return torch.where(own_K, logprob_KV.gather(1, torch.where(own_K, column_K, 0)[:, None])[:, 0], 0)


def at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    """The same in float32, or as they are in float64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
