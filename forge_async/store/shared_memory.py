"""Shared memory without names: segments are memory files that the kernel frees with their last user.

A segment is a ``memfd`` of the store's process, mapped by others through ``/proc/<pid>/fd/<n>``. It survives the
kill -9 of a trainer or a reader, has no entry in ``/dev/shm`` (whose size containers limit, often to 64 MiB), and
cannot be left behind, whoever is killed.
"""

from __future__ import annotations

import errno
import functools
import itertools
import mmap
import os
import resource
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from forge_async.store.errors import StoreError

_numbers = itertools.count()


@dataclass(frozen=True)
class Segment:
    """The address of a segment; valid on the host of its owner while that lives."""

    segment_id: str
    owner_pid: int
    descriptor: int
    """File descriptor number in the owner's process."""
    nbytes: int


@dataclass(frozen=True)
class SegmentView:
    """A tensor that lies in a segment: all that travels between processes."""

    segment: Segment
    offset: int
    """Bytes from the segment's start."""
    shape: tuple[int, ...]
    dtype: torch.dtype


_mapped: dict[str, tuple[Segment, torch.Tensor]] = {}
"""Segments mapped into this process, by id, as uint8 [nbytes]."""


@functools.cache
def allow_many_files() -> None:
    """Raise this process's limit of open files, as far as it may: each mapped segment holds one or two, and most
    systems begin with 1024, which a large model's versions exceed."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, min(most, 1 << 16)), most))


def create_segment(nbytes: int) -> Segment:
    """Make a segment owned by this process, zero-filled."""
    allow_many_files()
    descriptor = os.memfd_create("forge-async-weights", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        segment = Segment(f"{os.getpid()}-{next(_numbers)}", os.getpid(), descriptor, nbytes)
        _map(segment, descriptor, populate=False)  # the writer's mapping makes the pages
    except BaseException:
        os.close(descriptor)
        raise
    return segment


def destroy_segment(segment: Segment) -> None:
    """Give up a segment of this process; the memory goes when nobody maps it any more."""
    _mapped.pop(segment.segment_id, None)
    os.close(segment.descriptor)


def attach(segment: Segment) -> torch.Tensor:
    """uint8 [nbytes] over the segment's memory; mapped once per process, then remembered.

    Raises:
        OSError: the owner is gone, or lives on another host.
    """
    known = _mapped.get(segment.segment_id)
    if known is not None:
        return known[1]
    allow_many_files()
    descriptor = os.open(f"/proc/{segment.owner_pid}/fd/{segment.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return _map(segment, descriptor, populate=True)
    finally:
        os.close(descriptor)


def _map(segment: Segment, descriptor: int, populate: bool) -> torch.Tensor:
    # Populated at once where it is read or written through: page by page, the first copy is several times slower.
    memory = mmap.mmap(descriptor, segment.nbytes, flags=mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0))
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    _mapped[segment.segment_id] = (segment, tensor)
    return tensor


def forget_segments(live: Iterable[str]) -> None:
    """Unmap segments of other processes whose ids are not among ``live``."""
    keep = set(live)
    for segment_id, (segment, _) in list(_mapped.items()):
        if segment_id not in keep and segment.owner_pid != os.getpid():
            del _mapped[segment_id]


class SegmentPool:
    """Segments to be used again: fresh memory costs a page fault per 4 KiB, several times the copy itself."""

    def __init__(self) -> None:
        self.free: list[Segment] = []
        self.used: dict[str, Segment] = {}

    def take(self, nbytes: int) -> Segment:
        """A segment of at least ``nbytes``, free or new."""
        fitting = [segment for segment in self.free if nbytes <= segment.nbytes <= nbytes + nbytes // 4 + 4096]
        if fitting:
            segment = min(fitting, key=lambda candidate: candidate.nbytes)
            self.free.remove(segment)
        else:
            segment = create_segment(-(-max(nbytes, 1) // 4096) * 4096)
        self.used[segment.segment_id] = segment
        return segment

    def take_all(self, sizes: Sequence[int]) -> list[Segment]:
        """A segment of each size, or none at all.

        Raises:
            StoreError: there is no room.
        """
        taken: list[Segment] = []
        try:
            for nbytes in sizes:
                taken.append(self.take(nbytes))
        except OSError as error:
            self.give_up(taken)
            raise StoreError(
                f"the store has no room for {len(sizes)} buckets of {sum(sizes) >> 20} MiB in all, beside "
                f"{self.nbytes >> 20} MiB that it holds: {error.strerror}. "
                + (
                    "Raise store.bucket_mib, for fewer buckets, or the limit of open files (ulimit -n)"
                    if error.errno == errno.EMFILE
                    else "Give it more memory, or lower store.keep_versions"
                )
            ) from error
        return taken

    def give_back(self, segments: list[Segment]) -> None:
        for segment in segments:
            self.free.append(self.used.pop(segment.segment_id))

    def give_up(self, segments: list[Segment]) -> None:
        """Segments that somebody may still write to: never used again."""
        for segment in segments:
            destroy_segment(self.used.pop(segment.segment_id))

    def trim(self, limit_bytes: int) -> None:
        """Destroy free segments, oldest first, until they hold at most ``limit_bytes``."""
        while self.free and sum(segment.nbytes for segment in self.free) > limit_bytes:
            destroy_segment(self.free.pop(0))

    def live(self) -> list[str]:
        return [*self.used, *(segment.segment_id for segment in self.free)]

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in [*self.used.values(), *self.free])


def describe(tensor: torch.Tensor) -> SegmentView | None:
    """Where ``tensor`` lies, when it is contiguous in a segment mapped here; else None."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        return None
    base = tensor.untyped_storage().data_ptr()
    for segment, memory in _mapped.values():
        if memory.data_ptr() == base:
            offset = tensor.storage_offset() * tensor.element_size()
            return SegmentView(segment, offset, tuple(tensor.shape), tensor.dtype)
    return None


def resolve(view: SegmentView) -> torch.Tensor:
    """The tensor that ``view`` describes, over the shared memory itself."""
    memory = attach(view.segment)
    nbytes = view.dtype.itemsize
    for size in view.shape:
        nbytes *= size
    return memory[view.offset : view.offset + nbytes].view(view.dtype).view(view.shape)
