"""Digests: equal exactly when two sides hold the same weights, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import xxhash


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of ``tensor`` in row-major order as bytes; no copy for a contiguous CPU tensor."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())


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


def version_digest(tensors: Mapping[str, str | torch.Tensor]) -> str:
    """xxh3_128 (hex) over the sorted names and their tensors' digests; a tensor is digested, a string is a digest."""
    state = xxhash.xxh3_128()
    for name in sorted(tensors):
        value = tensors[name]
        state.update(f"{name}\0{value if isinstance(value, str) else tensor_digest(value)}\n".encode())
    return state.hexdigest()
