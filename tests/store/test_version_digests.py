"""Digests of tensors in parts, against those of whole tensors, and these against hashes taken by hand."""

from __future__ import annotations

import pytest
import torch
import xxhash

from forge_async.store import FullTensor, StoreError, TensorShard, tensor_digest, version_digest
from forge_async.store.digest import BLOCK_BYTES
from forge_async.store.layout import combined, packed, unpacked_layout, unpacked_plan
from forge_async.store.part_plan import plan_part
from forge_async.store.version_digests import digest_seams, seams, tensor_digests
from forge_async.store.writer import Place, write_shards

SHAPE = (700, 600)
"""In bfloat16 840,000 bytes: three blocks and a fifth of one."""


def test_digests_tell_bits_shapes_dtypes_and_names_apart():
    zeros = torch.zeros(2, 3)
    others = [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.int32), -zeros, torch.tensor(0.0)]
    assert len({tensor_digest(tensor) for tensor in [zeros, *others]}) == 5
    assert tensor_digest(torch.arange(6.0).view(3, 2).T) == tensor_digest(torch.tensor([[0.0, 2, 4], [1, 3, 5]]))
    version = {"a": zeros, "b": others[0]}
    assert version_digest(version) == version_digest({name: tensor_digest(t) for name, t in reversed(version.items())})
    assert version_digest(version) != version_digest({"a": others[0], "b": zeros})


def test_a_digest_is_over_the_blocks_digests():
    tensor = torch.arange(140_000, dtype=torch.int32)
    content = tensor.numpy().tobytes()
    cut = [content[:BLOCK_BYTES], content[BLOCK_BYTES : 2 * BLOCK_BYTES], content[2 * BLOCK_BYTES :]]
    blocks = b"".join(xxhash.xxh3_128_digest(part) for part in cut)
    assert tensor_digest(tensor) == xxhash.xxh3_128_hexdigest(b"torch.int32[140000]" + blocks)
    for at in (0, 70_000, 139_999):
        changed = tensor.clone()
        changed[at] ^= 1
        assert tensor_digest(changed) != tensor_digest(tensor)


def cuts(full: torch.Tensor, way: str) -> list[list[tuple[torch.Tensor, tuple[int, ...]]]]:
    """(Part, offsets) of each rank's shards of a tensor."""
    if way == "whole":
        return [[(full, (0, 0))]]
    if way == "columns":
        return [[(full[:, :120], (0, 0))], [(full[:, 120:], (0, 120))]]
    if way == "rows":
        return [[(full[:451], (0, 0))], [(full[451:], (451, 0))]]
    if way == "at a block":  # 4096 rows of 64 bytes are one
        return [[(full[:4096], (0, 0))], [(full[4096:], (4096, 0))]]
    return [[(full[:5], (0, 0)), (full[600:], (600, 0))], [(full[5:600], (5, 0))]]


@pytest.mark.parametrize("common", [True, False])
@pytest.mark.parametrize(
    ("way", "own", "left"),
    [
        ("whole", [[(0, 4)]], []),
        ("rows", [[(0, 2)], [(3, 4)]], [range(2, 3)]),
        ("several of one rank", [[(0, 0), (3, 4)], [(1, 2)]], [range(0, 1), range(2, 3)]),
        ("columns", [[(0, 0)], [(0, 0)]], [range(0, 4)]),
        ("at a block", [[(0, 1)], [(1, 2)]], []),
    ],
)
def test_parts_make_the_whole_tensors_digest(common, way, own, left):
    shape = (6000, 32) if way == "at a block" else SHAPE
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ranks = [[TensorShard("w", part, shape, at) for part, at in shards] for shards in cuts(values, way)]
    layout = (FullTensor("v", torch.bfloat16, (40,)), FullTensor("w", torch.bfloat16, shape)) if common else None
    plans = [plan_part(tuple(shard.spec for shard in shards), layout, 1 << 21, "bfloat16") for shards in ranks]
    if not common:
        own, left = ([[(0, 4)]], []) if way == "whole" else ([[(0, 0)] * len(s) for s in ranks], [range(0, 4)])
        if way == "at a block":
            left = [range(0, 2)]
    assert [[piece.blocks for piece in unpacked_plan(plan).pieces] for plan in plans] == own
    if common:
        ranks[0].append(TensorShard.whole("v", torch.ones(40)))
        plans[0] = plan_part(tuple(shard.spec for shard in ranks[0]), layout, 1 << 21, "bfloat16")
    packed_layout = combined(tuple(plans))
    whole = unpacked_layout(packed_layout)
    memory = {bucket: torch.zeros(size, dtype=torch.uint8) for bucket, size in enumerate(whole.sizes)}
    parts, before = [], 0
    for plan, shards in zip(map(unpacked_plan, plans), ranks, strict=True):
        places = [
            Place(piece, memory[piece.bucket + before], shard.tensor.shape)
            for piece, shard in zip(plan.pieces, shards, strict=True)
        ]
        parts.append((plan, write_shards(places, shards, lambda _: None)))
        before += 0 if common else len(plan.sizes)
    assert seams(packed_layout) == ({"w": left} if left else {})
    rest = digest_seams(whole, seams(packed_layout), memory)
    expected = {"w": tensor_digest(values.bfloat16())} | (
        {"v": tensor_digest(torch.ones(40).bfloat16())} if common else {}
    )
    assert tensor_digests(whole, parts, rest) == expected
    assert digest_seams(whole, seams(packed_layout), memory, lambda name: False) == {}
    with pytest.raises(StoreError, match="digested .* its plan has"):
        tensor_digests(whole, [(plan, digests + b"x") for plan, digests in parts], rest)


def test_a_permuted_source_is_digested_as_it_lies_in_the_bucket():
    """Llama's query weights: pairs of rows there, halves of heads here; a view of four dimensions."""
    rows = torch.randn(640, 200, generator=torch.Generator().manual_seed(1))
    pairs = rows.view(10, 32, 2, 200).transpose(1, 2)
    shard = TensorShard("w", pairs, (640, 200), (0, 0), (640, 200))
    plan = unpacked_plan(plan_part((shard.spec,), None, 1 << 20))
    bucket = torch.zeros(plan.sizes[0], dtype=torch.uint8)
    digests = write_shards([Place(plan.pieces[0], bucket, pairs.shape)], [shard], lambda _: None)
    layout = unpacked_layout(combined((packed(plan),)))
    assert tensor_digests(layout, [(plan, digests)], {}) == {"w": tensor_digest(pairs.reshape(640, 200))}
