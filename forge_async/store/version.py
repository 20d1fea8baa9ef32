"""One version in the registry's tables: who has begun, what is written, how it ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import torch

from forge_async.mesh.processes import process_alive
from forge_async.store.errors import StoreError
from forge_async.store.layout import Layout, unpacked_layout
from forge_async.store.messages import Committed, Digests, VersionInfo
from forge_async.store.shared_memory import Segment, attach
from forge_async.store.version_digests import Blocks


@dataclass
class Buckets:
    """Room for a version, or for one rank's part of it."""

    keys: list[str]
    segments: list[Segment]
    """One per bucket, none where the rank puts its buckets itself."""


@dataclass
class Part:
    """What one rank was granted, and has written, for one version."""

    attempt: str
    plan: bytes
    own: Buckets | None
    """None: it writes to the buckets that all ranks have in common."""
    writer: int | None
    """The process that writes it, where that shares memory with the store."""
    digests: bytes = b""
    """Of its pieces' own blocks, once it has finished."""


class Version:
    """A version on its way from the first rank's ``begin`` to its deletion."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.parts: dict[int, Part] = {}
        self.common: Buckets | None = None
        self.outcomes: dict[int, str | None] = {}
        """What went wrong, or None, of each rank that has finished."""
        self.layout_data: bytes | None = None
        """Known when all ranks have begun."""
        self.arranged: asyncio.Future[None] | None = None
        self.counts: Segment | None = None
        """What the ranks that share memory have written."""
        self.digests: dict[str, str] = {}
        """Of full tensors, by HF name, once it is committed."""
        self.digesting: asyncio.Future[Blocks] | None = None
        """Of what no rank digests, beside the writing."""
        self.announced: asyncio.Future[None] | None = None
        """Done when torchstore has the segments' addresses; for the first reader that needs them there."""
        self.committed: Committed | None = None
        self.committed_at = 0.0
        """Unix time."""
        self.settled: asyncio.Future[Committed] = asyncio.get_running_loop().create_future()
        """What every rank's ``finish`` waits for."""
        self.settled.add_done_callback(lambda future: future.exception())  # perhaps nobody waits

    @property
    def layout(self) -> Layout:
        """Once it is known."""
        assert self.layout_data is not None
        return unpacked_layout(self.layout_data)

    @property
    def failed(self) -> bool:
        """Whether the attempt has ended without a commit."""
        return self.settled.done() and self.committed is None

    @property
    def within_reach(self) -> bool:
        """Whether it can be read while it is written: all of it lies in shared memory, and it is known where."""
        return self.layout_data is not None and len(self.segments()) == len(self.layout.sizes)

    def knows(self, rank: int) -> bool:
        """Whether the rank has begun or ended its part: if it begins another, that is a new attempt."""
        return rank in self.parts or rank in self.outcomes

    def ended(self) -> int | None:
        """A rank whose process has ended since it began, if there is one: a living one waits for the commit."""
        writers = {rank: part.writer for rank, part in self.parts.items() if part.writer is not None}
        return next((rank for rank, writer in writers.items() if not process_alive(writer)), None)

    def fail(self, message: str, kind: type[StoreError] = StoreError) -> None:
        """End the attempt, unless it has ended: ranks and readers that wait are told."""
        if not self.settled.done():
            self.settled.set_exception(kind(message))

    def all_buckets(self) -> list[Buckets]:
        """The common ones, then each rank's own, as in the layout."""
        found = [self.common, *(self.parts[rank].own for rank in sorted(self.parts))]
        return [buckets for buckets in found if buckets is not None]

    def keys(self) -> list[str]:
        """torchstore's key of each bucket."""
        return [key for buckets in self.all_buckets() for key in buckets.keys]

    def segments(self) -> dict[int, Segment]:
        """By bucket; of those in shared memory."""
        found: list[Segment | None] = []
        for buckets in self.all_buckets():
            found += buckets.segments or [None] * len(buckets.keys)
        return {index: segment for index, segment in enumerate(found) if segment is not None}

    def memory(self) -> dict[int, torch.Tensor]:
        """By bucket: those in shared memory, in this process's."""
        return {bucket: attach(segment) for bucket, segment in self.segments().items()}

    def info(self, leases: int) -> VersionInfo:
        if self.committed is None:
            return VersionInfo(self.number, None, leases, None, None)
        return VersionInfo(self.number, self.committed.digest, leases, self.committed.nbytes, self.committed_at)

    def committed_digests(self) -> Digests | None:
        """None before the commit."""
        return None if self.committed is None else Digests(self.committed.digest, self.digests)
