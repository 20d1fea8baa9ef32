"""The scope of a run's processes: whatever is spawned inside is gone when it ends, however it ends."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import signal
import threading
import uuid
from types import TracebackType
from typing import Any, Protocol

from forge_async.errors import ForgeError
from forge_async.mesh.monarch_compat import shutdown_at_exit
from forge_async.mesh.processes import find_processes, kill_processes, wait_until_gone
from forge_async.mesh.supervision import install_fault_hook

logger = logging.getLogger(__name__)


class Stoppable(Protocol):
    """Anything a runtime owns."""

    async def stop(self) -> None: ...


_current: MeshRuntime | None = None


def current_runtime() -> MeshRuntime:
    """The runtime that is open now; every spawn belongs to it."""
    if _current is None:
        raise ForgeError("nothing may be spawned outside a run: open `async with MeshRuntime():` first")
    return _current


class MeshRuntime:
    """``async with MeshRuntime() as runtime:`` owns every actor spawned inside.

    At exit (also by an exception, Ctrl-C, SIGTERM) it stops what it owns, all at once, then looks in the process table
    for processes that carry its run id and kills those that outlive the grace period. A second Ctrl-C, or a second
    cancellation, kills at once. SIGTERM ends the enclosing task as Ctrl-C does and exits with status 143.

    Args:
        grace_s: seconds that stopped processes have to end by themselves.
    """

    def __init__(self, grace_s: float = 5.0) -> None:
        self.run_id = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self.grace_s = grace_s
        self.killed: list[int] = []
        """Pids that had to be killed at exit."""
        self._owned: list[Stoppable] = []
        self._gpu_loans: dict[str, int] = {}
        self._terminated = False
        self._restore_sigterm = False
        self._main_task: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> MeshRuntime:
        global _current
        if _current is not None:
            raise ForgeError("a MeshRuntime is already open in this process")
        install_fault_hook()
        shutdown_at_exit()
        _current = self
        atexit.register(self._kill_now)
        self._main_task = asyncio.current_task()
        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._on_sigterm)
            self._restore_sigterm = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _current
        stopping = asyncio.ensure_future(self._stop_all())
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            self._kill_now()
            await asyncio.gather(stopping, return_exceptions=True)
            raise
        except BaseException:
            self._kill_now()
            raise
        finally:
            _current = None
            atexit.unregister(self._kill_now)
            if self._restore_sigterm:
                asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        if self._terminated:
            raise SystemExit(128 + signal.SIGTERM)

    def adopt(self, owned: Stoppable) -> None:
        """Stop ``owned`` when the run ends."""
        self._owned.append(owned)

    def stop_later(self, proc_mesh: Any) -> None:
        """Stop a proc mesh that never got an actor."""

        class Bare:
            async def stop(self) -> None:
                with contextlib.suppress(Exception):  # it may never have started
                    await proc_mesh.stop()

        self.adopt(Bare())

    def borrow_gpus(self, count: int) -> list[str]:
        """The ``count`` least used GPUs of this machine, as ``CUDA_VISIBLE_DEVICES`` names them."""
        visible = visible_gpus()
        if len(visible) < count:
            raise ForgeError(f"with_gpus: {count} GPUs are needed by one actor, {len(visible)} are visible: {visible}")
        chosen = sorted(visible, key=lambda gpu: (self._gpu_loans.get(gpu, 0), visible.index(gpu)))[:count]
        for gpu in chosen:
            self._gpu_loans[gpu] = self._gpu_loans.get(gpu, 0) + 1
        return chosen

    def return_gpus(self, gpus: list[str]) -> None:
        """Give back what :meth:`borrow_gpus` lent."""
        for gpu in gpus:
            self._gpu_loans[gpu] -= 1

    def processes(self) -> list[int]:
        """Pids of all living processes of this run, except the controller."""
        return find_processes(self.run_id)

    async def _stop_all(self) -> None:
        owned, self._owned = self._owned, []
        for result in await asyncio.gather(*(each.stop() for each in owned), return_exceptions=True):
            if isinstance(result, BaseException):  # the others are stopped too; leftovers are killed below
                logger.error("stopping failed", exc_info=result)
        remaining = await wait_until_gone(self.processes(), self.grace_s)
        if remaining:
            logger.warning("processes %s outlived the run by %.0f s: killed", remaining, self.grace_s)
            self.killed = remaining
            kill_processes(remaining)
            await wait_until_gone(remaining, self.grace_s)

    def _kill_now(self) -> None:
        kill_processes(self.processes())

    def _on_sigterm(self) -> None:
        self._terminated = True
        if self._main_task is not None and not self._main_task.done():
            self._main_task.cancel("SIGTERM")
        else:  # opened in a notebook's cell that has ended: nobody is left to unwind, so the signal does what it would
            self._kill_now()
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)


def visible_gpus() -> list[str]:
    """GPUs this process may hand out: ``CUDA_VISIBLE_DEVICES`` where set, else all that the driver lists."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is not None:
        return [name for name in variable.split(",") if name]
    with contextlib.suppress(FileNotFoundError):
        return [str(index) for index in range(len(os.listdir("/proc/driver/nvidia/gpus")))]
    return []
