"""Attention over a packed row: which tokens attend to which, and how that is computed without a dense [T, T] mask.

A row is a list of *segments*, a tree with parents before their children and each subtree in one piece. A segment's
tokens attend causally to each other and to all of the segment's ancestors (the prompt that several completions share, a
turn that several forks share). Their positions continue the parent's.

Segments of like length are gathered into one padded batch, so that the cost is the sum of the segments' own squares
and not the square of the row; linear layers still see the row without padding. FlexAttention needs no more of the tree
than :func:`seen_until`: a key is seen by the queries from its own place on until its segment's subtree ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F


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

    The segments must cover the row: every token belongs to exactly one.
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
    for size in sorted(by_size):
        members = by_size[size]
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


def segment_attention(
    q_BLNH: torch.Tensor,
    k_BLNH: torch.Tensor,
    v_BLNH: torch.Tensor,
    layout: AttentionLayout,
    scale: float | None,
) -> torch.Tensor:
    """Attention of one row, B = 1. Keys and values may have fewer heads than queries (grouped-query attention)."""
    repeats = q_BLNH.shape[2] // k_BLNH.shape[2]
    q_TNH, k_TNH, v_TNH = q_BLNH[0], k_BLNH[0], v_BLNH[0]
    outputs = []
    for bucket in layout.buckets:
        q = _gather(q_TNH, bucket.query_SQ)
        k, v = _gather(k_TNH, bucket.key_SC), _gather(v_TNH, bucket.key_SC)
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        out_SNQH = F.scaled_dot_product_attention(q, k, v, attn_mask=bucket.mask_S1QC, scale=scale)
        outputs.append(out_SNQH.transpose(1, 2).flatten(0, 1))
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return flat.index_select(0, layout.output_T)[None]


def _gather(x_TNH: torch.Tensor, index_SL: torch.Tensor) -> torch.Tensor:
    """[T, N, H] at [S, L] -> [S, N, L, H]."""
    picked = x_TNH.index_select(0, index_SL.flatten())
    return picked.view(*index_SL.shape, *x_TNH.shape[1:]).transpose(1, 2)


def _size_class(length: int) -> int:
    return max(16, 1 << (length - 1).bit_length())
