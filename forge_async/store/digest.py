"""Digests: equal exactly when two sides hold the same weights, bit for bit.

A tensor's digest is taken over the digests of its blocks, runs of ``BLOCK_BYTES`` of its bytes in row-major order: so
it is the same whoever has which part, and several processes can each digest what they have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
import xxhash

BLOCK_BYTES = 256 << 10
"""Of a block: a copy that is cast and digested on the way has it in a core's second-level cache."""
SPAN_BYTES = 2 << 20
"""What a reader may be behind a writer: less than the processor's last cache, more than a few lines of Python take."""
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
    return xxhash.xxh3_128_hexdigest(_header(dtype, tuple(shape)) + blocks)


@functools.lru_cache(maxsize=4096)
def _header(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    return f"{dtype}{list(shape)}".encode()


def number_of_blocks(nbytes: int) -> int:
    """Of a tensor; the last one may be shorter than the others."""
    return -(-nbytes // BLOCK_BYTES)


def block_digests(content: memoryview, blocks: range) -> bytes:
    """Digests of some blocks of a tensor with the bytes ``content``, one after the other."""
    starts = range(blocks.start * BLOCK_BYTES, blocks.stop * BLOCK_BYTES, BLOCK_BYTES)
    return b"".join(xxhash.xxh3_128_digest(content[start : start + BLOCK_BYTES]) for start in starts)


def nothing(elements: int) -> None:
    """Where nobody waits for elements, or is told of them."""


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
        # At least a block each, so that every step completes the block that it has most of.
        self._rows = -(-len(target) * BLOCK_BYTES // target.nbytes) if target.dim() and target.numel() else 1
        content = tensor_bytes(target)[before:]
        self._spans: list[tuple[int, list[tuple[torch.Tensor, list[memoryview]]]]] = []
        """(Elements up to its end, steps) of each; a step is a part of the target, and the blocks complete with it."""
        copied, digested, elements = -before, 0, 0
        for part in self._split(target):
            copied += part.nbytes
            complete = blocks if copied == len(content) else max(digested, min(blocks, copied // BLOCK_BYTES))
            starts = range(digested * BLOCK_BYTES, complete * BLOCK_BYTES, BLOCK_BYTES)
            if not self._spans or len(self._spans[-1][1]) * BLOCK_BYTES >= SPAN_BYTES:
                self._spans.append((0, []))
            elements += part.numel()
            steps = [*self._spans[-1][1], (part, [content[start : start + BLOCK_BYTES] for start in starts])]
            self._spans[-1] = (elements, steps)
            digested = complete

    def __call__(
        self, source: torch.Tensor, ready: Callable[[int], object] = nothing, done: Callable[[int], object] = nothing
    ) -> bytes:
        """Copy ``source``, cast to the target's dtype; the digests of the blocks that the target holds then.

        Args:
            ready: called before each span with how many elements of ``source`` will have been read after it.
            done: called after each span with how many have been copied.
        """
        found, parts = [], iter(self._split(source))
        for end, steps in self._spans:
            ready(end)
            for part, blocks in steps:
                part.copy_(next(parts))
                for block in blocks:
                    found.append(xxhash.xxh3_128_digest(block))
            done(end)
        return b"".join(found)

    def _split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        return tensor.unsafe_split(self._rows) if tensor.dim() and len(tensor) > self._rows else (tensor,)


def version_digest(tensors: Mapping[str, str | torch.Tensor]) -> str:
    """xxh3_128 (hex) over the sorted names and their tensors' digests; a tensor is digested, a string is a digest."""
    digests = {name: value if isinstance(value, str) else tensor_digest(value) for name, value in tensors.items()}
    return xxhash.xxh3_128_hexdigest("".join(f"{name}\0{digests[name]}\n" for name in sorted(digests)).encode())
