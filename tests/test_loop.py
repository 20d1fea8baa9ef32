"""The loop itself, between a policy, a trainer and rewards that are plain objects here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forge_async import loop as loop_module
from forge_async.buffer import BufferConfig, PromptTooLong, RolloutBuffer
from forge_async.config import Config, changed
from forge_async.errors import ForgeError, RunFailed
from forge_async.loop import AsyncLoop
from forge_async.mesh import ReplicaDied, ServiceGaveUp
from forge_async.policy.config import PolicyConfig, SamplingConfig, UpdateConfig
from forge_async.rollout.config import RewardSpec, RolloutConfig
from forge_async.rollout.environment import Environment
from forge_async.steps import Step
from forge_async.types import Completion, Episode, Group, Prompt, StepStats, Turn


class Policy:
    """One replica that answers at once; ``finish_reason`` is that of every completion."""

    def __init__(self, finish_reason: str = "stop") -> None:
        self.version, self.finish_reason = 0, finish_reason

    async def call(self, name: str, prompt: np.ndarray, *args: Any, **kwargs: Any) -> Completion:
        versions = np.full(2, self.version, np.int32)
        return Completion(
            prompt, np.array([5, 6], np.int32), np.zeros(2, np.float32), versions, versions, self.finish_reason
        )

    async def fan_out(self, name: str, version: Any = 0, **kwargs: Any) -> list[Any]:
        if name != "sync":
            return [None]
        self.version = version
        return [{"version": version, "digest": f"d{version}", "in_flight": 1}]


class Trainer:
    """Takes a step when there is a token to train; remembers what it was given."""

    def __init__(self) -> None:
        self.version, self.batches = 0, []

    async def call(self, name: str, *args: Any) -> list[Any]:
        if name == "publish":
            return [self.version]
        if name == "published":
            (version,) = args
            return [{"version": version, "digest": f"d{version}", "bytes": 0, "wall_s": 0.0}]
        (sequences,) = args
        self.batches.append(sequences)
        tokens = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
        self.version += tokens > 0
        return [StepStats(self.version, 0, 0, 0, 1, 1, 0, 0, tokens, tokens, 0, 0.1, skipped=not tokens)]


class Rewards:
    specs = (RewardSpec("m:f", 1.0, "f"),)

    async def score(self, prompt: Prompt, completions: list[str], conversations: Any) -> list[dict[str, float]]:
        return [{"f": float(prompt.prompt_id.rpartition("-")[2])} for _ in completions]


class Words:
    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return "text"


class Text(Environment):
    def __init__(self) -> None:
        super().__init__(Words())


def prompts(count: int) -> Any:
    return iter([Prompt(f"0-{i}", (), np.array([1, 2], np.int32)) for i in range(count)])


@pytest.fixture
def loop() -> Callable[..., AsyncLoop]:
    def make(
        source: Any, policy: Any = None, rollout: RolloutConfig | None = None, mode: str = "never_stop", **buffer: Any
    ) -> AsyncLoop:
        config = Config(
            rollout=rollout or RolloutConfig(group_size=2, timeout_s=5),
            policy=PolicyConfig(sampling=SamplingConfig(max_tokens=2), update=UpdateConfig(mode=mode)),
            buffer=BufferConfig(groups_per_step=2, **buffer),
        )
        events: list[tuple[str, dict[str, Any]]] = []
        made = AsyncLoop(
            config,
            policy or Policy(),
            Trainer(),  # type: ignore[arg-type]
            RolloutBuffer(config.buffer),
            source,
            Text(),
            Rewards(),  # type: ignore[arg-type]
            lambda kind, **fields: events.append((kind, fields)),
        )
        made.events = SimpleNamespace(all=events)  # type: ignore[attr-defined]
        return made

    return make


async def steps_of(loop: AsyncLoop, count: int) -> AsyncIterator[Step]:
    """Up to ``count`` steps, and the end."""
    try:
        for index in range(count):
            if (step := await loop.next_step()) is None:
                return
            if index == count - 1:
                await loop.settle()
            yield step
    finally:
        await loop.stop()


async def test_a_step_whose_completions_are_all_masked_is_skipped(loop):
    """A batch may hold nothing to train: no step, no version, no publish, and the run goes on."""
    masked = loop(prompts(8), Policy("length"), RolloutConfig(group_size=2, timeout_s=5, truncated="mask"))
    steps = [step async for step in steps_of(masked, 2)]
    assert [(step.stats.version, step.stats.skipped) for step in steps] == [(0, True), (0, True)]
    assert steps[0].truncated == 1.0
    assert (steps[0].staleness.tokens, steps[0].staleness.max, steps[0].staleness.histogram) == (0, 0, ())
    assert masked.tally.digests == {} and masked.tally.rewards == []
    ledger = masked.buffer.ledger
    assert ledger.balanced
    assert ledger.dropped["skipped_step"] == 4
    assert [kind for kind, _ in masked.events.all] == [*["dropped"] * 2, "step_skipped"] * 2
    assert masked.events.all[0][1] == {"prompt": "0-0", "reason": "skipped_step"}
    closed = {fields["prompt"] for kind, fields in masked.events.all if kind == "dropped"}
    assert closed.isdisjoint(episode.partition(".")[0] for episode in masked._requests), "no longer counted"


async def test_completions_under_way_are_trained_at_the_temperature_they_were_sampled_at(loop):
    """``config`` is replaced between two steps: groups admitted before keep what they had."""

    class Echo(Policy):
        async def call(self, name: str, prompt: np.ndarray, sampling: SamplingConfig, *args: Any, **kwargs: Any) -> Any:
            made = await super().call(name, prompt)
            return replace(made, temperature=sampling.temperature)

    running = loop(prompts(20), Echo(), max_staleness=2)
    seen = []
    async for step in steps_of(running, 6):
        seen.append({s.temperature for s in running.trainer.batches[-1]})
        if step.index == 1:
            await running.pause()
            before = running.buffer.open
            running.config = changed(running.config, {"policy.sampling.temperature": 0.5})
    assert before == 4 and seen == [{1.0}, {1.0}, {1.0}, {0.5}, {0.5}, {0.5}]


async def test_a_paused_loop_finishes_what_runs_and_the_next_step_goes_on(loop):
    running = loop(prompts(40), max_staleness=2)
    assert (await running.next_step()).stats.version == 1
    await running.pause()
    for _ in range(20):
        await asyncio.sleep(0)
    assert (running.buffer.depth, running.buffer.in_flight) == (4, 0), "of 6 open ones 2 were trained"
    assert running.policy.version == 1, "the version is live"
    step = await running.next_step()
    assert step.stats.version == 2 and step.wall_s < 1
    await running.stop()
    assert running.buffer.ledger.balanced


async def test_a_step_cancelled_while_it_waits_for_its_batch_loses_nothing(loop):
    class Slow(Policy):
        async def call(self, *args: Any, **kwargs: Any) -> Completion:
            await go.wait()
            return await super().call(*args, **kwargs)

    go = asyncio.Event()
    running = loop(prompts(40), Slow())
    step = asyncio.ensure_future(running.next_step())
    for _ in range(10):
        await asyncio.sleep(0)
    assert running.waiting
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    assert not running.waiting and running.buffer.in_flight == 4
    go.set()
    assert (await running.next_step()).stats.version == 1
    await running.stop()


async def test_a_policy_service_that_gave_up_ends_the_run_with_its_cause(loop):
    class Gone(Policy):
        async def call(self, name: str, prompt: np.ndarray, *args: Any, **kwargs: Any) -> Completion:
            raise ServiceGaveUp("service of PolicyActor: gave up: {'out of memory'}")

    started = loop(prompts(1000), Gone())
    with pytest.raises(RunFailed, match="no policy replica is left: .*out of memory"):
        async for _ in steps_of(started, 2):
            pass
    assert started.buffer.ledger.dropped["failed"] == 0, "prompts are not used up for it"


async def test_a_rollout_that_never_returns_is_timed_out_and_the_steps_go_on(loop):
    class Silent(Policy):
        async def call(self, name: str, prompt: np.ndarray, *args: Any, **kwargs: Any) -> Completion:
            if kwargs["session"] == "0-1":
                await asyncio.Event().wait()
            return await super().call(name, prompt, *args, **kwargs)

    running = loop(prompts(9), Silent(), RolloutConfig(group_size=2, timeout_s=0.2), retries=0)
    async with asyncio.timeout(10):
        steps = [step async for step in steps_of(running, 4)]
    assert len(steps) == 4
    assert running.buffer.ledger.fate("0-1") == "dropped (failed)"
    assert running.tally.failed_episodes == {"timeout": 2}


async def test_a_completion_lost_with_its_replica_is_asked_for_again_under_another_name(loop):
    class Dying(Policy):
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[str] = []

        async def call(self, name: str, prompt: np.ndarray, sampling: Any, request: str, *args: Any, **kwargs: Any):  # type: ignore[no-untyped-def]
            self.asked.append(request)
            if request in ("0-0.0~0", "0-0.0~1"):
                raise ReplicaDied("replica 0: its process ended")
            return await super().call(name, prompt, sampling, request, *args, **kwargs)

    policy = Dying()
    running = loop(prompts(4), policy)
    async with asyncio.timeout(10):
        steps = [step async for step in steps_of(running, 2)]
    assert [request for request in policy.asked if request.startswith("0-0.0")] == ["0-0.0~0", "0-0.0~1", "0-0.0~2"]
    assert running.tally.requeued == 2 and not running.tally.failed_episodes
    assert sum(len(group.episodes) for step in steps for group in step.groups) == 8


async def test_lengths_are_of_sampled_tokens_not_of_tool_replies(loop, monkeypatch: pytest.MonkeyPatch):
    async def two_turns(prompt: Prompt, *args: Any, n: int, **kwargs: Any) -> Group:
        def completion(ids: list[int], sampled: int) -> Completion:
            versions, logprobs = np.zeros(sampled, np.int32), np.zeros(sampled, np.float32)
            tokens = np.full(sampled, 5, np.int32)
            return Completion(np.array(ids, np.int32), tokens, logprobs, versions, versions, "stop")

        turns = (Turn(completion([1, 2], 3)), Turn(completion([1, 2, 5, 5, 5, 20, 21, 22, 23], 2)))
        episodes = [Episode(f"{prompt.prompt_id}.{i}", prompt.prompt_id, turns, float(i)) for i in range(n)]
        return Group(prompt, tuple(episodes))

    monkeypatch.setattr(loop_module, "rollout_group", two_turns)
    async with asyncio.timeout(10):
        (step,) = [step async for step in steps_of(loop(prompts(4)), 1)]
    assert step.completion_length == 5.0
    assert step.stats.trained_tokens == 4 * 5


async def test_a_dataset_that_ends_before_anything_was_trained_is_an_error(loop):
    class TooLong:
        def __iter__(self) -> TooLong:
            return self

        def __next__(self) -> Prompt:
            if self.left:
                self.left -= 1
                raise PromptTooLong(f"0-{self.left}", "too long")
            raise StopIteration("1 epoch of 3 rows")

        left = 3

    with pytest.raises(RunFailed, match=r"nothing was trained: dataset ended: 1 epoch of 3 rows.*prompt_too_long': 3"):
        async for _ in steps_of(loop(TooLong()), 2):
            pass


async def test_what_a_run_cannot_do_without_ends_it_while_the_trainer_is_waited_for(loop):
    class Stuck(Trainer):
        async def call(self, name: str, *args: Any) -> list[Any]:
            if name == "publish":
                started.fail(RunFailed("the weight store died"))
                await asyncio.sleep(600)
            return await super().call(name, *args)

    started = loop(prompts(8))
    started.trainer = Stuck()
    with pytest.raises(RunFailed, match="^the weight store died$"):
        async with asyncio.timeout(5):
            async for _ in steps_of(started, 2):
                pass


async def test_a_replica_that_does_not_take_a_version_is_replaced(loop) -> None:
    class Hung(Policy):
        replaced = 0

        async def fan_out(self, name: str, version: Any = 0, **kwargs: Any) -> list[Any]:
            if name == "sync" and version == 1 and not self.replaced:
                assert kwargs["timeout"] == PolicyConfig().update.timeout_s
                return [TimeoutError("policy.sync did not answer")]
            return await super().fan_out(name, version, **kwargs)

        async def replace(self, index: int) -> None:
            self.replaced += 1
            self.version = 1

    policy = Hung()
    running = loop(prompts(12), policy)
    async with asyncio.timeout(20):
        steps = [step async for step in steps_of(running, 2)]
    assert len(steps) == 2
    assert policy.replaced == 1


async def test_training_goes_on_beside_a_publication(loop) -> None:
    """The commit of version 1 comes only once step 2 has been called."""

    class Slow(Trainer):
        def __init__(self) -> None:
            super().__init__()
            self.second_step = asyncio.Event()
            self.calls: list[str] = []

        async def call(self, name: str, *args: Any) -> list[Any]:
            self.calls.append(name)
            if name == "step" and self.version == 1:
                self.second_step.set()
            if name == "published" and args == (1,):
                await self.second_step.wait()
            return await super().call(name, *args)

    running = loop(prompts(12))
    running.trainer = trainer = Slow()
    async with asyncio.timeout(10):
        steps = [step async for step in steps_of(running, 2)]
    assert len(steps) == 2
    assert [name for name in trainer.calls if name != "published"] == ["step", "publish"] * 2
    assert running.tally.digests == {1: "d1", 2: "d2"}, "the last version is published before the loop ends"


async def test_a_failed_publication_ends_the_run_with_its_cause(loop) -> None:
    class Broken(Trainer):
        async def call(self, name: str, *args: Any) -> list[Any]:
            if name == "published":
                raise ForgeError("version 1 was not committed: rank 1: no memory")
            return await super().call(name, *args)

    running = loop(prompts(1000))
    running.trainer = Broken()
    with pytest.raises(RunFailed, match="the trainer failed in 'published' at version .*rank 1: no memory"):
        async with asyncio.timeout(10):
            async for _ in steps_of(running, 50):
                pass


class Held(Policy):
    """Generates slowly, and not at all between a hold and its end."""

    def __init__(self, finish_reason: str = "stop") -> None:
        super().__init__(finish_reason)
        self.held_at, self.running, self.log, self.changed = -1, 0, [], asyncio.Condition()

    @property
    def held(self) -> bool:
        return self.version <= self.held_at

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Completion:
        async with self.changed:
            await self.changed.wait_for(lambda: not self.held)
            self.running += 1
        await asyncio.sleep(0.001)
        completion = await super().call(name, *args, **kwargs)
        async with self.changed:
            self.running -= 1
            self.changed.notify_all()
        return completion

    async def fan_out(self, name: str, version: Any = 0, **kwargs: Any) -> list[Any]:
        self.log.append(name if name == "release" else (name, version))
        async with self.changed:
            if name == "hold":
                self.held_at = version
                await self.changed.wait_for(lambda: not self.running)
            elif name == "release":
                self.held_at = -1
            result = await super().fan_out(name, version, **kwargs)
            self.changed.notify_all()
            return result


class Watching(Trainer):
    """Asserts that nothing is generated while it works; skips every third step."""

    def __init__(self, policy: Held) -> None:
        super().__init__()
        self.policy, self.calls = policy, 0

    async def call(self, name: str, *args: Any) -> list[Any]:
        for _ in range(3):
            assert self.policy.held and not self.policy.running
            await asyncio.sleep(0.002)
        if name == "step":
            self.calls += 1
            if self.calls % 3 == 0:
                return [StepStats(self.version, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0.1, skipped=True)]
        return await super().call(name, *args)


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_in_mode_blocking_nothing_is_generated_while_the_trainer_works(loop, max_staleness: int) -> None:
    """Skipped steps and the dataset's end included; the loop must not wait for what a hold holds back."""
    policy = Held()
    running = loop(prompts(15), policy, mode="blocking", max_staleness=max_staleness)
    running.trainer = Watching(policy)
    async with asyncio.timeout(20):
        steps = [step async for step in steps_of(running, 100)]
    assert [step.stats.skipped for step in steps] == [False, False, True, False, False, True, False, False]
    holds = [entry[1] for entry in policy.log if entry[0] == "hold"]
    assert holds == [0, 1, 2, 2, 3, 4, 4, 5], "one for each batch, named by the trainer's version"
    assert policy.log.count("release") == 2, "after the skipped steps"
    assert running.tally.max_staleness <= max_staleness
    assert running.buffer.ledger.balanced


async def test_only_mode_blocking_holds(loop) -> None:
    policy = Held()
    async for _ in steps_of(loop(prompts(8), policy, mode="drain"), 2):
        pass
    assert {entry[0] for entry in policy.log} == {"follow", "sync"}


async def test_a_replica_that_does_not_answer_a_hold_is_replaced_and_the_run_goes_on(loop) -> None:
    class Hung(Held):
        replaced: int | None = None

        async def fan_out(self, name: str, version: Any = 0, **kwargs: Any) -> list[Any]:
            if name == "hold" and self.replaced is None:
                assert kwargs["timeout"] == PolicyConfig().update.timeout_s
                return [TimeoutError("policy.hold did not answer")]
            return await super().fan_out(name, version, **kwargs)

        async def replace(self, index: int) -> None:
            self.replaced = index

    policy = Hung()
    async with asyncio.timeout(20):
        steps = [step async for step in steps_of(loop(prompts(12), policy, mode="blocking"), 3)]
    assert len(steps) == 3 and policy.replaced == 0


async def test_a_failure_ends_a_run_that_waits_for_a_hold(loop) -> None:
    class Waiting(Held):
        async def fan_out(self, name: str, version: Any = 0, **kwargs: Any) -> list[Any]:
            if name == "hold":
                started.fail(RunFailed("the trainer died"))
                await asyncio.sleep(600)
            return await super().fan_out(name, version, **kwargs)

    started = loop(prompts(8), Waiting(), mode="blocking")
    with pytest.raises(RunFailed, match="^the trainer died$"):
        async with asyncio.timeout(5):
            async for _ in steps_of(started, 2):
                pass
