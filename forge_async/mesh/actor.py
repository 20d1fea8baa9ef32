"""Actors: a class whose instances live in processes of their own, and the handle through which they are called."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from monarch.actor import Actor, ActorError, HostMesh, concurrent_endpoint, this_host
from monarch.spmd import setup_torch_elastic_env_async

from forge_async.errors import ForgeError, require
from forge_async.mesh.errors import ActorDied, RemoteError
from forge_async.mesh.monarch_compat import CORES_VARIABLE, SupervisionError, spawn_proc_mesh
from forge_async.mesh.placement import deal
from forge_async.mesh.processes import RUN_VARIABLE, ProcessWatch, kill_processes, wait_until_gone
from forge_async.mesh.supervision import Fault, faults

if TYPE_CHECKING:
    from forge_async.mesh.runtime import MeshRuntime
    from forge_async.mesh.service import Service

_spawn_numbers = itertools.count()

KILLED_S = 10.0
"""Longest wait for the end of processes that were sent SIGKILL; it takes a moment, on a loaded machine several."""

WORKER_ENVIRONMENT = {
    "GLIBC_TUNABLES": ":".join(
        (
            "glibc.malloc.hugetlb=1",  # what is touched first is so in huge pages
            "glibc.malloc.mmap_max=0",  # large tensors, too, come from the heap, side by side: most are in huge pages
            "glibc.malloc.trim_threshold=17179869184",  # and what a step frees is there for the next one
            "glibc.malloc.top_pad=67108864",
            "glibc.cpu.x86_non_temporal_threshold=0x60000",  # memcpy writes past the caches from 384 KiB on
        )
    ),
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning,ignore::UserWarning",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Set in every worker before its interpreter starts: memory is had for all weights' copies to be fast (docs/mesh.md),
idle threads yield their core, nothing reaches for a hub, and the engines' notices to their own developers stay out of
a run's output."""


class ForgeActor(Actor):
    """Base of every actor of the project. Endpoints are all ``async``; long ones use ``@concurrent_endpoint``."""

    @concurrent_endpoint
    async def process_id(self) -> int:
        """The pid of this actor's process."""
        return os.getpid()

    @classmethod
    def options(cls, **options: Any) -> ActorBuilder:
        """How to spawn this class: see :class:`ActorOptions` for the keywords."""
        return ActorBuilder(cls, ActorOptions(**options))

    @classmethod
    async def spawn(cls, *args: Any, **kwargs: Any) -> ActorHandle:
        """Spawn on one process of this host with default options."""
        return await cls.options().spawn(*args, **kwargs)

    @classmethod
    async def as_service(cls, *args: Any, **kwargs: Any) -> Service:
        """A service of this class with default options; ``num_replicas=`` and ``on_respawn=`` as in the builder's."""
        return await cls.options().as_service(*args, **kwargs)


@dataclass(frozen=True)
class ActorOptions:
    """Where and how an actor runs."""

    procs: int = 1
    """Processes (ranks) of the actor, per host."""
    cores: list[int] | list[list[int]] | None = None
    """Cores of all ranks together, dealt in equal runs (fewer cores than ranks: shared); a list of lists gives one
    such list per replica of a service; None: not pinned."""
    hosts: HostMesh | None = None
    """Monarch host mesh; None: this host."""
    with_gpus: bool = False
    """Give every process a GPU: the least used of those visible."""
    env: Mapping[str, str] | None = None
    """More environment variables; they win over the built-in ones."""
    num_replicas: int = 1
    """Replicas of a service."""
    name: str | None = None
    """Shown in Monarch's logs; default: the class name."""

    def __post_init__(self) -> None:
        require(self.procs >= 1, "procs", self.procs, "at least 1")
        require(self.num_replicas >= 1, "num_replicas", self.num_replicas, "at least 1")

    def for_replica(self, index: int) -> ActorOptions:
        """The options of one replica: its own cores where they are given per replica."""
        if self.cores and isinstance(self.cores[0], list):
            return replace(self, cores=self.cores[index % len(self.cores)])
        return self


@dataclass(frozen=True)
class ActorBuilder:
    """An actor class together with its options."""

    actor_class: type[ForgeActor]
    actor_options: ActorOptions

    def options(self, **options: Any) -> ActorBuilder:
        """The same with some options changed."""
        return replace(self, actor_options=replace(self.actor_options, **options))

    async def spawn(self, *args: Any, **kwargs: Any) -> ActorHandle:
        """Start the processes and the actor; returns when ``__init__`` has run on every rank.

        Raises:
            ForgeError: raised by ``__init__`` itself, or ``RemoteError`` with its traceback.
        """
        from forge_async.mesh.runtime import current_runtime

        return await spawn_actor(current_runtime(), self.actor_class, self.actor_options, args, kwargs)

    async def as_service(
        self,
        *args: Any,
        num_replicas: int | None = None,
        on_respawn: Callable[[ActorHandle], Awaitable[None]] | None = None,
        **kwargs: Any,
    ) -> Service:
        """Spawn ``num_replicas`` of it behind one address."""
        from forge_async.mesh.runtime import current_runtime
        from forge_async.mesh.service import Service

        builder = self if num_replicas is None else self.options(num_replicas=num_replicas)
        service = Service(builder, args, kwargs, on_respawn)
        current_runtime().adopt(service)
        await service.start()
        return service


class ActorHandle:
    """One spawned actor: its processes, and calls to its endpoints. Lives in the controller."""

    def __init__(self, mesh: Any, proc_mesh: Any, procs: int, label: str) -> None:
        self.mesh = mesh
        """The Monarch actor mesh."""
        self.procs = procs
        self.label = label
        self.devices: list[str] = []
        """GPUs lent to this actor."""
        self.death_cause: str | None = None
        self.proc_mesh = proc_mesh
        """The Monarch proc mesh, for further actors in the same processes."""
        self._pids: list[int] = []
        self._watch: ProcessWatch | None = None
        self._loop = asyncio.get_running_loop()
        self._died: asyncio.Future[str] = self._loop.create_future()
        self._stopped = False
        self._stop_task: asyncio.Task[None] | None = None
        self._on_stop: list[Callable[[], None]] = []
        self._death_listeners: list[Callable[[], None]] = []
        faults.register(label, self._fault)

    @property
    def raw(self) -> Any:
        """The Monarch actor mesh, to be passed to other actors as an argument."""
        return self.mesh

    @property
    def healthy(self) -> bool:
        """False once it was stopped, a process of it ended, or Monarch reported a fault."""
        return not self._stopped and self.death_cause is None

    def pids(self) -> list[int]:
        """Pids by rank."""
        return list(self._pids)

    async def call(self, name: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Call endpoint ``name`` on every rank; values by rank.

        Raises:
            ForgeError: as raised by the endpoint, whatever its subclass; ``RemoteError`` for any other exception.
            ActorDied: the actor is dead or died meanwhile.
            TimeoutError: after ``timeout`` seconds; the endpoint itself goes on.
        """
        values = await self._await(name, lambda: getattr(self.mesh, name).call(*args, **kwargs), timeout)
        return list(values.values())

    async def call_one(self, name: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call endpoint ``name`` on rank 0 only; otherwise as :meth:`call`."""
        target = self.mesh if self.procs == 1 else self.mesh.slice(procs=0)
        return await self._await(name, lambda: getattr(target, name).call_one(*args, **kwargs), timeout)

    async def stop(self, timeout_s: float = 5.0) -> None:
        """End the actor and its processes: asked first, killed after ``timeout_s``. Safe to call again."""
        if self._stop_task is None:
            self._stopped = True
            self._stop_task = asyncio.ensure_future(self._stop(timeout_s))
        await asyncio.shield(self._stop_task)

    def kill(self) -> None:
        """SIGKILL to every process of the actor, now."""
        kill_processes(self._pids)

    def on_death(self, listener: Callable[[], None]) -> None:
        """Call ``listener()`` in the event loop when the actor dies without having been stopped."""
        self._death_listeners.append(listener)

    async def _await(self, name: str, start: Callable[[], Any], timeout: float | None) -> Any:
        what = f"{self.label}.{name}"
        if not self.healthy:
            raise ActorDied(f"{what}: the actor {'was stopped' if self._stopped else f'is dead: {self.death_cause}'}")

        async def answer() -> Any:
            return await start()

        task = asyncio.ensure_future(answer())
        try:
            await asyncio.wait({task, self._died}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return self._result(what, task)
            if self._died.done():
                raise ActorDied(f"{what}: {self._died.result()}")
            raise TimeoutError(f"{what} did not answer within {timeout} s")
        finally:
            if not task.done():
                task.cancel()

    def _result(self, what: str, task: asyncio.Task[Any]) -> Any:
        try:
            return task.result()
        except (ActorError, SupervisionError) as error:
            translated = translate(what, error)
            if isinstance(translated, ActorDied):
                self._mark_dead(summarize(str(error)))
            raise translated from error

    def _watch_processes(self, pids: list[int], remote: bool) -> None:
        self._pids = pids
        if not remote:
            self._watch = ProcessWatch(pids, lambda pid: self._mark_dead(f"process {pid} ended"))

    def _fault(self, fault: Fault) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._mark_dead, summarize(fault.report))

    def _mark_dead(self, cause: str) -> None:
        if self.death_cause is None and not self._stopped:
            self.death_cause = cause
            if not self._died.done():
                self._died.set_result(cause)
            for listener in self._death_listeners:
                listener()

    async def _stop(self, timeout_s: float) -> None:
        if not self._died.done():
            self._died.set_result("it was stopped")
        if self._watch is not None:
            self._watch.close()
        deadline = time.monotonic() + timeout_s

        async def ask() -> None:
            with contextlib.suppress(Exception):  # a mesh that already failed has nothing to stop
                await self.proc_mesh.stop(f"{self.label} stopped")

        asking = asyncio.ensure_future(ask())
        try:
            if self._pids:
                remaining = await wait_until_gone(self._pids, timeout_s)
                kill_processes(remaining)
                await wait_until_gone(remaining, KILLED_S)
            await asyncio.wait({asking}, timeout=max(0.5, deadline - time.monotonic()))
        finally:
            asking.cancel()
            faults.unregister(self.label)
            for callback in self._on_stop:
                callback()


def translate(what: str, error: ActorError | SupervisionError) -> ForgeError:
    """The project's own exception for one that Monarch raised at the caller of ``what``."""
    if isinstance(error, SupervisionError):
        return ActorDied(f"{what}: {summarize(str(error))}")
    if isinstance(error.exception, ForgeError):
        return error.exception
    return RemoteError(f"{what} failed: {error.exception!r}\n{error.exception_formatted}")


async def spawn_actor(
    runtime: MeshRuntime, actor_class: type[ForgeActor], options: ActorOptions, args: Any, kwargs: Any
) -> ActorHandle:
    """Start one actor on its own proc mesh, owned by ``runtime``."""
    hosts = options.hosts if options.hosts is not None else this_host()
    label = f"{options.name or actor_class.__name__.lower()}-{next(_spawn_numbers)}"
    core_sets = deal(list(options.cores), options.procs) if options.cores else None  # type: ignore[arg-type]
    devices = runtime.borrow_gpus(options.procs) if options.with_gpus else []
    single = single_process_group_environment() if options.procs == 1 and options.hosts is None else {}

    def environment(rank: int) -> dict[str, str]:
        variables = dict(WORKER_ENVIRONMENT) | single | {RUN_VARIABLE: runtime.run_id}
        if core_sets is not None:
            own = core_sets[rank % options.procs]
            variables |= {CORES_VARIABLE: ",".join(map(str, own)), "OMP_NUM_THREADS": str(len(own))}
        if devices:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        return variables | dict(options.env or {})

    proc_mesh = spawn_proc_mesh(hosts, options.procs, f"{label}-procs", environment)
    handle: ActorHandle | None = None
    try:
        if not single:
            local = options.hosts is None
            address = ("127.0.0.1", free_port()) if local else (None, None)
            await setup_torch_elastic_env_async(proc_mesh, *address)
        mesh = proc_mesh.spawn(label, actor_class, *args, **kwargs)
        handle = ActorHandle(mesh, proc_mesh, options.procs, label)
        handle.devices = devices
        if devices:
            handle._on_stop.append(lambda: runtime.return_gpus(devices))
        runtime.adopt(handle)
        handle._watch_processes(await handle.call("process_id"), remote=options.hosts is not None)
    except BaseException:
        if handle is not None:
            await handle.stop()
        else:
            if devices:
                runtime.return_gpus(devices)
            runtime.stop_later(proc_mesh)
        raise
    return handle


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def single_process_group_environment() -> dict[str, str]:
    """What torch.distributed needs for a group of one."""
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


def summarize(report: str) -> str:
    """One line out of a supervision report: the exception it carries, else its first line."""
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", report).splitlines() if line.strip()]
    frames = [index for index, line in enumerate(lines) if line.lstrip().startswith('File "')]
    if frames:
        for line in lines[frames[-1] + 1 :]:
            if re.match(r"\s{0,4}[A-Za-z_][\w.]*(: |$)", line):
                return line.strip()
    return lines[0].strip() if lines else "no report"
