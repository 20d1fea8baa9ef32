"""How a version's tensors lie in its buckets: plain records, and the pure functions that combine and check them."""

from __future__ import annotations

import functools
import itertools
import math
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from forge_async.store.errors import StoreError


class ShardSpec(NamedTuple):
    """A shard without its values."""

    name: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorShard:
    """One rank's part of a full tensor, under its HF name."""

    name: str
    tensor: torch.Tensor
    """The local part, any strides and device."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where the local part starts in the full tensor, per dimension."""
    shape: tuple[int, ...] | None = None
    """Of the local part, where ``tensor`` is a view of other dimensions with its elements in the same order."""

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The local part's shape."""
        return tuple(self.tensor.shape) if self.shape is None else self.shape

    @functools.cached_property
    def spec(self) -> ShardSpec:
        """Without the values; made once, as the same shards are published again and again."""
        offsets, shape = tuple(self.offsets), tuple(self.part_shape)
        return ShardSpec(self.name, self.tensor.dtype, tuple(self.global_shape), offsets, shape)

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> TensorShard:
        """A tensor that this rank has in full."""
        return cls(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())


class FullTensor(NamedTuple):
    """A tensor of a version as a whole."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Ranges = Sequence[tuple[int, int]]
"""A region of a tensor: [start, end) per dimension."""


@dataclass(frozen=True)
class Piece:
    """A shard as it lies in a bucket."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    bucket: int
    """Which of the buckets holds it."""
    start: int
    """Bytes from the bucket's start."""
    in_full: bool = False
    """Whether the full tensor begins at ``start``, with the piece at its offsets in it; else the piece lies there
    alone, row-major."""
    blocks: tuple[int, int] = (0, 0)
    """[first, end) of the full tensor's blocks (``digest.py``) that lie in the piece alone, so that its rank can digest
    them."""
    written: tuple[int, int] = (0, 0)
    """In a layout: (rank, elements that it has written of all its pieces, once it has written this one)."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        return self.shape == self.global_shape

    def view(self, bucket: torch.Tensor) -> torch.Tensor:
        """The piece as a tensor over ``bucket`` (uint8)."""
        if not self.in_full:
            return self._over(bucket, self.shape)
        return narrow(self.full_view(bucket), ranges_of(self.offsets, self.shape))

    def full_view(self, bucket: torch.Tensor) -> torch.Tensor:
        """The full tensor that the piece is part of, where it lies in one (``in_full``, or the piece is whole)."""
        return self._over(bucket, self.global_shape)

    def _over(self, bucket: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, self.dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        return bucket[self.start : self.start + nbytes].view(dtype).view(shape)


@dataclass(frozen=True)
class TensorEntry:
    """Where one full tensor lies."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @functools.cached_property
    def runs(self) -> tuple[tuple[int, int, int, int], ...]:
        """(First element, end, rank, elements that the rank has written at the end) of each piece; a piece that is no
        run of the tensor's elements counts as one that ends before the first."""
        row = math.prod(self.shape[1:])
        uncut = [piece.shape[1:] == self.shape[1:] and bool(self.shape) for piece in self.pieces]
        starts = [piece.offsets[0] * row if run else 0 for piece, run in zip(self.pieces, uncut, strict=True)]
        sizes = [piece.numel if run else 0 for piece, run in zip(self.pieces, uncut, strict=True)]
        return tuple(
            (start, start + size, *piece.written) for piece, start, size in zip(self.pieces, starts, sizes, strict=True)
        )

    def needs(self, elements: int | None = None) -> list[tuple[int, int]]:
        """(Rank, elements that it must have written) for the first ``elements`` to be there, or (None) all."""
        if elements is None:
            return [piece.written for piece in self.pieces]
        return [(rank, written - max(0, end - elements)) for start, end, rank, written in self.runs if start < elements]

    @property
    def nbytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


@dataclass(frozen=True)
class PartPlan:
    """Where one rank's shards go: the same for every version, so made once; it travels as :func:`packed` bytes."""

    pieces: tuple[Piece, ...]
    """In the order in which they are written; ``bucket`` counts this plan's own."""
    sizes: tuple[int, ...]
    """Bytes of each bucket."""
    common: bool
    """Whether all ranks that have common buckets write to the same ones."""


@dataclass(frozen=True)
class Layout:
    """Where all ranks' shards go, checked to make whole tensors; the same for every version too."""

    tensors: dict[str, TensorEntry]
    """By HF name."""
    sizes: tuple[int, ...]
    """Bytes of each bucket: first the common ones, then each rank's own."""


@dataclass(frozen=True)
class Manifest:
    """A version that a reader holds."""

    version: int
    layout: Layout
    digest: str
    """Of the version; empty while it is being written."""
    digests: dict[str, str]
    """Of each full tensor, by HF name."""

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        """By HF name."""
        return self.layout.tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets together."""
        return sum(self.layout.sizes)


def buckets_of(layout: Layout, regions: Mapping[str, Ranges | None] | None) -> list[int]:
    """The buckets that hold ``regions`` (tensor name -> ranges, None for all of it); None: every bucket in use."""
    wanted = regions if regions is not None else dict.fromkeys(layout.tensors)
    return sorted(
        {
            piece.bucket
            for name, ranges in wanted.items()
            for piece in layout.tensors[name].pieces
            if ranges is None or overlap(ranges_of(piece.offsets, piece.shape), ranges)
        }
    )


def packed(plan: PartPlan | Layout) -> bytes:
    """As bytes: many small records, which Monarch's own pickler, in Python, takes ten times as long for."""
    return pickle.dumps(plan)


@functools.lru_cache(maxsize=8)
def unpacked_plan(data: bytes) -> PartPlan:
    """What :func:`packed` has made bytes of."""
    plan: PartPlan = pickle.loads(data)
    return plan


@functools.lru_cache(maxsize=8)
def unpacked_layout(data: bytes) -> Layout:
    """What :func:`packed` has made bytes of."""
    layout: Layout = pickle.loads(data)
    return layout


@functools.lru_cache(maxsize=8)
def combined(plans: tuple[bytes, ...]) -> bytes:
    """The layout that all ranks' plans make, in order of rank; as bytes, like the plans.

    Raises:
        StoreError: naming the tensor that they disagree on, leave a hole in, or write twice.
    """
    parts = [unpacked_plan(plan) for plan in plans]
    sizes = next((part.sizes for part in parts if part.common), ())
    pieces: list[Piece] = []
    for rank, part in enumerate(parts):
        before = 0 if part.common else len(sizes)
        ends = itertools.accumulate(piece.numel for piece in part.pieces)
        pieces += [
            replace(piece, bucket=piece.bucket + before, written=(rank, end))
            for piece, end in zip(part.pieces, ends, strict=True)
        ]
        sizes += () if part.common else part.sizes
    tensors = {
        name: TensorEntry(own[0].dtype, own[0].global_shape, tuple(own))
        for name, own in sorted(group_pieces(pieces).items())
    }
    return packed(Layout(tensors, sizes))


def group_pieces(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    """The pieces of each tensor, in order of their offsets, checked to cover it exactly.

    Raises:
        StoreError: naming the tensor that the pieces disagree on, leave a hole in, or write twice.
    """
    grouped: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        grouped[piece.name].append(piece)
    for name, own in grouped.items():
        own.sort(key=lambda piece: piece.offsets)
        check_coverage(name, own)
    return dict(grouped)


def check_coverage(name: str, pieces: Sequence[Piece]) -> None:
    """Raise unless ``pieces`` tile the full tensor: each element exactly once."""
    shape, dtype = pieces[0].global_shape, pieces[0].dtype
    for piece in pieces:
        if (piece.global_shape, piece.dtype) != (shape, dtype):
            raise StoreError(
                f"{name}: one shard is of a {dtype} tensor of shape {shape}, another of a {piece.dtype} tensor of "
                f"shape {piece.global_shape}"
            )
        ends = [offset + size for offset, size in zip(piece.offsets, piece.shape, strict=True)]
        if any(end > size for end, size in zip(ends, shape, strict=True)):
            raise StoreError(f"{name}: the shard {piece.shape} at {piece.offsets} reaches beyond the shape {shape}")
    for index, one in enumerate(pieces):
        for other in pieces[index + 1 :]:
            if overlap(ranges_of(one.offsets, one.shape), ranges_of(other.offsets, other.shape)):
                raise StoreError(f"{name}: shards at {one.offsets} and {other.offsets} overlap: written twice")
    covered, needed = sum(piece.numel for piece in pieces), math.prod(shape)
    if covered != needed:
        raise StoreError(f"{name}: the shards hold {covered} of {needed} elements: a rank's part is missing")


def ranges_of(offsets: Sequence[int], shape: Sequence[int]) -> Ranges:
    """The region of ``shape`` at ``offsets``."""
    return [(offset, offset + size) for offset, size in zip(offsets, shape, strict=True)]


def overlap(one: Ranges, other: Ranges) -> bool:
    """True when two regions of a tensor share an element; two regions of a scalar always do."""
    return all(
        max(start, other_start) < min(end, other_end)
        for (start, end), (other_start, other_end) in zip(one, other, strict=True)
    )


def narrow(tensor: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """The region of ``tensor`` as a view."""
    for dimension, (start, end) in enumerate(ranges):
        tensor = tensor.narrow(dimension, start, end - start)
    return tensor


def lies_in_full(pieces: Sequence[Piece]) -> bool:
    """True when the full tensor that ``pieces`` make lies in one place, row-major."""
    first = pieces[0]
    return first.is_whole or all(
        piece.in_full and (piece.bucket, piece.start) == (first.bucket, first.start) for piece in pieces
    )


def assemble(
    pieces: Sequence[Piece],
    buckets: Mapping[int, torch.Tensor],
    into: torch.Tensor | None = None,
    ranges: Ranges | None = None,
) -> torch.Tensor:
    """Copy what ``pieces`` hold of a region (``ranges``; default: the full tensor) to its place in a tensor of the
    region's shape (``into``, or a new one)."""
    first = pieces[0]
    wanted = ranges if ranges is not None else ranges_of([0] * len(first.global_shape), first.global_shape)
    shape = [end - start for start, end in wanted]
    region = torch.empty(shape, dtype=getattr(torch, first.dtype)) if into is None else into
    for piece in pieces:
        own = ranges_of(piece.offsets, piece.shape)
        if not overlap(own, wanted):
            continue
        shared = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(own, wanted, strict=True)]
        inside = [(a - start, b - start) for (a, b), (start, _) in zip(shared, own, strict=True)]
        outside = [(a - start, b - start) for (a, b), (start, _) in zip(shared, wanted, strict=True)]
        narrow(region, outside).copy_(narrow(piece.view(buckets[piece.bucket]), inside))
    return region
