"""Digests: equal exactly when two sides hold the same weights, bit for bit.

A tensor's digest is taken over the digests of its blocks, runs of ``BLOCK_BYTES`` of its bytes in row-major order: so
it is the same whoever has which part, and several processes can each digest what they have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import xxhash

BLOCK_BYTES = 128 << 10
"""Of a block: a copy that is cast and digested on the way has it in a core's second-level cache."""
DIGEST_BYTES = 16
"""Of one block's digest."""


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of ``tensor`` in row-major order as bytes; no copy for a contiguous CPU tensor."""
    here = tensor if tensor.device.type == "cpu" and tensor.is_contiguous() else tensor.cpu().contiguous()
    return memoryview(here.detach().view(-1).view(torch.uint8).numpy())


def tensor_digest(tensor: torch.Tensor) -> str:
    """xxh3_128 (hex) of dtype, shape and bytes of a full tensor."""
    return bytes_digest(tensor.dtype, tensor.shape, tensor_bytes(tensor))


def bytes_digest(dtype: torch.dtype, shape: Sequence[int], content: memoryview) -> str:
    """:func:`tensor_digest` of a tensor whose bytes are at hand."""
    return digest_of_blocks(dtype, shape, block_digests(content, range(number_of_blocks(len(content)))))


def digest_of_blocks(dtype: torch.dtype, shape: Sequence[int], blocks: bytes | bytearray) -> str:
    """:func:`tensor_digest` out of the digests of all blocks."""
    state = xxhash.xxh3_128(f"{dtype}{list(shape)}".encode())
    state.update(blocks)
    return state.hexdigest()


def number_of_blocks(nbytes: int) -> int:
    """Of a tensor; the last one may be shorter than the others."""
    return -(-nbytes // BLOCK_BYTES)


def block_digests(content: memoryview, blocks: range) -> bytes:
    """Digests of some blocks of a tensor with the bytes ``content``, one after the other."""
    starts = range(blocks.start * BLOCK_BYTES, blocks.stop * BLOCK_BYTES, BLOCK_BYTES)
    return b"".join(xxhash.xxh3_128_digest(content[start : start + BLOCK_BYTES]) for start in starts)


class DigestedCopy:
    """Copies into one place; its blocks are digested on the way, while they are in the processor's caches.

    Made once for a place that takes every version's values: making views costs more than small tensors' copies.

    Args:
        target: contiguous, on the CPU.
        source_shape: of what is copied; it may have other dimensions than ``target``, with its elements in the same
            order.
        before: bytes of ``target`` before the first block that it holds all of.
        blocks: how many it holds all of.
    """

    def __init__(self, target: torch.Tensor, source_shape: Sequence[int], before: int, blocks: int) -> None:
        target = target.detach().view(tuple(source_shape))
        self._rows = max(1, len(target) * BLOCK_BYTES // target.nbytes) if target.dim() and target.numel() else 1
        content = tensor_bytes(target)[before:]
        self._steps: list[tuple[torch.Tensor, list[memoryview]]] = []
        """(Part of the target, blocks that are complete once it is copied)."""
        copied, digested = -before, 0
        for part in self._split(target):
            copied += part.nbytes
            last = copied == len(content)
            complete = blocks if last else max(digested, min(blocks, copied // BLOCK_BYTES))
            starts = range(digested * BLOCK_BYTES, complete * BLOCK_BYTES, BLOCK_BYTES)
            self._steps.append((part, [content[start : start + BLOCK_BYTES] for start in starts]))
            digested = complete

    def __call__(self, source: torch.Tensor) -> bytes:
        """Copy ``source``, cast to the target's dtype; the digests of the blocks that the target holds then."""
        found = []
        for (part, blocks), values in zip(self._steps, self._split(source), strict=True):
            part.copy_(values)
            found += [xxhash.xxh3_128_digest(block) for block in blocks]
        return b"".join(found)

    def _split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        return tensor.split(self._rows) if tensor.dim() else (tensor,)


def version_digest(tensors: Mapping[str, str | torch.Tensor]) -> str:
    """xxh3_128 (hex) over the sorted names and their tensors' digests; a tensor is digested, a string is a digest."""
    state = xxhash.xxh3_128()
    for name in sorted(tensors):
        value = tensors[name]
        state.update(f"{name}\0{value if isinstance(value, str) else tensor_digest(value)}\n".encode())
    return state.hexdigest()
