"""Faults that Monarch reports, handed to whoever owns the mesh they happened on.

Without a hook Monarch answers an unhandled fault with ``KeyboardInterrupt`` in the controller. The hook installed here
collects the fault instead and the owner of the mesh decides: a service respawns its replica, a trainer's death ends the
run.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass

import monarch.actor

logger = logging.getLogger(__name__)

os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")
"""Read by Monarch when its first mesh is made; its default notices a death only after about 10 s."""


@dataclass(frozen=True)
class Fault:
    """One supervision event."""

    mesh_name: str
    report: str


class FaultBoard:
    """Collects faults and hands each to the listeners of its mesh. Thread-safe: the hook runs on a Monarch thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, Callable[[Fault], None]] = {}
        self.unclaimed: list[Fault] = []
        """Faults of meshes nobody had registered, newest last (at most 100)."""

    def register(self, name: str, listener: Callable[[Fault], None]) -> None:
        """Call ``listener(fault)``, on Monarch's thread, for faults of meshes whose name contains ``name``."""
        with self._lock:
            self._listeners[name] = listener

    def unregister(self, name: str) -> None:
        with self._lock:
            self._listeners.pop(name, None)

    def report(self, mesh_name: str, report: str) -> None:
        """Hand a fault on, or keep it when no listener knows the mesh."""
        fault = Fault(mesh_name, report)
        with self._lock:
            # Names are unique per spawn; a dead process is reported under its actors' or its proc mesh's name. They end
            # in a number, and reward-1 is not reward-10.
            listeners = [
                listener
                for name, listener in self._listeners.items()
                if re.search(rf"{re.escape(name)}(?!\d)", mesh_name)
            ]
            if not listeners:
                self.unclaimed = [*self.unclaimed[-99:], fault]
        for listener in listeners:
            listener(fault)
        if not listeners:
            logger.debug("fault on %s, which nobody watches any more: %s", mesh_name, report)


faults = FaultBoard()


def _hook(failure: object) -> None:
    faults.report(str(failure.mesh_name), str(failure))  # type: ignore[attr-defined]


def install_fault_hook() -> None:
    """Make faults survivable; idempotent."""
    monarch.actor.unhandled_fault_hook = _hook
