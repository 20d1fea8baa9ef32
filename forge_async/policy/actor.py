"""The policy service's actor: one engine replica, with the follower that brings it each new version."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
import uuid
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from monarch.actor import concurrent_endpoint

from forge_async.errors import ForgeError
from forge_async.mesh import ForgeActor
from forge_async.policy.config import PolicyConfig, SamplingConfig
from forge_async.policy.follower import Follower
from forge_async.policy.turns import TurnLog, TurnSchedule, read_turns
from forge_async.store.digest import tensor_digest
from forge_async.types import Completion

if TYPE_CHECKING:
    from forge_async.policy.engine import PolicyEngine
    from forge_async.store import WeightStore

SWITCH_INTERVAL_S = 0.0005
"""How long the engine's thread keeps the interpreter's lock when another thread of the process waits for it."""


NOT_FOLLOWING = {"digest": None, "digest_mismatches": 0, "update_failed": None}
"""What the status of a replica without a weight store says of updates."""


class PolicyActor(ForgeActor):
    """A vLLM engine in a process of its own. Spawn it, then call ``setup`` once, then the other endpoints.

    With ``config.tensor_parallel_size`` above 1 spawn it on as many processes, and call ``setup`` on all of them.
    Rank 0 takes requests and follows the store for all; ``follow`` and ``sync`` return at once on the others.

    Args:
        config: the engine's settings.
        model_path: HF folder that the engine is built from.
        store: where versions come from; without one there is nothing to follow.
        seed: of the engine's draws, see :meth:`setup`.
        version: what the folder's weights are labelled with.
    """

    def __init__(
        self,
        config: PolicyConfig,
        model_path: str | Path,
        store: WeightStore | None = None,
        seed: int = 0,
        version: int = 0,
    ) -> None:
        self.config, self.model_path, self.store, self.seed = config, str(model_path), store, seed
        self._rank = int(os.environ["RANK"]) if config.tensor_parallel_size > 1 else 0
        self._first_version = version
        self._engine: PolicyEngine | None = None
        self._follower: Follower | None = None

    @concurrent_endpoint
    async def setup(
        self, stream: int | None = None, record: str | None = None, replay: str | None = None
    ) -> dict[str, float]:
        """Build the engine (tens of seconds), prove the weight plan, warm up, and start to follow the store.

        Where the store holds a version already, as for a replica that replaces a dead one, the newest is live when this
        returns.

        Args:
            stream: number of this replica's random stream. None takes the process id (of several processes the port
                they met at), since replicas must not draw the same samples; pass a number, or a seed with each
                request, where draws are to be repeatable.
            record: file that the engine's turns are written to (``turns.py``).
            replay: such a file, whose turns are repeated.
        Returns:
            Seconds per phase: ``build_s``, ``plan_s``, ``warm_up_s``.
        """
        from forge_async.policy.engine import PolicyEngine

        if self._engine is not None:
            raise ForgeError("setup was called before on this replica")
        if stream is None:
            stream = int(os.environ["MASTER_PORT"]) if self.config.tensor_parallel_size > 1 else os.getpid()
        seed = (self.seed * 1_000_003 + stream) % 2**31
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        engine = PolicyEngine(self.config, self.model_path, self._first_version, seed)
        schedule = TurnSchedule(read_turns(Path(replay))) if replay is not None else None
        if self._rank == 0 and schedule is not None:
            engine.use(schedule)  # whoever replays is told of an engine's end, and needs no other engine
        else:
            engine.on_death = _end_process
        if self._rank == 0 and record is not None:
            engine.use(TurnLog(Path(record)))
        self._engine = engine
        if self.store is not None:
            follower = Follower(engine, self.store, self._rank, None if schedule is None else schedule.swaps)
            self._follower = follower
            if self._rank > 0:
                loop = asyncio.get_running_loop()
                engine.on_announced = lambda version: loop.call_soon_threadsafe(follower.want, version)
        seconds = await asyncio.to_thread(engine.start)
        if self._follower is not None:
            await self._follower.start()
        return seconds

    @concurrent_endpoint
    async def generate(
        self,
        prompt_token_ids: np.ndarray | list[int],
        sampling: SamplingConfig | None = None,
        request_id: str | None = None,
        seed: int | None = None,
    ) -> Completion:
        """Sample one completion; the arguments are those of :meth:`PolicyEngine.submit`."""
        engine = self._ready()
        if self._rank > 0:
            raise ForgeError(f"generate: called on rank {self._rank} of a replica; rank 0 takes its requests")
        request_id = request_id or uuid.uuid4().hex
        future = engine.submit(prompt_token_ids, sampling, request_id, seed)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            engine.abort(request_id)
            raise

    @concurrent_endpoint
    async def abort(self, request_id: str) -> None:
        """End a request; its ``generate`` returns what there is, with finish reason ``abort``."""
        if self._rank == 0:
            self._ready().abort(request_id)

    @concurrent_endpoint
    async def follow(self, version: int) -> None:
        """Tell that ``version`` is committed, or being published; returns at once.

        It is pulled beside generation, while it is written where the store is on this host, and swapped in once it is
        committed.

        Of several versions told meanwhile only the newest is applied. Raises what ended the follower, if it has ended.
        """
        if self._rank == 0:
            self._following().tell(version)

    @concurrent_endpoint
    async def sync(self, version: int) -> dict[str, Any]:
        """As :meth:`follow`, but returns when ``version`` (or a newer one) is live.

        Returns:
            ``version``, ``digest`` (of the live parameters, read back and equal to the published one), ``pause_ms``
            (between two forward passes), ``in_flight`` (requests running when the swap came), ``nbytes``, ``pull_s``
            (from the commit until all was prepared), ``attest_s``, ``swap`` and ``layers`` (the ways taken). Empty on
            ranks other than 0, which has them all live when it returns.
        """
        if self._rank > 0:
            return {}
        return await self._following().until_live(version)

    @concurrent_endpoint
    async def reached(self, version: int) -> None:
        """In a replay: returns once all versions up to ``version`` that this replica has to take are in its hands."""
        await self._following().reached(version)

    @concurrent_endpoint
    async def hold(self, version: int) -> None:
        """Start no request until a version newer than ``version`` is live; returns when none runs any more.

        Mode blocking calls this when the trainer takes a batch. A swap ends it, and so does :meth:`release`.
        """
        if self._rank == 0:
            await asyncio.wrap_future(self._ready().hold(version))

    @concurrent_endpoint
    async def release(self) -> None:
        """End :meth:`hold` without a new version, as after a skipped step."""
        if self._rank == 0:
            self._ready().release()

    @concurrent_endpoint
    async def set_mode(self, mode: str, kv: str) -> None:
        """Treat new versions by this ``policy.update.mode`` and ``kv`` from now on."""
        if self._rank == 0:
            await asyncio.wrap_future(self._ready().set_mode(mode, kv))

    @concurrent_endpoint
    async def check(self, sampling: SamplingConfig, prompt_token_ids: np.ndarray | None = None) -> None:
        """Raises ConfigError where the engine would refuse requests with ``sampling``, DataError where this prompt."""
        self._ready().check(sampling, prompt_token_ids)

    @concurrent_endpoint
    async def status(self, spans_since: int | None = None) -> dict[str, Any]:
        """Version, queue lengths and counters, as of now; with a cursor ``spans``, see ``SpanRing.since``."""
        status = self._ready().status()
        if spans_since is not None:
            status["spans"] = self._ready().spans.since(spans_since)
        return status | (NOT_FOLLOWING if self._follower is None else self._follower.status())

    @concurrent_endpoint
    async def weights(self) -> tuple[int, dict[str, str]]:
        """The live version and each HF tensor's digest, read back from the live parameters.

        Raises:
            ForgeError: with tensor parallelism, where no process has whole tensors.
        """
        if self.config.tensor_parallel_size > 1:
            raise ForgeError("weights: the processes of a tensor-parallel replica hold parts of tensors only")
        engine = self._ready()
        async with nullcontext() if self._follower is None else self._follower.weights_lock:
            return engine.version, await asyncio.to_thread(_live_digests, engine)

    async def __cleanup__(self, exc: Exception | None) -> None:
        """Monarch calls this when the actor stops."""
        if self._follower is not None:
            await self._follower.stop()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop)

    def _ready(self) -> PolicyEngine:
        if self._engine is None:
            raise ForgeError("this policy replica has no engine yet: call setup first")
        return self._engine

    def _following(self) -> Follower:
        self._ready()
        if self._follower is None:
            raise ForgeError("this policy replica was made without a weight store: there is nothing to follow")
        return self._follower


def _end_process(error: BaseException) -> None:
    """A replica without an engine must not get requests: its process ends, and the service respawns it."""
    traceback.print_exception(error)
    print(f"policy replica {os.getpid()}: its engine died: {error!r}", file=sys.stderr, flush=True)
    os._exit(70)


def _live_digests(engine: PolicyEngine) -> dict[str, str]:
    return {name: tensor_digest(tensor) for name, tensor in engine.weights.tensors()}
