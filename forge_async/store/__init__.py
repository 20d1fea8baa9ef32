"""Versioned weights on torchstore: packed buckets, atomic commit, leases, digests."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_async.store.config import StoreConfig
    from forge_async.store.digest import tensor_digest, version_digest
    from forge_async.store.errors import LeaseExpired, StoreError, Superseded, VersionGone
    from forge_async.store.layout import FullTensor, Manifest, TensorEntry, TensorShard
    from forge_async.store.messages import Committed
    from forge_async.store.pulled import Pulled
    from forge_async.store.weight_store import WeightStore

_ROOMS = {
    "StoreConfig": "config",
    "tensor_digest": "digest",
    "version_digest": "digest",
    "LeaseExpired": "errors",
    "StoreError": "errors",
    "Superseded": "errors",
    "VersionGone": "errors",
    "Committed": "messages",
    "FullTensor": "layout",
    "Manifest": "layout",
    "TensorEntry": "layout",
    "TensorShard": "layout",
    "Pulled": "pulled",
    "WeightStore": "weight_store",
}

__all__ = [
    "Committed",
    "FullTensor",
    "LeaseExpired",
    "Manifest",
    "Pulled",
    "StoreConfig",
    "StoreError",
    "Superseded",
    "TensorEntry",
    "TensorShard",
    "VersionGone",
    "WeightStore",
    "tensor_digest",
    "version_digest",
]


def __getattr__(name: str) -> Any:
    """Import on first use: reading a config must not wait for torch and torchstore."""
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_ROOMS[name]}"), name)
