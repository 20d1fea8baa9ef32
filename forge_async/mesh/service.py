"""A service: several replicas of one actor behind one address, each on processes of its own.

Calls go to the least loaded healthy replica. A replica that dies is respawned in the background while the others go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal

from forge_async.errors import ForgeError
from forge_async.mesh.errors import ActorDied, ReplicaDied, ServiceGaveUp

if TYPE_CHECKING:
    from forge_async.mesh.actor import ActorBuilder, ActorHandle

logger = logging.getLogger(__name__)

ReplicaState = Literal["starting", "healthy", "dead", "stopped"]


class Replica:
    """One slot of a service; its handle changes when it is respawned."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.state: ReplicaState = "starting"
        self.handle: ActorHandle | None = None
        self.in_flight = 0
        """Calls now waiting for this slot."""
        self.respawns = 0
        self.failed_starts = 0
        """Starts that failed in a row."""
        self.last_failure: BaseException | None = None

    @property
    def pids(self) -> list[int]:
        return self.handle.pids() if self.handle is not None else []


class Service:
    """Made by ``SomeActor.options(num_replicas=...).as_service(*args)``."""

    max_failed_starts = 3
    """A slot whose replica fails to start this often in a row is given up."""
    max_sessions = 10_000
    """Sessions remembered; beyond, the oldest is forgotten and may move to another replica."""

    def __init__(
        self,
        builder: ActorBuilder,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        on_respawn: Callable[[ActorHandle], Awaitable[None]] | None = None,
    ) -> None:
        self.on_respawn = on_respawn
        """Awaited with a respawned replica's handle before calls are routed to it."""
        self.replicas = [Replica(index) for index in range(builder.actor_options.num_replicas)]
        self._builder, self._args, self._kwargs = builder, args, kwargs
        self.label = builder.actor_class.__name__
        self._sessions: dict[str, int] = {}
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopped = False

    async def start(self) -> None:
        """Spawn all replicas; the first failure stops the service and is raised."""
        results = await asyncio.gather(*(self._spawn(replica) for replica in self.replicas), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            await self.stop()
            raise failures[0]
        for replica in self.replicas:
            replica.state = "healthy"

    async def call(
        self, name: str, /, *args: Any, session: str | None = None, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Call endpoint ``name`` of the least loaded healthy replica; waits while there is none.

        Calls with the same ``session`` go to the same replica as long as it lives. A replica of several processes is
        called on rank 0, which speaks for it. ``timeout`` counts from when a replica was chosen.

        Raises:
            ReplicaDied: the replica died with this call in flight.
            ServiceGaveUp: no replica is left.
            ForgeError: the service was stopped, or the endpoint's own; otherwise as ``ActorHandle.call``.
        """
        while True:
            replica = await self._choose(session)
            handle = replica.handle
            assert handle is not None
            replica.in_flight += 1
            try:
                return await handle.call_one(name, *args, timeout=timeout, **kwargs)
            except ActorDied as error:
                self._note_death(replica, handle)
                raise ReplicaDied(f"{self.label} replica {replica.index}: {error}") from error
            finally:
                replica.in_flight -= 1

    def pin(self, session: str, index: int) -> None:
        """Send ``session`` to replica ``index`` while that lives, as if its first call had gone there."""
        self._sessions[session] = index

    async def fan_out(self, name: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Call endpoint ``name`` on every process of every replica at once; rank 0's results by replica.

        A replica that is not healthy yields None; one that fails yields its exception. Nothing is raised.
        """

        async def one(replica: Replica) -> Any:
            handle = replica.handle
            if replica.state != "healthy" or handle is None:
                return None
            try:
                return (await handle.call(name, *args, timeout=timeout, **kwargs))[0]
            except ActorDied as error:
                self._note_death(replica, handle)
                return ReplicaDied(f"{self.label} replica {replica.index}: {error}")
            except Exception as error:
                return error

        return list(await asyncio.gather(*(one(replica) for replica in self.replicas)))

    async def replace(self, index: int) -> None:
        """Kill replica ``index``, whatever it is doing, and respawn it; returns when the new one is healthy.

        Calls in flight there fail with ``ReplicaDied``.
        """
        replica = self.replicas[index]
        if replica.state == "healthy" and replica.handle is not None:
            handle = replica.handle
            handle.kill()
            self._note_death(replica, handle)
        async with self._changed:
            await self._changed.wait_for(lambda: replica.state != "starting" and replica.state != "dead")
        if replica.state != "healthy":
            raise ForgeError(f"{self.label} replica {index} could not be respawned: {replica.last_failure}")

    async def stop(self) -> None:
        """Stop every replica; waiting calls fail."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        handles = [replica.handle for replica in self.replicas if replica.handle is not None]
        for replica in self.replicas:
            replica.state = "stopped"
        await self._notify()
        await asyncio.gather(*(handle.stop() for handle in handles), return_exceptions=True)

    async def _choose(self, session: str | None) -> Replica:
        def candidates() -> list[Replica]:
            return [r for r in self.replicas if r.state == "healthy" and r.handle is not None and r.handle.healthy]

        async with self._changed:
            await self._changed.wait_for(
                lambda: self._stopped or candidates() or all(r.state == "stopped" for r in self.replicas)
            )
        healthy = candidates()
        if not healthy:
            causes = {str(r.last_failure) for r in self.replicas if r.last_failure is not None}
            if self._stopped:
                raise ForgeError(f"service of {self.label}: it was stopped")
            raise ServiceGaveUp(f"service of {self.label}: gave up: {causes}")
        if session is not None:
            pinned = self._sessions.get(session)
            for replica in healthy:
                if replica.index == pinned:
                    return replica
        chosen = min(healthy, key=lambda replica: replica.in_flight)
        if session is not None:
            self._sessions[session] = chosen.index
            if len(self._sessions) > self.max_sessions:
                del self._sessions[next(iter(self._sessions))]
        return chosen

    async def _spawn(self, replica: Replica) -> ActorHandle:
        options = self._builder.actor_options.for_replica(replica.index)
        builder = type(self._builder)(self._builder.actor_class, options)
        handle = await builder.spawn(*self._args, **self._kwargs)
        replica.handle = handle
        handle.on_death(lambda: self._note_death(replica, handle))
        return handle

    def _note_death(self, replica: Replica, handle: ActorHandle) -> None:
        if self._stopped or replica.handle is not handle or replica.state != "healthy":
            return
        cause = handle.death_cause or "replaced"
        logger.warning("%s replica %d died (%s); respawning it", self.label, replica.index, cause)
        replica.state = "dead"
        task = asyncio.ensure_future(self._respawn(replica, handle))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _respawn(self, replica: Replica, dead: ActorHandle) -> None:
        await dead.stop(timeout_s=1.0)
        replica.state = "starting"
        while replica.failed_starts < self.max_failed_starts:
            try:
                handle = await self._spawn(replica)
                if self.on_respawn is not None:
                    await self.on_respawn(handle)
            except Exception as error:
                replica.failed_starts += 1
                replica.last_failure = error
                logger.warning(
                    "%s replica %d failed to start (%d): %s", self.label, replica.index, replica.failed_starts, error
                )
                if replica.handle is not None:
                    await replica.handle.stop(timeout_s=1.0)
                continue
            replica.failed_starts = 0
            replica.respawns += 1
            replica.state = "healthy"
            break
        else:
            replica.state = "stopped"
        await self._notify()
        if replica.state == "healthy" and replica.handle is not None and not replica.handle.healthy:
            self._note_death(replica, replica.handle)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
