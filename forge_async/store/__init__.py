"""Versioned weights on torchstore: packed buckets, atomic commit, leases, digests."""

from forge_async.store.digest import tensor_digest, version_digest
from forge_async.store.errors import StoreError, VersionGone
from forge_async.store.layout import Manifest, PartManifest, TensorEntry, TensorShard
from forge_async.store.weight_store import Pulled, StoreConfig, WeightStore

__all__ = [
    "Manifest",
    "PartManifest",
    "Pulled",
    "StoreConfig",
    "StoreError",
    "TensorEntry",
    "TensorShard",
    "VersionGone",
    "WeightStore",
    "tensor_digest",
    "version_digest",
]
