"""Digests: equal exactly when two sides hold the same weights, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import xxhash

BLOCK_BYTES = 512 << 10
"""Of a copy that is digested on the way: what a core's second-level cache holds."""


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of ``tensor`` in row-major order as bytes; no copy for a contiguous CPU tensor."""
    here = tensor if tensor.device.type == "cpu" and tensor.is_contiguous() else tensor.cpu().contiguous()
    return memoryview(here.detach().view(-1).view(torch.uint8).numpy())


def _header(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    return f"{dtype}{list(shape)}".encode()


def tensor_digest(tensor: torch.Tensor) -> str:
    """xxh3_128 (hex) of dtype, shape and bytes of a full tensor."""
    return pieces_digest(tensor.dtype, tuple(tensor.shape), [tensor])


def bytes_digest(dtype: torch.dtype, shape: Sequence[int], content: memoryview) -> str:
    """:func:`tensor_digest` of a tensor whose bytes are at hand."""
    state = xxhash.xxh3_128(_header(dtype, shape))
    state.update(content)
    return state.hexdigest()


def pieces_digest(dtype: torch.dtype, shape: tuple[int, ...], pieces: Iterable[torch.Tensor]) -> str:
    """The digest of the tensor of ``shape`` whose bytes are those of ``pieces``, one after the other."""
    state = xxhash.xxh3_128(_header(dtype, shape))
    for piece in pieces:
        if piece.numel():
            state.update(tensor_bytes(piece))
    return state.hexdigest()


class DigestedCopy:
    """Copies into one place, each digested on the way: by blocks, while they are in the processor's caches.

    Made once for a place that takes every version's values: making views costs more than small tensors' copies.

    Args:
        target: contiguous, on the CPU.
        source_shape: of what is copied; it may have other dimensions than ``target``, with its elements in the same
            order.
        shape: of the full tensor, for its digest.
    """

    def __init__(self, target: torch.Tensor, source_shape: Sequence[int], shape: Sequence[int]) -> None:
        target = target.detach().view(tuple(source_shape))
        self._header = _header(target.dtype, shape)
        self._rows = max(1, len(target) * BLOCK_BYTES // target.nbytes) if target.dim() and target.numel() else 1
        self._blocks = [(block, tensor_bytes(block)) for block in self._split(target)]

    def __call__(self, source: torch.Tensor) -> str:
        """Copy ``source``, cast to the target's dtype; the digest of what the target holds then."""
        state = xxhash.xxh3_128(self._header)
        for (block, content), values in zip(self._blocks, self._split(source), strict=True):
            block.copy_(values)
            state.update(content)
        return state.hexdigest()

    def _split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        return tensor.split(self._rows) if tensor.dim() else (tensor,)


def version_digest(tensors: Mapping[str, str | torch.Tensor]) -> str:
    """xxh3_128 (hex) over the sorted names and their tensors' digests; a tensor is digested, a string is a digest."""
    state = xxhash.xxh3_128()
    for name in sorted(tensors):
        value = tensors[name]
        state.update(f"{name}\0{value if isinstance(value, str) else tensor_digest(value)}\n".encode())
    return state.hexdigest()
