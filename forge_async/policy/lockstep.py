"""Lockstep: the engines of a tensor-parallel replica do the same things in the same order.

vLLM's ``external_launcher`` runs a whole engine, scheduler included, in each rank; they meet in the collectives of the
forward pass. That works as long as every rank adds the same requests, aborts them and swaps weights between the same
two forward passes. So rank 0 alone takes commands, and before every forward pass it sends the others those it took:

```
 rank 0:  inbox ──take──▶ send ──▶ carry out ──▶ forward pass ──▶ ...
                            │                        ║ collectives
 others:  (blocked) ◀───────┘ receive ─▶ carry out ─▶ forward pass ──▶ ...
```

While rank 0 has nothing to do it sends nothing, and the others sleep in a socket. A rank that dies closes its sockets:
the others fail at once where they wait for it here.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from forge_async.errors import ForgeError

Command = tuple[str, Any]
"""A kind and its payload, as the engine's inbox holds them."""

OWN_PAYLOAD = "swap"
"""The kind whose payload, (version, tensors, future), every rank has of its own: only the version travels."""

_FOREVER = timedelta(days=3650)
"""A replica may be idle for long."""


class LockstepBroken(ForgeError):
    """The ranks of a replica are no longer in the same state: it must be replaced."""


class Lockstep:
    """One rank's end. Collective: make it on every rank, after vLLM has initialised ``torch.distributed``."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self._commands = dist.new_group(backend="gloo", timeout=_FOREVER)
        self._outcomes = dist.new_group(backend="gloo", timeout=_FOREVER)

    def send(self, posted: list[Command] | None, state: int) -> None:
        """On rank 0, before each forward pass: what it took from its inbox, or None for the end.

        Args:
            state: any number that is the same on ranks in the same state.
        """
        data = b""
        if posted != []:
            own = posted and [(kind, content[0] if kind == OWN_PAYLOAD else content) for kind, content in posted]
            data = _dump(own)
        dist.broadcast(torch.tensor([len(data), state]), src=0, group=self._commands)
        if data:
            dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), src=0, group=self._commands)

    def receive(self, own_payload: Callable[[int], Any], state: int) -> list[Command] | None:
        """On the other ranks: blocks until rank 0 sends; futures among the payloads are fresh ones.

        Args:
            own_payload: waits for this rank's own payload of a version's swap.
        Raises:
            LockstepBroken: rank 0 is in another ``state``.
        """
        header = torch.empty(2, dtype=torch.int64)
        dist.broadcast(header, src=0, group=self._commands)
        size, leader_state = header.tolist()
        if leader_state != state:
            raise LockstepBroken(
                f"rank {self.rank} sampled other tokens than rank 0 (state {state}, not {leader_state})"
            )
        if not size:
            return []
        data = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._commands)
        posted = _load(data.numpy().tobytes())
        if posted is None:
            return None
        return [(kind, own_payload(content) if kind == OWN_PAYLOAD else content) for kind, content in posted]

    def gather(self, outcome: Any) -> list[Any]:
        """Every rank's ``outcome`` (picklable), by rank. Collective; from any one thread at a time."""
        outcomes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome, group=self._outcomes)
        return outcomes


class _Pickler(pickle.Pickler):
    """Writes a future as a mark: whoever asked waits on rank 0."""

    def persistent_id(self, value: Any) -> str | None:
        return "future" if isinstance(value, Future) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, mark: str) -> Future[Any]:
        return Future()


def _dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _load(data: bytes) -> Any:
    return _Unpickler(io.BytesIO(data)).load()
