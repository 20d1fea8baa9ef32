"""The writing side of a publication: one rank's shards into their buckets."""

from __future__ import annotations

import asyncio
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from forge_async.store import torchstore_compat
from forge_async.store.counts import WrittenCounts
from forge_async.store.digest import BLOCK_BYTES, DigestedCopy, nothing
from forge_async.store.layout import FullTensor, Piece, TensorShard, unpacked_plan
from forge_async.store.messages import Grant
from forge_async.store.part_plan import plan_part
from forge_async.store.shared_memory import attach, forget_segments

if TYPE_CHECKING:
    from forge_async.store.weight_store import WeightStore

Result = TypeVar("Result")


class PartWriter:
    """Writes one rank's part of one version."""

    def __init__(self, store: WeightStore, version: int, rank: int) -> None:
        self.attempt: str | None = None
        """Known once the store has granted room."""
        self._store, self._version, self._rank = store, version, rank

    async def write(self, ranks: int, tensors: Sequence[TensorShard], layout: Sequence[FullTensor] | None) -> bytes:
        """Ask for room and fill it; the arguments are those of :meth:`WeightStore.publish`.

        Returns:
            Digests of all pieces' own blocks (:attr:`Piece.blocks`), one after the other.
        """
        shards = [shard for shard in tensors if shard.tensor.numel()]
        near = self._store.shares_memory()
        config, full = self._store.config, None if layout is None or not near else tuple(layout)
        data = plan_part(tuple(shard.spec for shard in shards), full, config.bucket_mib << 20, config.dtype)
        plan = unpacked_plan(data)
        grant: Grant = await self._store.request(
            "begin", self._version, self._rank, ranks, data, os.getpid() if near else None
        )
        self.attempt = grant.attempt
        forget_segments(grant.live_segments)
        if grant.segments is not None:
            buckets = [attach(segment) for segment in grant.segments]
        else:
            buckets = [torch.empty(size, dtype=torch.uint8) for size in plan.sizes]
        counts = WrittenCounts(grant.counts) if grant.counts is not None else None

        def note(written: int) -> None:
            if counts is not None:
                counts.note(self._rank, written)

        digests = await finish_in_thread(lambda: write_shards(places_of(data, shards, buckets, grant), shards, note))
        if not near:
            client = await torchstore_compat.client(self._store.name)
            for key, bucket in zip(grant.keys, buckets, strict=True):
                await client.put(key, bucket)
        return digests


class Place:
    """Where one shard goes, in buckets that serve again: its views are made once."""

    def __init__(self, piece: Piece, bucket: torch.Tensor, source_shape: torch.Size) -> None:
        target = piece.view(bucket)
        self.name = piece.name
        self.source_shape = source_shape
        self._dtype = target.dtype
        self._copy: DigestedCopy | None = None
        if target.is_contiguous():
            first, end = piece.blocks
            row = math.prod(piece.global_shape[1:]) * target.itemsize
            before = first * BLOCK_BYTES - piece.offsets[0] * row if first else 0
            self._copy = DigestedCopy(target, source_shape, before, end - first)
        self._target = target.view(source_shape)

    def write(self, values: torch.Tensor, done: Callable[[int], object] = nothing) -> bytes:
        """Copy a shard's values, cast to the piece's dtype; the digests of its own blocks.

        ``done`` is called now and then with how many elements are copied.
        """
        if values.is_cuda:
            values = values.to(self._dtype)  # there, so that half the bytes cross the bus
        if self._copy is not None:
            return self._copy(values, done=done)
        self._target.copy_(values)
        done(values.numel())
        return b""


_places: dict[tuple[bytes, tuple[str, ...]], list[Place]] = {}
"""By plan, and the segments that a rank writes to; several ranks of one process use it at once."""


def places_of(plan: bytes, shards: Sequence[TensorShard], buckets: Sequence[torch.Tensor], grant: Grant) -> list[Place]:
    """The places of all shards, in order; remembered for as long as the store has the segments."""
    for known in list(_places):
        if not set(grant.live_segments).issuperset(known[1]):
            _places.pop(known, None)
    key = plan, tuple(segment.segment_id for segment in grant.segments or ())
    places = _places.get(key)
    if places is None or [place.source_shape for place in places] != [shard.tensor.shape for shard in shards]:
        pieces = unpacked_plan(plan).pieces
        places = [
            Place(piece, buckets[piece.bucket], shard.tensor.shape) for piece, shard in zip(pieces, shards, strict=True)
        ]
        if grant.segments:
            _places[key] = places
    return places


def write_shards(places: Sequence[Place], shards: Sequence[TensorShard], note: Callable[[int], object]) -> bytes:
    """Copy shards to their places, and ``note`` now and then how many elements are written.

    On CUDA in a stream of its own, beside training.

    Returns:
        Digests of all pieces' own blocks, one after the other.
    """

    def copied(before: int, elements: int) -> None:
        note(before + elements)

    digests = []
    device = next((shard.tensor.device for shard in shards if shard.tensor.is_cuda), None)
    stream = torch.cuda.Stream(device) if device is not None else None
    with torch.no_grad(), torch.cuda.stream(stream):
        written = 0
        for place, shard in zip(places, shards, strict=True):
            digests.append(place.write(shard.tensor, functools.partial(copied, written)))
            written += shard.tensor.numel()
    return b"".join(digests)


async def finish_in_thread(function: Callable[[], Result]) -> Result:
    """Run ``function`` in a thread; a cancellation waits for its end, since it writes shared memory."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise
