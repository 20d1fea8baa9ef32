"""Seams of torchstore 0.1.2 on Monarch 0.7.0, all in one place; importable in every process.

- ``AsyncController``: torchstore's controller mixes sync and async endpoints, which Monarch 0.7 refuses; the sync ones
  are declared again as async.
- ``SegmentTransportBuffer``: torchstore's transports on CPU send tensors through Monarch's RPC, at about 0.1 GB/s. This
  one sends the address of a shared-memory segment where both ends are on one host. It plugs in at
  ``Pipe.create_transport_buffer``, the only place where torchstore chooses a transport.
- ``HYPERACTOR_CODEC_MAX_FRAME_LENGTH``: torchstore sets it at import, with a printed warning, where it is not set;
  here it is set to the same value before.

``tests/store/test_torchstore_compat.py`` fails when one is no longer needed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch

os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", "910737418240")

import torchstore.api as torchstore_api
from monarch.actor import endpoint
from torchstore.client import LocalClient
from torchstore.controller import Controller
from torchstore.strategy import SingletonStrategy
from torchstore.transport.buffers import TransportBuffer
from torchstore.transport.pipe import Pipe

from forge_async.store.shared_memory import SegmentView, describe, resolve


def _plain(name: str) -> Any:
    return getattr(Controller, name)._method


class AsyncController(Controller):
    """torchstore's controller with all endpoints async."""

    @endpoint
    async def get_controller_strategy(self) -> Any:
        return _plain("get_controller_strategy")(self)

    @endpoint
    async def locate_volumes(self, key: str) -> Any:
        return _plain("locate_volumes")(self, key)

    @endpoint
    async def notify_put(self, key: str, request: Any, storage_volume_id: str) -> None:
        _plain("notify_put")(self, key, request, storage_volume_id)

    @endpoint
    async def keys(self, prefix: str | None = None) -> list[str]:
        return _plain("keys")(self, prefix)

    @endpoint
    async def notify_delete(self, key: str, storage_volume_id: str) -> None:
        _plain("notify_delete")(self, key, storage_volume_id)


class SegmentTransportBuffer(TransportBuffer):
    """For a client that shares memory with the volume: carries the address of a tensor that lies in a segment, and any
    other tensor whole."""

    finalize = True

    def __init__(self) -> None:
        self.view: SegmentView | None = None
        self.tensor: torch.Tensor | None = None

    def allocate(self, tensor_like: Any) -> None:
        """Nothing to allocate: segments are pooled by the store."""

    async def write_from(self, tensor: torch.Tensor | None) -> None:
        """Sender: take the address of ``tensor``, or the tensor itself."""
        if tensor is not None:
            self.view = describe(tensor)
            self.tensor = tensor if self.view is None else None

    async def read_into(self, tensor: torch.Tensor | None = None) -> Any:
        """Receiver: the tensor over shared memory, or the one that was sent; copied where a destination is given."""
        found = resolve(self.view) if self.view is not None else self.tensor
        if tensor is None:
            return found
        return tensor.copy_(found)

    def update(self, other_buffer: TransportBuffer) -> None:
        super().update(other_buffer)
        self.view = getattr(other_buffer, "view", None)
        self.tensor = getattr(other_buffer, "tensor", None)


_shares_memory: ContextVar[bool] = ContextVar("forge_async_shares_memory", default=False)
_stock_transport = Pipe.create_transport_buffer


def _create_transport_buffer(pipe: Pipe) -> TransportBuffer:
    return SegmentTransportBuffer() if _shares_memory.get() else _stock_transport(pipe)


@contextlib.contextmanager
def segment_transport(shares_memory: bool = True) -> Iterator[None]:
    """Puts and gets of this task go through :class:`SegmentTransportBuffer`; torchstore's own choice otherwise."""
    token = _shares_memory.set(shares_memory)
    try:
        yield
    finally:
        _shares_memory.reset(token)


def install() -> None:
    """Patch torchstore in this process; idempotent."""
    torchstore_api.Controller = AsyncController
    Pipe.create_transport_buffer = _create_transport_buffer


install()


async def client(store_name: str) -> LocalClient:
    """torchstore's client for puts, gets and deletes in this process."""
    return await torchstore_api.client(store_name)


async def initialize(store_name: str, proc_mesh: Any) -> None:
    """Start a torchstore of one volume on ``proc_mesh``; in the controller."""
    await torchstore_api.initialize(1, strategy=SingletonStrategy(), store_name=store_name, mesh=proc_mesh)


async def shutdown(store_name: str) -> None:
    """Empty the store and forget its clients in this process."""
    await torchstore_api.shutdown(store_name)
