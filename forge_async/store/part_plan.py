"""Where one rank's shards go: planned once for each layout of shards, and replayed for every version."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from forge_async.store.digest import BLOCK_BYTES, number_of_blocks
from forge_async.store.errors import StoreError
from forge_async.store.layout import FullTensor, PartPlan, Piece, ShardSpec, packed

ALIGNMENT = 64
"""Bytes: every piece starts at a multiple, so that any dtype can be viewed in place."""


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


@functools.lru_cache(maxsize=8)
def plan_part(
    shards: tuple[ShardSpec, ...], full: tuple[FullTensor, ...] | None, bucket_bytes: int, dtype: str = "auto"
) -> bytes:
    """Plan one rank's part; as bytes, see :class:`PartPlan`.

    Args:
        dtype: ``store.dtype``, of floating-point tensors; auto: their own.
        full: every tensor of the version, where the ranks have common buckets; else each shard is packed by itself.
    Raises:
        StoreError: a shard is not part of any tensor in ``full``.
    """
    shards = tuple(shard._replace(dtype=published_dtype(shard.dtype, dtype)) for shard in shards)
    if full is not None:
        full = tuple(tensor._replace(dtype=published_dtype(tensor.dtype, dtype)) for tensor in full)
    packs = full if full is not None else [FullTensor(shard.name, shard.dtype, shard.shape) for shard in shards]
    slots, sizes = plan_buckets([tensor.nbytes for tensor in packs], bucket_bytes)
    if full is not None:
        places = {tensor.name: (tensor, slot) for tensor, slot in zip(full, slots, strict=True)}
        slots = [place_of(shard, places) for shard in shards]
    pieces = tuple(
        Piece(
            shard.name,
            str(shard.dtype).removeprefix("torch."),
            shard.global_shape,
            shard.offsets,
            shard.shape,
            slot.bucket,
            slot.start,
            in_full=full is not None,
            blocks=own_blocks(shard, in_full=full is not None),
        )
        for shard, slot in zip(shards, slots, strict=True)
    )
    return packed(PartPlan(pieces, tuple(sizes), common=full is not None))


def place_of(shard: ShardSpec, places: Mapping[str, tuple[FullTensor, Slot]]) -> Slot:
    """Where the full tensor of ``shard`` goes."""
    full, slot = places.get(shard.name, (None, Slot(0, 0)))
    if full is None or full.shape != shard.global_shape or full.dtype != shard.dtype:
        raise StoreError(
            f"{shard.name}: the shard is of a {shard.dtype} tensor of shape {shard.global_shape}, the layout has "
            f"{'no such tensor' if full is None else f'a {full.dtype} tensor of shape {full.shape}'}"
        )
    return slot


def published_dtype(dtype: torch.dtype, setting: str) -> torch.dtype:
    """What tensors of ``dtype`` are published in by ``store.dtype``."""
    if setting == "auto" or not dtype.is_floating_point:
        return dtype
    published: torch.dtype = getattr(torch, setting)
    return published


def own_blocks(shard: ShardSpec, in_full: bool) -> tuple[int, int]:
    """:attr:`Piece.blocks` of a shard: all of a full tensor, none where rows are cut."""
    nbytes = math.prod(shard.global_shape) * shard.dtype.itemsize
    if shard.shape == shard.global_shape:
        return 0, number_of_blocks(nbytes)
    if not in_full or shard.shape[1:] != shard.global_shape[1:]:
        return 0, 0
    row = nbytes // shard.global_shape[0]
    start, end = shard.offsets[0] * row, (shard.offsets[0] + shard.shape[0]) * row
    first, last = -(-start // BLOCK_BYTES), number_of_blocks(end) if end == nbytes else end // BLOCK_BYTES
    return first, max(first, last)
