"""The seams of torchstore are still needed, and still where they were."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

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
    with torchstore_compat.segment_transport():
        ours = Pipe(storage_volume=None).create_transport_buffer()
    assert isinstance(ours, torchstore_compat.SegmentTransportBuffer)
    assert "create_transport_buffer" in inspect.getsource(Pipe.put_to_storage_volume)


def test_torchstore_still_warns_about_the_frame_length() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "HYPERACTOR_CODEC_MAX_FRAME_LENGTH"}

    def output_of(module: str) -> str:
        command = [sys.executable, "-c", f"import {module}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    assert "HYPERACTOR_CODEC_MAX_FRAME_LENGTH" in output_of("torchstore")
    assert "HYPERACTOR_CODEC_MAX_FRAME_LENGTH" not in output_of("forge_async.store.torchstore_compat")
