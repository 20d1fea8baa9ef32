"""The writing side of a publication: one rank's shards into their buckets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from forge_async.store import torchstore_compat
from forge_async.store.digest import copy_digested
from forge_async.store.layout import (
    FullTensor,
    PartPlan,
    Piece,
    ShardSpec,
    TensorShard,
    even_runs,
    plan_part,
    unpacked_plan,
)
from forge_async.store.messages import Grant
from forge_async.store.shared_memory import attach, forget_segments

if TYPE_CHECKING:
    from forge_async.store.weight_store import WeightStore

Result = TypeVar("Result")

DELIVERIES = 6
"""Times that a rank reports what it has written: the store digests, and readers copy, the first while it writes the
last."""


class PartWriter:
    """Writes one rank's part of one version."""

    def __init__(self, store: WeightStore, version: int, rank: int) -> None:
        self.attempt: str | None = None
        """Known once the store has granted room."""
        self._store, self._version, self._rank = store, version, rank
        self._reports: list[asyncio.Future[None]] = []

    async def write(
        self, ranks: int, tensors: Sequence[TensorShard], layout: Sequence[FullTensor] | None
    ) -> dict[str, str]:
        """Ask for room and fill it; the arguments are those of :meth:`WeightStore.publish`.

        Returns:
            Digests of whole tensors; those that several ranks write are left to the store.
        """
        shards = [shard for shard in tensors if shard.tensor.numel()]
        near = self._store.shares_memory()
        data = self._plan(shards, layout if near else None)
        plan = unpacked_plan(data)
        grant: Grant = await self._store.request("begin", self._version, self._rank, ranks, data, near)
        self.attempt = grant.attempt
        forget_segments(grant.live_segments)
        if grant.segments is not None:
            buckets = [attach(segment) for segment in grant.segments]
        else:
            buckets = [torch.empty(size, dtype=torch.uint8) for size in plan.sizes]
        memory = dict(enumerate(buckets))
        loop = asyncio.get_running_loop()
        report = self._report if near else lambda written: None
        digests = await finish_in_thread(
            lambda: write_runs(plan, shards, memory, lambda written: loop.call_soon_threadsafe(report, written))
        )
        if not near:
            client = await torchstore_compat.client(self._store.name)
            for key, bucket in zip(grant.keys, buckets, strict=True):
                await client.put(key, bucket)
        return digests

    async def reported(self) -> None:
        """Wait for reports under way; what they might raise, ``finish`` raises too."""
        await asyncio.gather(*self._reports, return_exceptions=True)

    def _plan(self, shards: Sequence[TensorShard], layout: Sequence[FullTensor] | None) -> bytes:
        dtype = self._store.published_dtype
        specs = tuple(
            ShardSpec(
                shard.name,
                dtype(shard.tensor.dtype),
                tuple(shard.global_shape),
                tuple(shard.offsets),
                shard.part_shape,
            )
            for shard in shards
        )
        full = None if layout is None else tuple(tensor._replace(dtype=dtype(tensor.dtype)) for tensor in layout)
        return plan_part(specs, full, self._store.config.bucket_mib << 20)

    def _report(self, written: int) -> None:
        request = self._store.request("deliver", self._version, self._rank, self.attempt, written)
        self._reports.append(asyncio.ensure_future(request))


def write_runs(
    plan: PartPlan,
    shards: Sequence[TensorShard],
    memory: Mapping[int, torch.Tensor],
    report: Callable[[int], object],
) -> dict[str, str]:
    """Write all shards, and ``report`` now and then how many of them are written.

    Returns:
        Digests of those that are full tensors, by name.
    """
    digests: dict[str, str] = {}
    for first, last in even_runs([piece.numel for piece in plan.pieces], DELIVERIES):
        digests |= write_shards(plan.pieces[first:last], shards[first:last], memory)
        if last < len(shards):
            report(last)
    return digests


def write_shards(
    pieces: Sequence[Piece], shards: Sequence[TensorShard], memory: Mapping[int, torch.Tensor]
) -> dict[str, str]:
    """Copy shards to their places, cast to the pieces' dtypes; digests of those that are full tensors, by name.

    On CUDA in a stream of its own, beside training.
    """
    digests = {}
    device = next((shard.tensor.device for shard in shards if shard.tensor.is_cuda), None)
    stream = torch.cuda.Stream(device) if device is not None else None
    with torch.no_grad(), torch.cuda.stream(stream):
        for piece, shard in zip(pieces, shards, strict=True):
            target = piece.view(memory[piece.bucket])
            source = shard.tensor.detach()
            if source.is_cuda:
                source = source.to(target.dtype)  # there, so that half the bytes cross the bus
            if piece.is_whole:
                digests[piece.name] = copy_digested(target, source, piece.global_shape)
            else:
                target.view(source.shape).copy_(source)
    return digests


async def finish_in_thread(function: Callable[[], Result]) -> Result:
    """Run ``function`` in a thread; a cancellation waits for its end, since it writes shared memory."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise
