"""Room in shared memory: as a whole or not at all, and for as many segments as a large model takes."""

from __future__ import annotations

import errno
import itertools
import os
import resource

import pytest

from forge_async.store import StoreError, shared_memory
from forge_async.store.shared_memory import Segment, SegmentPool, allow_many_files


@pytest.mark.parametrize(("code", "remedy"), [(errno.EMFILE, "Raise store.bucket_mib"), (errno.ENOMEM, "more memory")])
def test_what_does_not_fit_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, code: int, remedy: str) -> None:
    pool, create, calls = SegmentPool(), shared_memory.create_segment, itertools.count()

    def third_fails(nbytes: int) -> Segment:
        if next(calls) == 2:
            raise OSError(code, os.strerror(code))
        return create(nbytes)

    monkeypatch.setattr(shared_memory, "create_segment", third_fails)
    with pytest.raises(StoreError, match=f"no room for 4 buckets of 4 MiB.*{os.strerror(code)}.*{remedy}"):
        pool.take_all([1 << 20] * 4)
    assert (pool.live(), pool.nbytes) == ([], 0)
    found = pool.take_all([1 << 20, 0])  # a tensor of no element may have a bucket of its own
    assert [segment.nbytes for segment in found] == [1 << 20, 4096]
    pool.give_up(found)


def test_the_limit_of_open_files_is_raised() -> None:
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before, 512), most))
    try:
        allow_many_files.__wrapped__()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (max(min(before, 512), min(most, 1 << 16)), most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
