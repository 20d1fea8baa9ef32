"""What the registry answers to writers and readers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

from forge_async.store.shared_memory import Segment


@dataclass(frozen=True)
class Grant:
    """The answer to ``begin``: where a rank may write its part."""

    attempt: str
    """Names this part, so that what belongs to a failed attempt is never committed."""
    keys: list[str]
    """One per bucket: its torchstore key."""
    segments: list[Segment] | None
    """One per bucket; None: the client shares no memory with the store and puts the buckets itself."""
    counts: Segment | None
    """Where a rank that shares memory tells what it has written: :class:`WrittenCounts`."""
    live_segments: list[str]


@dataclass(frozen=True)
class Lease:
    """The answer to ``acquire``: a version that stays until released or expired."""

    lease_id: int
    version: int
    layout: bytes
    """A packed :class:`Layout`, the same bytes for every version."""
    keys: list[str]
    """One per bucket: its torchstore key."""
    segments: dict[int, Segment]
    """Of those buckets that lie in shared memory: a reader on this host needs nothing else."""
    live_segments: list[str]
    counts: Segment | None
    """Of a version whose ranks share memory with the store: :class:`WrittenCounts`."""
    digests: Digests | None
    """Once it is committed."""


@dataclass(frozen=True)
class Digests:
    """Of a committed version."""

    version: str
    tensors: dict[str, str]
    """By HF name."""


@dataclass(frozen=True)
class Committed:
    """The answer to ``finish``: a version that readers see."""

    version: int
    digest: str
    nbytes: int


@dataclass(frozen=True)
class VersionInfo:
    """A version in the store, for a person."""

    COLUMNS: ClassVar = ("version", "digest", "leases", "MiB", "committed")

    version: int
    digest: str | None
    """Of all its tensors; None, as the next ones, while it is written."""
    leases: int
    """Readers that hold it."""
    nbytes: int | None
    committed_at: float | None
    """Unix time."""

    def cells(self) -> tuple[Any, ...]:
        when = None if self.committed_at is None else time.strftime("%H:%M:%S", time.localtime(self.committed_at))
        size = None if self.nbytes is None else self.nbytes / 2**20
        return self.version, self.digest, self.leases, size, when
