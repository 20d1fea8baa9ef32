"""Digests: equal exactly when two sides hold the same weights, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import xxhash

BLOCK_BYTES = 2 << 20
"""Of a copy that is digested on the way; less than the caches hold, and enough not to be slowed down by Python."""


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of ``tensor`` in row-major order as bytes; no copy for a contiguous CPU tensor."""
    here = tensor if tensor.device.type == "cpu" and tensor.is_contiguous() else tensor.cpu().contiguous()
    return memoryview(here.detach().view(-1).view(torch.uint8).numpy())


def tensor_digest(tensor: torch.Tensor) -> str:
    """xxh3_128 (hex) of dtype, shape and bytes of a full tensor."""
    return pieces_digest(tensor.dtype, tuple(tensor.shape), [tensor])


def pieces_digest(dtype: torch.dtype, shape: tuple[int, ...], pieces: Iterable[torch.Tensor]) -> str:
    """The digest of the tensor of ``shape`` whose bytes are those of ``pieces``, one after the other."""
    state = xxhash.xxh3_128(f"{dtype}{list(shape)}".encode())
    for piece in pieces:
        if piece.numel():
            state.update(tensor_bytes(piece))
    return state.hexdigest()


def copy_digested(target: torch.Tensor, source: torch.Tensor, shape: tuple[int, ...]) -> str:
    """Copy ``source`` into ``target``, contiguous on the CPU, and digest what that holds as a tensor of ``shape``.

    By blocks, each digested while it is in the processor's caches, which saves most of a second way through memory.
    ``source`` may have other dimensions than ``target``, with its elements in the same order.
    """
    state = xxhash.xxh3_128(f"{target.dtype}{list(shape)}".encode())
    target = target.view(source.shape)
    rows = max(1, source.shape[0] * BLOCK_BYTES // target.nbytes) if source.dim() and source.numel() else 1
    blocks = zip(target.split(rows), source.split(rows), strict=True) if source.dim() else [(target, source)]
    for block, values in blocks:
        block.copy_(values)
        state.update(tensor_bytes(block))
    return state.hexdigest()


def version_digest(tensors: Mapping[str, str | torch.Tensor]) -> str:
    """xxh3_128 (hex) over the sorted names and their tensors' digests; a tensor is digested, a string is a digest."""
    state = xxhash.xxh3_128()
    for name in sorted(tensors):
        value = tensors[name]
        state.update(f"{name}\0{value if isinstance(value, str) else tensor_digest(value)}\n".encode())
    return state.hexdigest()
