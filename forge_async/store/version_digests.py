"""The digests of a version's tensors, put together from the blocks that its ranks and the store have digested.

A rank digests, as it copies them, the blocks that lie in its pieces alone; the store the others: those at the seam of
two ranks' pieces, and all of a tensor that does not lie in one run of bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from forge_async.store.digest import DIGEST_BYTES, block_digests, digest_of_blocks, number_of_blocks, tensor_bytes
from forge_async.store.errors import StoreError
from forge_async.store.layout import Layout, PartPlan, assemble, lies_in_full, unpacked_layout

Blocks = Mapping[str, Sequence[tuple[int, bytes]]]
"""By tensor: (first block, digests from there on) of runs of its blocks."""


@functools.lru_cache(maxsize=8)
def seams(layout: bytes) -> dict[str, list[range]]:
    """The blocks that no rank digests, by tensor, of a packed :class:`Layout`; those tensors first that are written
    first."""
    found = {}
    entries = unpacked_layout(layout).tensors
    for name in sorted(entries, key=lambda name: max(written for _, written in entries[name].needs())):
        entry = entries[name]
        left, at = [], 0
        for first, end in sorted(piece.blocks for piece in entry.pieces if piece.blocks[0] < piece.blocks[1]):
            left.append(range(at, first))
            at = end
        left.append(range(at, number_of_blocks(entry.nbytes)))
        if any(left):
            found[name] = [blocks for blocks in left if blocks]
    return found


def digest_seams(
    layout: Layout,
    wanted: Mapping[str, Iterable[range]],
    buckets: Mapping[int, torch.Tensor],
    ready: Callable[[str], bool] = lambda _: True,
) -> Blocks:
    """Digest blocks of ``wanted`` tensors, each once it is ``ready``; ends with those before where that is False."""
    found = {}
    for name, ranges in wanted.items():
        if not ready(name):
            break
        pieces = layout.tensors[name].pieces
        whole = pieces[0].full_view(buckets[pieces[0].bucket]) if lies_in_full(pieces) else assemble(pieces, buckets)
        content = tensor_bytes(whole)
        found[name] = [(blocks.start, block_digests(content, blocks)) for blocks in ranges]
    return found


def tensor_digests(layout: Layout, parts: Iterable[tuple[PartPlan, bytes]], seams: Blocks) -> dict[str, str]:
    """The digest of each tensor, by HF name.

    Args:
        parts: each rank's plan, and the digests of its pieces' blocks one after the other.
        seams: the digests of all other blocks.
    Raises:
        StoreError: there are digests of more or fewer blocks than a plan has.
    """
    blocks = {name: bytearray(DIGEST_BYTES * number_of_blocks(entry.nbytes)) for name, entry in layout.tensors.items()}
    for plan, digests in parts:
        at = 0
        for piece in plan.pieces:
            first, end = (DIGEST_BYTES * block for block in piece.blocks)
            blocks[piece.name][first:end] = digests[at : at + end - first]
            at += end - first
        if at != len(digests):
            raise StoreError(f"a rank has digested {len(digests)} bytes' worth of blocks, its plan has {at}")
    for name, runs in seams.items():
        for block, digests in runs:
            blocks[name][DIGEST_BYTES * block : DIGEST_BYTES * block + len(digests)] = digests
    return {
        name: digest_of_blocks(getattr(torch, entry.dtype), entry.shape, blocks[name])
        for name, entry in layout.tensors.items()
    }
