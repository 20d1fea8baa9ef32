"""Whether a generator holds what the trainer published, tensor by tensor and bit by bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from forge_async.errors import ForgeError
from forge_async.store.digest import tensor_digest


class DigestMismatchError(ForgeError):
    """What the generator holds is not what the trainer published."""


def attest(
    version: int,
    digests: Mapping[str, str],
    published: Mapping[str, torch.Tensor],
    held: Iterable[tuple[str, torch.dtype, str]],
    aliases: Mapping[str, str],
) -> None:
    """Compare what the generator holds with what was published.

    Args:
        digests: of the published tensors, by HF name.
        published: the tensors as pulled; converted for the comparison where the generator's dtype is another.
        held: (HF name, dtype, digest) as the generator holds them.
        aliases: names which the generator holds as another one (tied embeddings).
    Raises:
        DigestMismatchError: naming the first tensor that differs.
    """
    for name, dtype, found in held:
        same = published[name].dtype == dtype
        expected = digests[name] if same else tensor_digest(published[name].to(dtype))
        if found != expected:
            raise DigestMismatchError(
                f"version {version}: {name} is held with digest {found}, published was {expected}"
            )
    for name, target in aliases.items():
        if name in digests and digests[name] != digests[target]:
            raise DigestMismatchError(
                f"version {version}: {name} and {target} differ, but are one tensor in the engine"
            )


def attest_parts(version: int, rank: int, held: Iterable[tuple[str, bool]]) -> None:
    """The same on a tensor-parallel rank, which has told of each tensor whether its parts are as published.

    Raises:
        DigestMismatchError: naming the first tensor that differs.
    """
    for name, same in held:
        if not same:
            raise DigestMismatchError(f"version {version}: rank {rank} holds {name} with other values than published")
