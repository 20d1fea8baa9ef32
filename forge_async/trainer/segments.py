"""Attention over a packed row: which tokens attend to which, and how that is computed without a dense [T, T] mask.

A row is a list of *segments*, a tree with parents before their children and each subtree in one piece. A segment's
tokens attend causally to each other and to all of the segment's ancestors (the prompt that several completions share, a
turn that several forks share). Their positions continue the parent's.

Segments of like length are gathered into padded batches, so that the cost is the sum of the segments' own squares
and not the square of the row; linear layers still see the row without padding. A prompt's keys are gathered once per
completion: no batch gathers more keys than the row has, and none is kept for the backward pass, which gathers again.

FlexAttention needs no more of the tree than :func:`seen_until`: a key is seen by the queries from its own place on
until its segment's subtree ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

LEAST_KEYS = 1024
"""Keys that a batch may gather however short the row."""


@dataclass(frozen=True)
class Segment:
    """A stretch of a row, in row indices."""

    start: int
    length: int
    parent: int = -1
    """Index of the segment that it continues in the row's list; -1 starts a document of its own."""


def ancestors(segments: Sequence[Segment], index: int) -> list[Segment]:
    """The segments that segment ``index`` continues, root first."""
    found: list[Segment] = []
    while (index := segments[index].parent) >= 0:
        found.append(segments[index])
    return found[::-1]


def seen_until(segments: Sequence[Segment]) -> np.ndarray:
    """int64 [T]: token k is attended to by tokens k to before ``seen_until[k]``, and by no others."""
    ends = [segment.start + segment.length for segment in segments]
    for index in reversed(range(len(segments))):
        parent = segments[index].parent
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[index])
    return np.repeat(np.array(ends, dtype=np.int64), [segment.length for segment in segments])


@dataclass(frozen=True)
class AttentionBucket:
    """Segments computed together: S segments, padded to Q queries and C keys."""

    query_SQ: torch.Tensor
    """int64 [S, Q]: row index of each query; padding repeats the segment's first token."""
    key_SC: torch.Tensor
    """int64 [S, C]: row index of each key, prefix first; padding repeats the first."""
    mask_S1QC: torch.Tensor
    """bool [S, 1, Q, C]: True where the query attends to the key. No row of it is all False."""


@dataclass(frozen=True)
class AttentionLayout:
    """A row's attention. ``output_T`` int64 [T] finds each row token among the buckets' flattened queries."""

    buckets: tuple[AttentionBucket, ...]
    output_T: torch.Tensor

    def to(self, device: torch.device | str) -> AttentionLayout:
        if str(device) == "cpu":
            return self
        moved = tuple(
            AttentionBucket(bucket.query_SQ.to(device), bucket.key_SC.to(device), bucket.mask_S1QC.to(device))
            for bucket in self.buckets
        )
        return AttentionLayout(moved, self.output_T.to(device))


def attention_layout(segments: Sequence[Segment]) -> AttentionLayout:
    """Group a row's segments by rounded-up lengths (powers of two, at least 16) and index them.

    A group that would gather more keys than the row has tokens, and more than :data:`LEAST_KEYS`, is cut. The segments
    must cover the row: every token belongs to exactly one.
    """
    above = [ancestors(segments, index) for index in range(len(segments))]
    prefix = [sum(segment.length for segment in chain) for chain in above]
    by_size: dict[tuple[int, int], list[int]] = {}
    for index, segment in enumerate(segments):
        size = (_size_class(segment.length), _size_class(prefix[index] + segment.length))
        by_size.setdefault(size, []).append(index)
    total = sum(segment.length for segment in segments)
    output = np.full(total, -1, dtype=np.int64)
    buckets = []
    offset = 0
    for members in _cut(by_size, max(total, LEAST_KEYS)):
        queries = max(segments[index].length for index in members)
        keys = max(prefix[index] + segments[index].length for index in members)
        query = np.empty((len(members), queries), dtype=np.int64)
        key = np.empty((len(members), keys), dtype=np.int64)
        reach = np.zeros((len(members), queries), dtype=np.int64)  # the last key each query may see
        for row, index in enumerate(members):
            chain = [*above[index], segments[index]]
            seen = np.concatenate([np.arange(part.start, part.start + part.length) for part in chain])
            own = seen[prefix[index] :]
            query[row], key[row] = own[0], seen[0]
            query[row, : len(own)] = own
            key[row, : len(seen)] = seen
            reach[row, : len(own)] = prefix[index] + np.arange(len(own))
            output[own] = offset + row * queries + np.arange(len(own))
        mask = np.arange(keys)[None, None, :] <= reach[:, :, None]
        buckets.append(AttentionBucket(torch.from_numpy(query), torch.from_numpy(key), torch.from_numpy(mask)[:, None]))
        offset += len(members) * queries
    if (output < 0).any():
        raise ValueError("the segments of a row must cover every token of it exactly once")
    return AttentionLayout(tuple(buckets), torch.from_numpy(output))


def _cut(by_size: dict[tuple[int, int], list[int]], most_keys: int) -> Iterator[list[int]]:
    """Groups that gather at most ``most_keys``, or a single segment; the smallest first."""
    for size in sorted(by_size):
        count = max(1, most_keys // size[1])
        for first in range(0, len(by_size[size]), count):
            yield by_size[size][first : first + count]


def segment_attention(
    q_BLNH: torch.Tensor,
    k_BLNH: torch.Tensor,
    v_BLNH: torch.Tensor,
    layout: AttentionLayout,
    scale: float | None,
) -> torch.Tensor:
    """Attention of one row, B = 1. Keys and values may have fewer heads than queries (grouped-query attention)."""
    return _SegmentAttention.apply(q_BLNH[0], k_BLNH[0], v_BLNH[0], layout, scale)[None]


class _SegmentAttention(torch.autograd.Function):
    """Keeps the row's queries, keys and values alone: what is gathered of them is more, by far with shared prefixes."""

    @staticmethod
    def forward(
        context: Any,
        q_TNH: torch.Tensor,
        k_TNH: torch.Tensor,
        v_TNH: torch.Tensor,
        layout: AttentionLayout,
        scale: float | None,
    ) -> torch.Tensor:
        context.save_for_backward(q_TNH, k_TNH, v_TNH)
        context.layout, context.scale = layout, scale
        outputs = [
            _attend(*_gathered(q_TNH, k_TNH, v_TNH, bucket), bucket, scale).transpose(1, 2).flatten(0, 1)
            for bucket in layout.buckets
        ]
        return _in_row(outputs, layout)

    @staticmethod
    @once_differentiable
    def backward(context: Any, d_out_TNH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        q_TNH, k_TNH, v_TNH = context.saved_tensors
        layout: AttentionLayout = context.layout
        # Many segments add to a shared key's gradient: not in bfloat16.
        wide = torch.promote_types(k_TNH.dtype, torch.float32)
        d_k_TM, d_v_TM = (torch.zeros_like(x, dtype=wide).flatten(1) for x in (k_TNH, v_TNH))
        # Zeros where queries are padding, so that these add nothing.
        d_flat = d_out_TNH.new_zeros((sum(b.query_SQ.numel() for b in layout.buckets), *d_out_TNH.shape[1:]))
        d_flat[layout.output_T] = d_out_TNH
        d_queries = []
        parts = d_flat.split([bucket.query_SQ.numel() for bucket in layout.buckets])
        for bucket, d_part in zip(layout.buckets, parts, strict=True):
            q, k, v = (x.requires_grad_() for x in _gathered(q_TNH, k_TNH, v_TNH, bucket))
            with torch.enable_grad():
                out_SNQH = _attend(q, k, v, bucket, context.scale)
            d_out_SNQH = d_part.view(*bucket.query_SQ.shape, *d_part.shape[1:]).transpose(1, 2)
            d_q, d_k, d_v = torch.autograd.grad(out_SNQH, (q, k, v), d_out_SNQH)
            d_queries.append(d_q.transpose(1, 2).flatten(0, 1))
            for d_TM, d_SNCH in ((d_k_TM, d_k), (d_v_TM, d_v)):
                d_TM.index_add_(0, bucket.key_SC.flatten(), d_SNCH.transpose(1, 2).flatten(0, 1).flatten(1).to(wide))
        d_k_TNH, d_v_TNH = (d.to(k_TNH.dtype).view_as(k_TNH) for d in (d_k_TM, d_v_TM))
        return _in_row(d_queries, layout), d_k_TNH, d_v_TNH, None, None


def _gathered(
    q_TNH: torch.Tensor, k_TNH: torch.Tensor, v_TNH: torch.Tensor, bucket: AttentionBucket
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[S, N, Q, H], and twice [S, N, C, H]."""
    return _gather(q_TNH, bucket.query_SQ), _gather(k_TNH, bucket.key_SC), _gather(v_TNH, bucket.key_SC)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bucket: AttentionBucket, scale: float | None
) -> torch.Tensor:
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda:  # whose kernels take either a mask or fewer heads of keys
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bucket.mask_S1QC, scale=scale, enable_gqa=grouped)


def _in_row(outputs: list[torch.Tensor], layout: AttentionLayout) -> torch.Tensor:
    """The buckets' flattened queries -> [T, N, H]."""
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return flat.index_select(0, layout.output_T)


def _gather(x_TNH: torch.Tensor, index_SL: torch.Tensor) -> torch.Tensor:
    """[T, N, H] at [S, L] -> [S, N, L, H]."""
    picked = x_TNH.index_select(0, index_SL.flatten())
    return picked.view(*index_SL.shape, *x_TNH.shape[1:]).transpose(1, 2)


def _size_class(length: int) -> int:
    return max(16, 1 << (length - 1).bit_length())
