"""Private symbols and start-up details of Monarch 0.7.0, all in one place.

- ``WORKER_MAIN``: Monarch's own worker entry sets neither CPU affinity nor signal dispositions, and its runtime threads
  are up before any user code runs; an affinity set later would miss them. So the worker starts with this line instead
  and then becomes Monarch's ``bootstrap_main``. ``tests/mesh/test_actor.py::test_process_environment`` fails when the
  entry moves.
- ``ActorError`` is pickled by Monarch with the exception it carries, which is rebuilt from ``args`` alone: one whose
  ``__init__`` takes something else arrives as an unrelated ``TypeError``. Here it is rebuilt without ``__init__``; one
  that cannot be pickled at all becomes a ``RuntimeError`` with its text. ``test_remote_errors_keep_their_kind`` tells.
- ``shutdown_at_exit``: Monarch ends its client at interpreter exit and gives that one second; on a busy machine the
  ``TimeoutError`` is printed after an otherwise clean run.
- ``without_log_notice``: Monarch's client writes where its own log goes to standard error, straight from Rust, on every
  start; no setting of it (``MONARCH_FILE_LOG`` included) leaves the line out. Other lines pass.
  ``test_the_notice_of_monarchs_own_log_is_left_out`` tells when there is none any more.
- ``show_endpoints``: an endpoint is an object without signature or docstring of its own, so that the reference would
  leave it out; the documentation's build puts the methods back. ``test_the_reference_has_what_scripts_use`` tells.
- ``SupervisionError``: exported only by the Rust bindings.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cloudpickle
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch._src.actor.endpoint import EndpointProperty
from monarch.actor import ActorError, HostMesh, ProcMesh, default_bootstrap_cmd, shutdown_context, this_host

from forge_async.mesh.processes import HOST_CORES_VARIABLE

__all__ = ["CORES_VARIABLE", "SupervisionError", "WORKER_MAIN", "shutdown_at_exit", "spawn_proc_mesh"]

CORES_VARIABLE = "FORGE_ASYNC_CORES"
LOG_NOTICE = b"Monarch internal logs are being written to "

WORKER_MAIN = f"""
import os, runpy, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
cores = os.environ.get("{CORES_VARIABLE}")
if cores:
    os.environ["{HOST_CORES_VARIABLE}"] = ",".join(map(str, os.sched_getaffinity(0)))
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


def show_endpoints(actor: type) -> None:
    """Put the methods of an actor's endpoints in their places: for its documentation, it is no actor afterwards."""
    for name, value in list(vars(actor).items()):
        if isinstance(value, EndpointProperty):
            setattr(actor, name, value._method)


@contextlib.contextmanager
def without_log_notice() -> Iterator[None]:
    """What is written to standard error meanwhile comes after it, less Monarch's line about its log."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept:
        before = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            kept.seek(0)
            for line in kept:
                if not line.startswith(LOG_NOTICE):
                    os.write(before, line)
            os.close(before)


@functools.cache
def shutdown_at_exit() -> None:
    """Start Monarch's client, and end it at exit before Monarch's own handler would, with more patience."""
    with without_log_notice():
        this_host()  # registers Monarch's handler; handlers run in reverse order of registration

    def shut_down() -> None:
        with contextlib.suppress(Exception):  # the interpreter is ending: nobody is left to handle it
            shutdown_context(host_timeout=0.3).get(timeout=5.0)

    atexit.register(shut_down)


def _rebuild_actor_error(
    kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any], message: str, formatted: str
) -> ActorError:
    exception = kind.__new__(kind, *args)
    exception.args = args
    exception.__dict__.update(state)
    error = ActorError.__new__(ActorError)
    error.exception, error.message, error.exception_formatted = exception, message, formatted
    return error


def _reduce_actor_error(error: ActorError) -> tuple[Any, ...]:
    exception = error.exception
    carried = (type(exception), exception.args, dict(exception.__dict__))
    try:
        cloudpickle.dumps(carried)
    except Exception:
        carried = (RuntimeError, (f"{type(exception).__name__}: {exception}",), {})
    return _rebuild_actor_error, (*carried, error.message, error.exception_formatted)


ActorError.__reduce__ = _reduce_actor_error  # type: ignore[method-assign]
