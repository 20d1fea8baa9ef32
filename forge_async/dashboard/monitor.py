"""The run's side of its page: starts it, and every few seconds looks at everyone and at what the page asks for.

Writes ``status.json`` (what everyone is doing now) and ``spans.jsonl``. Nothing of a run waits for it, and what it
cannot learn it leaves out: a replica that died, a trainer that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from forge_async.dashboard.commands import Commands
from forge_async.dashboard.config import MONARCH_PORT
from forge_async.dashboard.serve import PORTS_TRIED, Beside, bind
from forge_async.errors import ForgeError
from forge_async.mesh.runtime import current_runtime
from forge_async.observability.clocks import IdleMeter, RateMeter
from forge_async.observability.console import Console
from forge_async.observability.jsonl import encode
from forge_async.observability.run_folder import RunPaths, write_whole
from forge_async.observability.spans import SpanLog
from forge_async.types import Episode

if TYPE_CHECKING:
    from forge_async.buffer import RolloutBuffer
    from forge_async.config import Config
    from forge_async.mesh import ActorHandle, Service
    from forge_async.rollout.reward_worker import RewardPool
    from forge_async.steps import Step
    from forge_async.store import WeightStore

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
"""Seconds that an actor has to answer."""


class Engines(Protocol):
    """The processes that are looked at."""

    @property
    def policy(self) -> Service: ...
    @property
    def trainer(self) -> ActorHandle: ...
    @property
    def store(self) -> WeightStore: ...
    @property
    def rewards(self) -> RewardPool: ...


class Handle(Protocol):
    """The run, and what a page may ask of it."""

    @property
    def state(self) -> str: ...
    def hold(self) -> None: ...
    def let_go(self) -> None: ...
    def end(self) -> None: ...


class Monitor:
    """Made with the run; :meth:`open_page` at once, :meth:`start` when its actors are there, :meth:`stop` before they
    go, :meth:`close` at the very end.

    Args:
        record: writes an event.
        tell: is told each replica's status, whenever there is a new one.
        handle: does what a page asks for.
    """

    def __init__(
        self,
        folder: RunPaths,
        config: Config,
        record: Callable[..., None],
        tell: Callable[[int, Mapping[str, Any]], None],
        console: Console,
        handle: Handle,
    ) -> None:
        self._folder, self._config, self._record, self._console = folder, config, record, console
        self._handle, self._tell = handle, tell
        self._engines: Engines
        self._buffer: RolloutBuffer
        self._page: Beside | None = None
        self._spans: SpanLog | None = None
        self._commands = Commands(folder.commands)
        self._idle, self._rates = IdleMeter(), RateMeter()
        self._watching: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def open_page(self) -> None:
        """Serve the page, if the config says so; tell its address when it is there. A run goes on without it, too."""
        if not self._config.dashboard.enabled:
            return
        try:
            self._page = Beside.start(self._folder.path, self._config.dashboard)
        except OSError as error:
            self._console.warn(f"the dashboard's process could not be started: {error}. The run goes on without it.")
        else:
            self._begin(self._announce(self._page))

    async def open_monarch(self) -> None:
        """Serve Monarch's own page, if the config says so; to be called in an open ``MeshRuntime`` before anything is
        spawned. A run goes on without it, too."""
        if not self._config.dashboard.monarch:
            return
        from forge_async.mesh.monarch_telemetry_compat import MonarchDashboard

        try:
            page = await MonarchDashboard.start(bind("127.0.0.1", MONARCH_PORT, PORTS_TRIED))
        except Exception as error:  # parts of it are private to Monarch
            self._console.warn(f"Monarch's own dashboard did not start: {error}. The run goes on without it.")
            return
        current_runtime().adopt(page)
        self._console.print(f"Monarch's dashboard: {page.url}")
        self._record("monarch_dashboard", url=page.url)

    def start(self, engines: Engines, buffer: RolloutBuffer) -> None:
        """Look from now on, until :meth:`stop`."""
        self._engines, self._buffer = engines, buffer
        if self._config.metrics.status_every_s:
            self._spans = SpanLog(self._folder.spans)
            self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Look once more, then no more."""
        if self._watching is None:
            return
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        self._watching = None
        with contextlib.suppress(Exception):  # the run may end because of what is asked here
            await asyncio.wait_for(self.look(), ANSWER_S)

    def close(self) -> None:
        """End the page and the files."""
        for task in self._tasks:
            task.cancel()
        if self._page is not None:
            self._page.stop()
        if self._spans is not None:
            self._spans.close()

    async def token_logprobs(self, step: Step, recorded: Sequence[Episode]) -> dict[str, np.ndarray]:
        """After a step, while the trainer still has them: its log-probs of the ``recorded`` episodes before the step,
        by sequence, float32 [T]."""
        episodes = {episode.episode_id for episode in recorded}
        wanted = [sequence.sequence_id for sequence in step.sequences if sequence.episode_id in episodes]
        found: dict[str, np.ndarray] = {}
        if not wanted or step.stats.skipped:
            return found
        try:
            by_rank = await self._engines.trainer.call("token_logprobs", wanted)
        except ForgeError as error:  # a trainer that died is the loop's to find
            logger.debug("the step's log-probs could not be fetched: %s", error)
            return found
        for own in by_rank:
            for name, values in own.items():
                known = found.get(name)
                found[name] = values if known is None else np.where(np.isnan(known), values, known)
        return found

    # ---- in the background ----

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _announce(self, page: Beside) -> None:
        answer = await asyncio.to_thread(page.answer)
        if "error" in answer:
            self._console.warn(f"{answer['error']} The run goes on without its page.")
        else:
            self._console.print(f"dashboard: {answer['url']}{answer['moved']}")
            self._record("dashboard", port=answer["port"])

    async def _watch(self) -> None:
        """Looks every ``metrics.status_every_s``; ends by cancellation only."""
        while True:
            try:
                await self.look()
            except Exception as error:  # what is shown of a run must not end it
                logger.debug("the status could not be read: %r", error)
            with contextlib.suppress(OSError):
                for command in self._commands.read():
                    self._begin(self._obey(command))
            await asyncio.sleep(self._config.metrics.status_every_s)

    async def _obey(self, command: Mapping[str, Any]) -> None:
        """Carry out what a page or another process asked for, and record what came of it."""
        name, outcome = str(command.get("command")), "done"
        handle = self._handle
        actions: dict[str, Callable[[], None]] = {"pause": handle.hold, "resume": handle.let_go, "stop": handle.end}
        try:
            if name in actions:
                actions[name]()
            else:
                outcome = f"refused: {name!r} is no command"
        except ForgeError as error:
            outcome = f"failed: {error}"
        self._record("control", command=name, id=command.get("id"), outcome=outcome)
        with contextlib.suppress(Exception):
            await self.look()  # so that the page tells it at once

    # ---- what is seen ----

    async def look(self) -> None:
        """Ask everyone at once; write what they say."""
        engines, buffer, config = self._engines, self._buffer, self._config
        policy, trainer, store = await asyncio.gather(
            asyncio.gather(*(self._replica(index) for index in range(len(engines.policy.replicas)))),
            self._trainer(),
            self._store(),
        )
        rewards = engines.rewards
        self._note_spans("rewards", 0, rewards.spans.since(self._cursor("rewards", 0)), time.monotonic())
        status = {
            "at": time.time(),
            "state": self._handle.state,
            "policy": policy,
            "trainer": trainer,
            "store": store,
            "rewards": {
                "workers": config.reward.num_workers,
                "busy": rewards.busy,
                "replaced": rewards.replaced,
                "failed": rewards.failed,
            },
            "buffer": {
                "open": buffer.open,
                "ready": buffer.depth,
                "in_flight": buffer.in_flight,
                "room": buffer.room,
                "capacity": config.buffer.capacity,
                "max_staleness": config.buffer.max_staleness,
                "groups_per_step": config.buffer.groups_per_step,
                "ages": {age: list(counts) for age, counts in sorted(buffer.ages.items())},
                "trainer_version": buffer.trainer_version,
                "policy_version": buffer.policy_version,
            },
            "ledger": {**buffer.ledger.summary(), "in_flight": buffer.ledger.in_flight},
        }
        write_whole(self._folder.status, encode(status))

    async def _replica(self, index: int) -> dict[str, Any]:
        replica, name = self._engines.policy.replicas[index], f"generator {index}"
        seen: dict[str, Any] = {"replica": index, "state": replica.state, "respawns": replica.respawns}
        handle = replica.handle
        if replica.state != "healthy" or handle is None:
            return seen
        pid, asked = handle.pids()[0], time.monotonic()
        try:
            status = (await handle.call("status", self._cursor(name, pid), timeout=ANSWER_S))[0]
        except (ForgeError, TimeoutError) as error:
            return seen | {"state": "silent", "cause": str(error)}
        self._note_spans(name, pid, status["spans"], asked)
        self._tell(index, status)
        keys = ("version", "running", "waiting", "held", "draining", "generated_tokens", "finished", "swaps", "aborted")
        return seen | {
            **{key: status[key] for key in keys},
            "pid": pid,
            "digest": status["digest"],
            "swap_ms": status["swap_ms"][-1] if status["swap_ms"] else None,
            "tokens_per_s": self._rates.update(name, status["generated_tokens"]),
            "idle": self._idle.update(name, status["busy_s"], status["idle_s"]),
            "doing": "swap" if status["draining"] else "generate" if status["running"] else "wait",
        }

    async def _trainer(self) -> list[dict[str, Any]]:
        handle, asked = self._engines.trainer, time.monotonic()
        pids = handle.pids()
        cursors = [self._cursor(f"trainer {rank}", pid) for rank, pid in enumerate(pids)]
        try:
            replies = await handle.call("status", cursors, timeout=ANSWER_S)
        except (ForgeError, TimeoutError) as error:
            return [{"rank": rank, "state": "silent", "cause": str(error)} for rank in range(len(pids))]
        seen = []
        for rank, (pid, status) in enumerate(zip(pids, replies, strict=True)):
            name = f"trainer {rank}"
            doing = self._note_spans(name, pid, status["spans"], asked)
            seen.append(
                {
                    "rank": rank,
                    "state": "healthy",
                    "pid": pid,
                    "version": status["version"],
                    "trained_tokens": status["trained_tokens"],
                    "tokens_per_s": self._rates.update(name, status["trained_tokens"]),
                    "idle": self._idle.update(name, status["busy_s"], status["idle_s"]),
                    "publish_blocked_s": status["publish_blocked_s"],
                    "doing": doing or "wait",
                }
            )
        return seen

    async def _store(self) -> dict[str, Any]:
        try:
            return await asyncio.wait_for(self._engines.store.stats(), ANSWER_S)
        except (ForgeError, TimeoutError) as error:
            return {"state": "silent", "cause": str(error)}

    def _note_spans(self, actor: str, pid: int, reply: dict[str, Any], asked: float) -> str:
        return "" if self._spans is None else self._spans.add(actor, pid, reply, asked, time.monotonic())

    def _cursor(self, actor: str, pid: int) -> int:
        return 0 if self._spans is None else self._spans.cursor(actor, pid)
