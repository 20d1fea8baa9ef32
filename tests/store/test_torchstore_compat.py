"""The seams of torchstore are still needed, and still where they were."""

from __future__ import annotations

import inspect

from torchstore.controller import Controller
from torchstore.transport.pipe import Pipe

from forge_async.store import torchstore_compat


def test_controller_still_mixes_sync_and_async_endpoints():
    kinds = {
        inspect.iscoroutinefunction(member._method)
        for member in vars(Controller).values()
        if hasattr(member, "_method")
    }
    assert kinds == {True, False}, "torchstore's controller is uniform now: AsyncController can go"


def test_transport_is_still_chosen_by_the_pipe():
    assert Pipe.create_transport_buffer is torchstore_compat._create_transport_buffer
    stock = Pipe(storage_volume=None).create_transport_buffer()
    assert not isinstance(stock, torchstore_compat.SegmentTransportBuffer)
    with torchstore_compat.segment_transport(True):
        ours = Pipe(storage_volume=None).create_transport_buffer()
    assert isinstance(ours, torchstore_compat.SegmentTransportBuffer)
    assert "create_transport_buffer" in inspect.getsource(Pipe.put_to_storage_volume)
