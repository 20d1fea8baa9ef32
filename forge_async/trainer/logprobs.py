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

from forge_async.types import SamplingMask

HELD_BYTES = 192 * 2**20
"""1024 predictions over 49152 ids; a fraction of what the activations of as many tokens take."""


BLOCK_BYTES = 4 * 2**20
"""Of logits that a processor works on at a time."""


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

    Of a model in bfloat16 the logits are float32 too, and the gradient of the projection adds up in float32 over chunks
    and is rounded once.

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
        wide = torch.promote_types(hidden_KD.dtype, torch.float32)
        results, held = [hidden_KD.new_zeros((2, 0), dtype=wide)], []
        factors = _factor(hidden_KD), _factor(weight_VD)
        for start, stop in chunks:
            exp_KV, total_K, result_2K = _exponentials(*factors, predictions, split, start, stop)
            results.append(result_2K)
            held_bytes -= exp_KV.nbytes
            held.append((exp_KV, total_K, result_2K) if held_bytes >= 0 else None)
            del exp_KV
        context.save_for_backward(hidden_KD, weight_VD)
        context.predictions, context.split, context.chunks, context.held = predictions, split, chunks, held
        return torch.cat(results, dim=1)

    @staticmethod
    def backward(
        context: Any, gradient_2K: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        given_KD, given_VD = context.saved_tensors
        hidden_KD, weight_VD = _factor(given_KD), _factor(given_VD)
        predictions, split = context.predictions, context.split
        wide = torch.promote_types(given_VD.dtype, torch.float32)
        d_hidden_KD = torch.zeros_like(hidden_KD) if context.needs_input_grad[0] else None
        d_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if context.needs_input_grad[1] else None
        for index, (start, stop) in enumerate(context.chunks):
            found, context.held[index] = context.held[index], None
            if found is None:
                found = _exponentials(hidden_KD, weight_VD, predictions, split, start, stop)
            exp_KV, total_K, result_2K = found
            own_K, column_K = _columns(predictions.label_K[start:stop], exp_KV.shape[1], split)
            if predictions.kept is not None:  # the log-prob of a label that was not kept is constant
                own_K = own_K & (result_2K[0] > -torch.inf)
            scale_K = gradient_2K[0, start:stop] * predictions.inverse_temperature_K[start:stop]
            exp_KV.mul_((-scale_K / total_K)[:, None])
            exp_KV.scatter_add_(1, column_K[:, None], torch.where(own_K, scale_K, 0)[:, None])
            d_KV = exp_KV.to(weight_VD.dtype)
            del exp_KV, found
            if d_hidden_KD is not None:
                torch.mm(d_KV, weight_VD, out=d_hidden_KD[start:stop])
            if d_weight_VD is not None:
                if d_KV.dtype == wide:
                    d_weight_VD.addmm_(d_KV.T, hidden_KD[start:stop])
                else:
                    d_weight_VD += _product(d_KV.T, hidden_KD[start:stop])
        d_hidden_KD, d_weight_VD = (
            None if gradient is None else gradient.to(given.dtype)
            for gradient, given in ((d_hidden_KD, given_KD), (d_weight_VD, given_VD))
        )
        return d_hidden_KD, d_weight_VD, None, None, None


def _factor(matrix: torch.Tensor) -> torch.Tensor:
    """What products are computed of: on a CPU float32 for bfloat16, since a CPU's product of these is rounded to it."""
    return matrix if matrix.is_cuda else at_least_float32(matrix)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in float32, also of bfloat16 (on CUDA, which adds up in float32 in any case), or as they are in float64."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.dtype == torch.bfloat16 else a @ b


def _chunks(count: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, size):
        yield start, min(start + size, count)


def _columns(label_K: torch.Tensor, columns: int, split: VocabularySplit | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether this rank has each label, bool [K], and in which column, int64 [K]; 0 where it has not."""
    column_K = label_K if split is None else label_K - split.start
    own_K = (column_K >= 0) & (column_K < columns)
    return own_K, torch.where(own_K, column_K, 0)


def _exponentials(
    hidden_KD: torch.Tensor,
    weight_VD: torch.Tensor,
    predictions: Predictions,
    split: VocabularySplit | None,
    start: int,
    stop: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a chunk: exp(z - max z) [K, V] over this rank's ids, its sum [K] over all, and log-probs and entropies [2, K].

    The logits are overwritten block by block, so that one [K, V] tensor is all there is and a block stays in the
    processor's cache.
    """
    exp_KV = _product(hidden_KD[start:stop], weight_VD.T)
    if predictions.kept is not None:
        kept = predictions.kept.part(start, stop)
        exp_KV.masked_fill_(~kept.dense(split.start if split is not None else 0, exp_KV.shape[1]), -torch.inf)
    inverse_K = predictions.inverse_temperature_K[start:stop].to(exp_KV.dtype)
    highest_K = exp_KV.amax(dim=-1) * inverse_K
    if split is not None:
        dist.all_reduce(highest_K, op=dist.ReduceOp.MAX, group=split.group)
    own_K, column_K = _columns(predictions.label_K[start:stop], exp_KV.shape[1], split)
    chosen_K = torch.where(own_K, exp_KV.gather(1, column_K[:, None])[:, 0] * inverse_K - highest_K, 0)
    total_K, moment_K = torch.empty_like(highest_K), torch.empty_like(highest_K)
    rows = len(exp_KV) if exp_KV.is_cuda else max(1, BLOCK_BYTES // max(1, exp_KV[:1].nbytes))
    for first, last in _chunks(len(exp_KV), rows):
        block_KV = exp_KV[first:last]
        centred_KV = (block_KV * inverse_K[first:last, None]).sub_(highest_K[first:last, None])
        torch.exp(centred_KV, out=block_KV)
        torch.sum(block_KV, dim=-1, out=total_K[first:last])
        # Where the exponential is 0, its logit may be minus infinity: the product is 0.
        moment_K[first:last] = torch.einsum("kv,kv->k", block_KV, centred_KV.clamp_(min=-1e4))
    if split is not None:
        sums_3K = torch.stack([chosen_K, total_K, moment_K])
        dist.all_reduce(sums_3K, group=split.group)
        chosen_K, total_K, moment_K = sums_3K
    log_total_K = torch.log(total_K)
    return exp_KV, total_K, torch.stack([chosen_K - log_total_K, log_total_K - moment_K / total_K])


def at_least_float32(values: torch.Tensor) -> torch.Tensor:
    """The same in float32, or as they are in float64."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
