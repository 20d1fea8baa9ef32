"""How a version's tensors lie in its buckets: plain records and the pure functions that plan and check them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
    """The local part, any strides."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where the local part starts in the full tensor, per dimension."""

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> TensorShard:
        """A tensor that this rank has in full."""
        return cls(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())


@dataclass(frozen=True)
class Piece:
    """A shard as it lies in a bucket: contiguous, row-major."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    bucket: str
    """The bucket's torchstore key."""
    start: int
    """Bytes from the bucket's start."""
    digest: str | None = None
    """Of the full tensor, where the piece is all of it."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        return self.shape == self.global_shape

    def view(self, bucket: torch.Tensor) -> torch.Tensor:
        """The piece as a tensor over ``bucket`` (uint8)."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return bucket[self.start : self.start + self.numel * dtype.itemsize].view(dtype).view(self.shape)


@dataclass(frozen=True)
class PartManifest:
    """What one rank has put for one version; invisible to readers until the version is committed."""

    version: int
    rank: int
    attempt: str
    """Names this put, so that parts of a failed attempt are never committed."""
    buckets: dict[str, int]
    """Bytes by torchstore key."""
    pieces: tuple[Piece, ...]


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

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets together."""
        return sum(self.buckets.values())

    def digests(self) -> dict[str, str]:
        """Digest of each full tensor, by HF name."""
        return {name: entry.digest for name, entry in self.tensors.items()}


class Slot(NamedTuple):
    """Where a shard goes."""

    bucket: int
    start: int


def plan_buckets(sizes: Sequence[int], bucket_bytes: int) -> tuple[list[Slot], list[int]]:
    """Pack shards of ``sizes`` bytes, in order, into buckets of at most ``bucket_bytes``.

    A shard larger than that gets a bucket of its own. Returns a slot per shard and the bytes of each bucket.
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


def group_pieces(parts: Iterable[PartManifest]) -> dict[str, list[Piece]]:
    """The pieces of each tensor, in order of their offsets, checked to cover it exactly.

    Raises:
        StoreError: naming the tensor that the parts disagree on, leave a hole in, or write twice.
    """
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for part in parts:
        for piece in part.pieces:
            pieces[piece.name].append(piece)
    for name, own in pieces.items():
        own.sort(key=lambda piece: piece.offsets)
        check_coverage(name, own)
    return dict(pieces)


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
            if overlap(one, other):
                raise StoreError(f"{name}: shards at {one.offsets} and {other.offsets} overlap: written twice")
    covered, needed = sum(piece.numel for piece in pieces), math.prod(shape)
    if covered != needed:
        raise StoreError(f"{name}: the shards hold {covered} of {needed} elements: a rank's part is missing")


def overlap(one: Piece, other: Piece) -> bool:
    """True when two pieces of a tensor share an element; two pieces of a scalar always do."""
    return all(
        max(start, other_start) < min(start + size, other_start + other_size)
        for start, size, other_start, other_size in zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
    )


def in_row_major_order(pieces: Sequence[Piece]) -> bool:
    """True when the bytes of ``pieces``, one after the other, are the full tensor's (split along dimension 0)."""
    return all(piece.shape[1:] == piece.global_shape[1:] for piece in pieces)


def build_manifest(version: int, parts: Sequence[PartManifest], digests: dict[str, str]) -> Manifest:
    """The manifest of a checked version; ``digests`` by tensor name."""
    tensors = {
        name: TensorEntry(name, own[0].dtype, own[0].global_shape, digests[name], tuple(own))
        for name, own in sorted(group_pieces(parts).items())
    }
    buckets = {key: nbytes for part in parts for key, nbytes in part.buckets.items()}
    return Manifest(version, version_digest(dict(digests)), tensors, buckets)


def digest_of_pieces(pieces: Sequence[Piece], buckets: dict[str, torch.Tensor]) -> str:
    """The digest of a full tensor out of its pieces, without assembling it where they are split along dimension 0."""
    dtype: torch.dtype = getattr(torch, pieces[0].dtype)
    shape = pieces[0].global_shape
    if in_row_major_order(pieces):
        return pieces_digest(dtype, shape, (piece.view(buckets[piece.bucket]) for piece in pieces))
    return pieces_digest(dtype, shape, [assemble(pieces, buckets)])


def assemble(
    pieces: Sequence[Piece], buckets: dict[str, torch.Tensor], into: torch.Tensor | None = None
) -> torch.Tensor:
    """Copy ``pieces`` to their places in a full tensor (``into``, or a new one)."""
    first = pieces[0]
    full = torch.empty(first.global_shape, dtype=getattr(torch, first.dtype)) if into is None else into
    for piece in pieces:
        region = full
        for dimension, (offset, size) in enumerate(zip(piece.offsets, piece.shape, strict=True)):
            region = region.narrow(dimension, offset, size)
        region.copy_(piece.view(buckets[piece.bucket]))
    return full
