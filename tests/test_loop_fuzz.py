"""The loop in any order of events: an evaluation between steps, faults, a resume, an environment as fast or as slow as
can be. The clock is a fake: it jumps to the next timer, and where there is none to wait for, that is a deadlock."""

from __future__ import annotations

import asyncio
import json
import logging
import selectors
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from forge_async.buffer import BufferConfig, Ledger, RolloutBuffer
from forge_async.config import Config
from forge_async.errors import RunFailed
from forge_async.loop import AsyncLoop
from forge_async.mesh.errors import ReplicaDied
from forge_async.policy.config import PolicyConfig, SamplingConfig, UpdateConfig
from forge_async.policy.updates import MODES
from forge_async.rollout.config import DatasetConfig, RewardSpec, RolloutConfig
from forge_async.rollout.datasets import PromptSource, Row
from forge_async.rollout.environment import Session
from forge_async.rollout.rewards import RewardFailure
from forge_async.types import Completion, Prompt, StepStats
from tests.buffer.schedules import Words

SCHEDULES = 2_000 if settings.get_current_profile_name() == "fuzz" else 150
NEVER = 1e6
TIMEOUT_S = 50.0


class Deadlock(AssertionError):
    """Every task waits for another one."""


class FakeClock(selectors.DefaultSelector):
    """Instead of waiting for the next timer it moves the clock there."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if timeout is None and not ready:
            raise Deadlock("no task is ready and none waits for a time")
        self.now += 0.0 if ready else timeout or 0.0
        assert self.now < NEVER, "it waits for what never ends"
        return ready


class FakeTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = FakeClock()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


class ChatWords(Words):
    all_special_ids: tuple[int, ...] = ()

    def apply_chat_template(self, messages: Any, **kwargs: Any) -> str:
        return "".join(f"[{message['role']}]{message['content']}" for message in messages)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return "text"


class Answers(Session):
    """Answers none, one or more completions, as slow and as faulty as its world."""

    def __init__(self, world: World, prompt: Prompt) -> None:
        super().__init__(prompt)
        self.world = world

    async def reply(self, text: str, completion: Completion) -> list[dict[str, str]]:
        await self.world.wait()
        if self.world.fault():
            raise ValueError("the environment broke")
        return [{"role": "tool", "content": "go on"}] if self.world.random.random() < 0.3 else []

    async def close(self) -> None:
        self.world.sessions -= 1
        await self.world.wait()


class World:
    """The policy, the trainer and the rewards of one run, as slow and as faulty as ``random`` makes them."""

    specs = (RewardSpec("m:f", 1.0, "f"),)

    def __init__(self, random: Random, version: int, slowness: float, faults: float) -> None:
        self.random, self.version, self.policy_version = random, version, version
        self.slowness, self.faults = slowness, faults
        self.held_at, self.running, self.changed = -1, 0, asyncio.Condition()
        self.sessions = 0

    async def wait(self) -> None:
        """Nothing, one turn of the event loop, or some seconds."""
        kind = self.random.random()
        if kind < 0.6:
            await asyncio.sleep(0 if kind < 0.3 else self.random.expovariate(1 / (self.slowness + 1e-3)))

    def fault(self) -> bool:
        return self.random.random() < self.faults

    # --- the policy service

    async def generate(self, prompt: np.ndarray) -> Completion:
        async with self.changed:
            await self.changed.wait_for(lambda: self.policy_version > self.held_at)
            self.running += 1
        try:
            versions = []
            for _ in range(self.random.randint(1, 4)):
                await self.wait()
                versions.append(self.policy_version)
            if self.fault():
                raise ReplicaDied("replica 0: process 7 ended")
            if self.fault():
                await asyncio.sleep(NEVER)
            made = np.array(versions, np.int32)
            reason = "length" if self.fault() else "stop"
            return Completion(prompt, made + 5, np.zeros(len(made), np.float32), made, made, reason)
        finally:
            self.running -= 1
            waker = asyncio.ensure_future(self.wake())
            waker.add_done_callback(lambda _: None)

    async def wake(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "generate":
            return await self.generate(args[0])
        await self.wait()
        if name == "publish":
            return [self.version]
        if name == "published":
            return [{"version": args[0], "digest": f"d{args[0]}", "bytes": 0, "wall_s": 0.0}]
        assert name == "step"
        tokens = sum(int(sequence.loss_mask.sum()) for sequence in args[0])
        self.version += tokens > 0
        return [StepStats(self.version, 0, 0, 0, 1, 1, 0, 0, tokens, tokens, 0, 0.1, skipped=not tokens)]

    async def fan_out(self, name: str, version: Any = 0, **kwargs: Any) -> list[Any]:
        await self.wait()
        if name == "hold":
            self.held_at = version
            async with self.changed:
                await self.changed.wait_for(lambda: not self.running)
        elif name == "release":
            self.held_at = -1
            await self.wake()
        elif name == "sync":
            if self.fault():
                return [TimeoutError("policy.sync did not answer")]
            self.policy_version = max(self.policy_version, version)
            await self.wake()
            return [{"version": self.policy_version, "digest": f"d{self.policy_version}", "in_flight": 1}]
        return [None]

    async def replace(self, index: int) -> None:
        await self.wait()
        self.policy_version = self.version
        await self.wake()

    # --- environment and rewards

    tokenizer = ChatWords()

    def decode(self, token_ids: np.ndarray) -> str:
        return "text"

    def session(self, prompt: Prompt, episode_id: str) -> Session:
        self.sessions += 1
        return Answers(self, prompt)

    async def score(self, prompt: Prompt, completions: list[str], conversations: Any) -> list[Any]:
        await self.wait()
        failure = RewardFailure("f", "worker_died", "it died twice")
        return [failure if self.fault() else {"f": self.random.choice((0.0, 1.0))} for _ in completions]


class History:
    """Runs one dataset to its end, over as many runs as that takes; what a checkpoint does not hold is forgotten."""

    def __init__(self, config: Config, seed: int, rows: int, slowness: float, faults: float) -> None:
        self.config, self.random = config, Random(seed)
        self.slowness, self.faults = slowness, faults
        self.rows = [Row(f"{index}?", None) for index in range(rows)]
        self.trained: list[str] = []
        self.seen: Counter[str] = Counter()
        source = self.source()
        self.saved = (json.dumps({"source": source.state(), "ledger": Ledger().state()}), 0, [])

    def source(self) -> PromptSource:
        return PromptSource(DatasetConfig(kind="jsonl", path="-", epochs=1), Words(), seed=3, rows=self.rows)

    async def run(self) -> None:
        for attempt in range(4):
            limit = self.random.expovariate(1 / (20 * self.slowness + 1)) if attempt < 3 else None
            if await self.once(limit):
                break
        ledger = self.loop.buffer.ledger
        assert sorted(self.trained) == sorted(set(self.trained)), "trained twice"
        assert ledger.trained == len(self.trained) and ledger.admitted == len(self.rows) and ledger.balanced
        assert ledger.in_flight == 0 and ledger.dropped["run_ended"] == 0

    async def once(self, limit: float | None) -> bool:
        """One run from the newest checkpoint, killed after ``limit`` seconds; whether it came to the dataset's end."""
        state, version, trained = self.saved
        self.trained = list(trained)
        source, ledger, content = self.source(), Ledger(), json.loads(state)
        source.restore(content["source"], ledger.restore(content["ledger"]))
        world = World(self.random, version, self.slowness, self.faults)
        buffer = RolloutBuffer(self.config.buffer, ledger, version)
        world_: Any = world
        self.loop = AsyncLoop(
            self.config, world_, world_, buffer, source, world_, world_, lambda kind, **fields: None, version
        )
        try:
            async with asyncio.timeout(limit):
                while (step := await self.loop.next_step()) is not None:
                    self.check(step)
                    if self.random.random() < 0.3:  # an evaluation, on the same policy
                        await asyncio.gather(*(self.evaluate(world) for _ in range(3)))
                    await world.wait()
                    if self.random.random() < 0.2:  # by hand
                        await self.loop.pause()
                        assert self.loop.buffer.room == 0
                        await world.wait()
                    if self.random.random() < 0.4:
                        state = json.dumps({"source": source.state(), "ledger": ledger.state()})
                        self.saved = (state, self.loop.version, list(self.trained))
        except TimeoutError:
            self.seen["killed"] += 1
            return False
        except RunFailed:  # every prompt was dropped
            assert not self.trained and self.loop.buffer.ended is not None
        finally:
            await self.loop.stop()
            assert not self.loop._tasks
            assert world.sessions == 0, "a session was not closed"
        return True

    async def evaluate(self, world: World) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await world.generate(np.array([1], np.int32))
        except (ReplicaDied, TimeoutError):
            pass

    def check(self, step: Any) -> None:
        self.seen["steps"] += 1
        if not step.stats.skipped:
            self.trained += [group.prompt.prompt_id for group in step.groups]
        assert step.staleness.max <= self.config.buffer.token_bound
        assert step.staleness.tokens == step.kv_staleness.tokens == step.stats.trained_tokens


@st.composite
def configs(draw: Any) -> Config:
    window = draw(st.integers(0, 2))
    stale = draw(st.sampled_from(("drop", "mask", "resume")))
    return Config(
        rollout=RolloutConfig(
            group_size=draw(st.integers(2, 3)), timeout_s=TIMEOUT_S, truncated=draw(st.sampled_from(("keep", "mask")))
        ),
        policy=PolicyConfig(
            sampling=SamplingConfig(max_tokens=4),
            update=UpdateConfig(mode=draw(st.sampled_from(MODES)), timeout_s=600.0),
            max_num_seqs=draw(st.sampled_from((2, 64))),
        ),
        buffer=BufferConfig(
            groups_per_step=draw(st.integers(1, 3)),
            max_staleness=draw(st.integers(0, 3)),
            window=window,
            staleness_of=draw(st.sampled_from(("oldest", "mean", "newest") if window else ("oldest",))),
            stale=stale,
            drop_uniform_groups=draw(st.booleans()),
            retries=draw(st.integers(stale == "resume", 1)),
            max_consecutive_drops=10**6,
        ),
    )


schedules = given(
    config=configs(),
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 30),
    slowness=st.sampled_from((0.0, 0.1, 10.0)),
    faults=st.sampled_from((0.0, 0.02, 0.2)),
)


def run(config: Config, seed: int, rows: int, slowness: float, faults: float) -> None:
    history = History(config, seed, rows, slowness, faults)
    with asyncio.Runner(loop_factory=FakeTimeLoop) as runner:
        runner.run(history.run())


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="forge_async.buffer")
    caplog.set_level(logging.CRITICAL, logger="asyncio")
    caplog.set_level(logging.CRITICAL, logger="forge_async.rollout.rollout")


@settings(max_examples=SCHEDULES, suppress_health_check=list(HealthCheck))
@schedules
def test_no_order_of_events_is_a_deadlock_and_each_prompt_is_trained_once(**schedule: Any) -> None:
    run(**schedule)


def test_a_planted_deadlock_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drop that wakes nobody."""
    original = RolloutBuffer.drop

    def drop(self: RolloutBuffer, prompt_id: str, reason: str) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        original(self, prompt_id, reason)
        self._changed = changed

    monkeypatch.setattr(RolloutBuffer, "drop", drop)
    search = settings(
        max_examples=500, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    with pytest.raises((Deadlock, BaseExceptionGroup, AssertionError)):
        search(schedules(run))()
