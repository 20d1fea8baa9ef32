"""Settings of the weight store."""

from __future__ import annotations

from dataclasses import dataclass

from forge_async.errors import require


@dataclass(frozen=True)
class StoreConfig:
    """How weights travel from the trainer to the policy."""

    dtype: str = "auto"
    """What floating-point weights are published in: float32, bfloat16 or float16, cast once by the trainer; auto: the
    ``policy.dtype`` of a run, and without a run the dtype they come in."""
    bucket_mib: int = 256
    """Largest packed buffer, MiB; a larger tensor gets a buffer of its own."""
    keep_versions: int = 2
    """Newest versions kept when no reader holds them."""
    transport: str = "auto"
    """``shared_memory``: on one host only, an error elsewhere; ``rpc``: through Monarch's messages; ``auto``: shared
    memory for each writer and reader that is on the store's host, messages for the others."""
    lease_ttl_s: float = 60.0
    """Seconds after which the hold of a reader that died ends; living readers renew theirs."""

    def __post_init__(self) -> None:
        dtypes = ("auto", "float32", "bfloat16", "float16")
        require(self.dtype in dtypes, "dtype", self.dtype, f"one of {', '.join(dtypes)}")
        require(self.bucket_mib >= 1, "bucket_mib", self.bucket_mib, "at least 1 (MiB)")
        require(self.keep_versions >= 1, "keep_versions", self.keep_versions, "at least 1")
        require(self.lease_ttl_s > 0, "lease_ttl_s", self.lease_ttl_s, "above 0 (seconds)")
        transports = ("auto", "shared_memory", "rpc")
        require(self.transport in transports, "transport", self.transport, f"one of {', '.join(transports)}")
