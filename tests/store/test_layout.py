"""Packing plans and coverage checks, by hand."""

from __future__ import annotations

import pytest
import torch

from forge_async.store import StoreError
from forge_async.store.layout import (
    FullTensor,
    Layout,
    Piece,
    ShardSpec,
    TensorEntry,
    assemble,
    buckets_of,
    check_coverage,
    combined,
    lies_in_full,
    unpacked_layout,
)
from forge_async.store.part_plan import plan_buckets, plan_part


def piece(offsets, shape, global_shape=(4, 6), dtype="float32", start=0, bucket=0):
    return Piece("w", dtype, global_shape, offsets, shape, bucket, start)


def test_buckets_are_aligned_and_bounded():
    slots, buckets = plan_buckets([100, 60, 64, 1000, 1], bucket_bytes=256)
    assert slots == [(0, 0), (0, 128), (0, 192), (1, 0), (2, 0)]
    assert buckets == [256, 1024, 64]
    assert plan_buckets([], 256) == ([], [])


def test_exact_coverage_is_accepted():
    check_coverage("w", [piece((0, 0), (3, 6)), piece((3, 0), (1, 6))])
    check_coverage("w", [piece((0, 0), (4, 1)), piece((0, 1), (4, 5))])
    check_coverage("scalar", [piece((), (), ())])


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([piece((0, 0), (3, 6))], "18 of 24 elements"),
        ([piece((0, 0), (3, 6)), piece((2, 0), (2, 6))], "overlap"),
        ([piece((0, 0), (4, 6)), piece((0, 0), (4, 6))], "overlap"),
        ([piece((0, 0), (2, 6)), piece((3, 0), (2, 6))], "reaches beyond"),
        ([piece((0, 0), (2, 6)), piece((2, 0), (2, 6), dtype="bfloat16")], "another of a bfloat16"),
        ([piece((), (), ()), piece((), (), ())], "overlap"),
    ],
)
def test_holes_overlaps_and_disagreements_are_named(pieces, message):
    with pytest.raises(StoreError, match=f"^w: .*{message}"):
        check_coverage("w", pieces)


def test_pieces_written_into_the_full_tensor_need_no_assembly():
    full = torch.arange(24.0).view(4, 6)
    bucket = torch.zeros(64 + 96, dtype=torch.uint8)
    left = Piece("w", "float32", (4, 6), (0, 0), (4, 2), 0, 64, in_full=True)
    right = Piece("w", "float32", (4, 6), (0, 2), (4, 4), 0, 64, in_full=True)
    left.view(bucket).copy_(full[:, :2])
    right.view(bucket).copy_(full[:, 2:])
    check_coverage("w", [left, right])
    assert lies_in_full([left, right])
    assert torch.equal(right.full_view(bucket), full)
    assert not lies_in_full([left, Piece("w", "float32", (4, 6), (0, 2), (4, 4), 1, 0)])


def test_a_region_takes_only_the_pieces_and_buckets_that_hold_it():
    full = torch.arange(24.0).view(4, 6)
    pieces = [piece((0, 0), (3, 6), bucket=0), piece((3, 0), (1, 6), bucket=1)]
    buckets = {0: full[:3].reshape(-1).view(torch.uint8), 1: full[3:].reshape(-1).view(torch.uint8)}
    assert torch.equal(assemble(pieces, buckets, ranges=[(1, 4), (2, 5)]), full[1:4, 2:5])
    del buckets[1]  # must not be looked at
    assert torch.equal(assemble(pieces, buckets, ranges=[(0, 2), (5, 6)]), full[:2, 5:])
    layout = Layout({"w": TensorEntry("float32", (4, 6), tuple(pieces))}, (72, 24, 8))
    assert buckets_of(layout, {"w": [(0, 3), (0, 6)]}) == [0]
    assert buckets_of(layout, {"w": [(2, 4), (0, 1)]}) == buckets_of(layout, {"w": None}) == [0, 1]
    assert buckets_of(layout, {}) == []
    assert buckets_of(layout, None) == [0, 1], "nothing lies in the third"


def test_plans_of_ranks_combine_to_one_layout():
    full = (FullTensor("w", torch.float32, (4, 6)), FullTensor("v", torch.float32, (100,)))
    rows = [ShardSpec("w", torch.float32, (4, 6), (start, 0), (size, 6)) for start, size in ((0, 3), (3, 1))]
    v = ShardSpec("v", torch.float32, (100,), (0,), (100,))
    one = unpacked_layout(combined((plan_part((rows[0],), full, 1 << 20), plan_part((rows[1], v), full, 1 << 20))))
    assert one.sizes == (128 + 448,)
    assert lies_in_full(one.tensors["w"].pieces)
    own = (plan_part((rows[0],), full, 1 << 20), plan_part((rows[1], v), None, 1 << 20))
    mixed = unpacked_layout(combined(own))
    assert mixed.sizes == (128 + 448, 64 + 448)
    assert [piece.bucket for piece in mixed.tensors["w"].pieces] == [0, 1]
    assert [(piece.bucket, piece.start) for piece in mixed.tensors["v"].pieces] == [(1, 64)]
    assert combined(own) is combined((own[0], own[1])), "planned once, replayed for every version"
    assert mixed.tensors["v"].needs() == [(1, 106)], "after the 6 elements of its rows of w"
    with pytest.raises(StoreError, match="w: the shards hold 18 of 24 elements"):
        combined(own[:1])
    with pytest.raises(StoreError, match=r"w: .* the layout has a torch.float32 tensor of shape \(4, 6\)"):
        plan_part((rows[0]._replace(global_shape=(5, 6)),), full, 1 << 20)


def test_what_must_be_written_for_a_tensors_first_elements():
    full = (FullTensor("w", torch.float32, (4, 6)), FullTensor("v", torch.float32, (10,)))
    v = ShardSpec("v", torch.float32, (10,), (0,), (10,))
    rows = [ShardSpec("w", torch.float32, (4, 6), (start, 0), (size, 6)) for start, size in ((0, 3), (3, 1))]
    plans = plan_part((v, rows[0]), full, 1 << 20), plan_part((rows[1],), full, 1 << 20)
    entry = unpacked_layout(combined(plans)).tensors["w"]
    assert entry.needs() == entry.needs(24) == [(0, 28), (1, 6)]
    assert [entry.needs(count) for count in (1, 18, 19)] == [[(0, 11)], [(0, 28)], [(0, 28), (1, 1)]]
    columns = [ShardSpec("w", torch.float32, (4, 6), (0, start), (4, 3)) for start in (0, 3)]
    cut = unpacked_layout(combined(tuple(plan_part((shard,), full[:1], 1 << 20) for shard in columns))).tensors["w"]
    assert cut.needs(1) == cut.needs() == [(0, 12), (1, 12)], "a row lies in both pieces"
