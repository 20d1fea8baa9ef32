"""How a version's tensors lie in its buckets: plain records and the pure functions that plan and check them."""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from forge_async.store.digest import pieces_digest, version_digest
from forge_async.store.errors import StoreError

ALIGNMENT = 64
"""Bytes: every piece starts at a multiple, so that any dtype can be viewed in place."""


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
    bucket: str
    """The bucket's torchstore key."""
    start: int
    """Bytes from the bucket's start."""
    in_full: bool = False
    """Whether the full tensor begins at ``start``, with the piece at its offsets in it; else the piece lies there
    alone, row-major."""
    digest: str | None = None
    """Of the full tensor, where the piece is all of it and its writer has computed it."""

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
class Part:
    """What one rank has put for one version; invisible to readers until the version is committed."""

    version: int
    rank: int
    attempt: str
    """Names this put, so that parts of a failed attempt are never committed."""


@dataclass(frozen=True)
class TensorEntry:
    """One full tensor of a committed version."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    """A committed version."""

    version: int
    digest: str
    tensors: dict[str, TensorEntry]
    """By HF name."""
    buckets: dict[str, int] = field(default_factory=dict)
    """Bytes by torchstore key."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by the C pickler: Monarch's own, in Python, takes several times as long for so many records."""
        return _unpickled, (pickle.dumps(self.__dict__),)

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets together."""
        return sum(self.buckets.values())

    def buckets_of(self, regions: Mapping[str, Ranges | None] | None) -> list[str]:
        """Keys of the buckets that hold ``regions`` (tensor name -> ranges, None for all of it); None: every bucket."""
        if regions is None:
            return list(self.buckets)
        keys = {
            piece.bucket
            for name, ranges in regions.items()
            for piece in self.tensors[name].pieces
            if ranges is None or overlap(ranges_of(piece.offsets, piece.shape), ranges)
        }
        return [key for key in self.buckets if key in keys]

    def digests(self) -> dict[str, str]:
        """Digest of each full tensor, by HF name."""
        return {name: entry.digest for name, entry in self.tensors.items()}


def _unpickled(data: bytes) -> Manifest:
    return Manifest(**pickle.loads(data))


class Slot(NamedTuple):
    """Where a tensor or shard goes."""

    bucket: int
    start: int


def plan_buckets(sizes: Sequence[int], bucket_bytes: int) -> tuple[list[Slot], list[int]]:
    """Pack tensors or shards of ``sizes`` bytes, in order, into buckets of at most ``bucket_bytes``.

    One larger than that gets a bucket of its own. Returns a slot for each and the bytes of each bucket.
    """
    slots: list[Slot] = []
    buckets: list[int] = []
    for size in sizes:
        padded = -(-size // ALIGNMENT) * ALIGNMENT
        if not buckets or buckets[-1] + padded > bucket_bytes:
            buckets.append(0)
        slots.append(Slot(len(buckets) - 1, buckets[-1]))
        buckets[-1] += padded
    return slots, buckets


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


def in_row_major_order(pieces: Sequence[Piece]) -> bool:
    """True when the bytes of ``pieces``, one after the other, are the full tensor's (split along dimension 0)."""
    return all(piece.shape[1:] == piece.global_shape[1:] for piece in pieces)


def build_manifest(
    version: int, pieces: Mapping[str, Sequence[Piece]], buckets: dict[str, int], digests: dict[str, str]
) -> Manifest:
    """The manifest of a checked version; ``pieces`` and ``digests`` by tensor name."""
    tensors = {
        name: TensorEntry(name, own[0].dtype, own[0].global_shape, digests[name], tuple(own))
        for name, own in sorted(pieces.items())
    }
    return Manifest(version, version_digest(dict(digests)), tensors, buckets)


def digest_of_pieces(pieces: Sequence[Piece], buckets: Mapping[str, torch.Tensor]) -> str:
    """The digest of a full tensor out of its pieces, without assembling it where they are split along dimension 0."""
    dtype: torch.dtype = getattr(torch, pieces[0].dtype)
    shape = pieces[0].global_shape
    if lies_in_full(pieces):
        return pieces_digest(dtype, shape, [pieces[0].full_view(buckets[pieces[0].bucket])])
    if in_row_major_order(pieces):
        return pieces_digest(dtype, shape, (piece.view(buckets[piece.bucket]) for piece in pieces))
    return pieces_digest(dtype, shape, [assemble(pieces, buckets)])


def assemble(
    pieces: Sequence[Piece],
    buckets: Mapping[str, torch.Tensor],
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
