"""Lending GPUs to actors: the least used of the visible ones."""

from __future__ import annotations

import pytest

from forge_async.errors import ForgeError
from forge_async.mesh import MeshRuntime
from forge_async.mesh.runtime import visible_gpus


def test_least_used_gpus_are_lent(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    runtime = MeshRuntime()
    assert runtime.borrow_gpus(2) == ["4", "5"]
    assert runtime.borrow_gpus(2) == ["6", "4"]
    runtime.return_gpus(["4", "5"])
    assert runtime.borrow_gpus(1) == ["5"]


def test_too_few_gpus_are_an_error(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
    with pytest.raises(ForgeError, match="1 GPUs are needed by one actor, 0 are visible"):
        MeshRuntime().borrow_gpus(1)
