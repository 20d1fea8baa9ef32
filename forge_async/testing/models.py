"""Pytest fixtures for tiny models, each folder made once per test session.

In a ``conftest.py``: ``pytest_plugins = ["forge_async.testing.models"]``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge_async.model_zoo import make_tiny_model

ModelFactory = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFactory:
    """``tiny_model(family="llama", tied=True, **overrides) -> Path``: the folder, made at the first request.

    Weights have a standard deviation of 0.2 unless ``initializer_range`` says otherwise, so that log-probs vary.
    """
    root = tmp_path_factory.mktemp("models")

    def make(family: str = "llama", tied: bool = True, **overrides: Any) -> Path:
        settings = {"initializer_range": 0.2, **overrides}
        name = "-".join([family, "tied" if tied else "untied", *(f"{k}_{v}" for k, v in sorted(settings.items()))])
        return make_tiny_model(root / name, family=family, tied=tied, **settings)

    return make


@pytest.fixture(scope="session")
def tiny_llama(tiny_model: ModelFactory) -> Path:
    return tiny_model("llama", tied=True)


@pytest.fixture(scope="session")
def tiny_llama_untied(tiny_model: ModelFactory) -> Path:
    return tiny_model("llama", tied=False)


@pytest.fixture(scope="session")
def tiny_qwen3(tiny_model: ModelFactory) -> Path:
    return tiny_model("qwen3", tied=True)


@pytest.fixture(scope="session")
def tiny_qwen3_moe(tiny_model: ModelFactory) -> Path:
    return tiny_model("qwen3_moe", tied=False)
