"""Private symbols and start-up details of Monarch 0.7.0, all in one place.

- ``WORKER_MAIN``: Monarch's own worker entry sets neither CPU affinity nor signal dispositions, and its runtime threads
  are up before any user code runs; an affinity set later would miss them. So the worker starts with this line instead
  and then becomes Monarch's ``bootstrap_main``. ``tests/mesh/test_actor.py::test_process_environment`` fails when the
  entry moves.
- ``mesh_name``: the name under which supervision reports a mesh's failure (``ActorMesh._name``).
- ``SupervisionError``: exported only by the Rust bindings.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import HostMesh, ProcMesh, default_bootstrap_cmd

__all__ = ["SupervisionError", "WORKER_MAIN", "mesh_name", "spawn_proc_mesh"]

CORES_VARIABLE = "FORGE_ASYNC_CORES"

WORKER_MAIN = f"""
import os, runpy, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
cores = os.environ.get("{CORES_VARIABLE}")
if cores:
    os.sched_setaffinity(0, {{int(core) for core in cores.split(",")}})
runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__", alter_sys=True)
"""
"""Ctrl-C in a terminal reaches the whole process group: workers ignore it, the controller alone reacts."""


def spawn_proc_mesh(
    hosts: HostMesh, procs: int, name: str, environment: Callable[[int], Mapping[str, str]]
) -> ProcMesh:
    """Start ``procs`` processes per host; ``environment(rank)`` is set before the interpreter starts."""

    def command(point: Any) -> Any:
        bootstrap = default_bootstrap_cmd()
        bootstrap.program = sys.executable
        bootstrap.args = ["-c", WORKER_MAIN]
        return bootstrap.with_env(dict(environment(point.rank)))

    return hosts.spawn_procs(per_host={"procs": procs}, name=name, bootstrap_command=command)


def mesh_name(mesh: Any) -> str:
    """The name supervision uses for an actor mesh."""
    return mesh._name.get()
