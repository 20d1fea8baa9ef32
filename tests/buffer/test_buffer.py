"""Admission, batches and the staleness bound; the schedules are drawn by hypothesis or written out by hand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from forge_async.buffer import BufferConfig, PromptTooLong, RolloutBuffer
from forge_async.errors import ConfigError, ForgeError, RunFailed
from forge_async.types import Completion, Episode, Group, Prompt, Turn


def make_prompt(name: str) -> Prompt:
    return Prompt(name, (), np.zeros(1, np.int32))


def prompts(count: int | None = None) -> Iterator[Prompt]:
    for index in itertools.count() if count is None else range(count):
        yield make_prompt(f"p{index}")


def make_group(prompt: Prompt, version: int = 0, size: int = 2, rewards: tuple[float, ...] = ()) -> Group:
    """``size`` episodes of one token each, made by ``version``."""
    ids = np.array([7], np.int32)
    versions = np.array([version], np.int32)
    completion = Completion(ids, ids, np.zeros(1, np.float32), versions, versions, "stop")
    values = rewards or tuple(float(index) for index in range(size))
    name = prompt.prompt_id
    return Group(prompt, tuple(Episode(f"{name}.{i}", name, (Turn(completion),), r) for i, r in enumerate(values)))


def at_once(coroutine):
    """The result of a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


def would_wait(coroutine) -> bool:
    """Only inside a running loop."""
    try:
        coroutine.send(None)
    except StopIteration:
        return False
    coroutine.close()
    return True


def new_buffer(**config) -> RolloutBuffer:
    return RolloutBuffer(BufferConfig(**{"retries": 0, **config}))


# --- the bound


def test_a_straggler_is_waited_for_only_when_the_bound_needs_it():
    """max_staleness 2, one group per step: a slow prompt is overtaken twice, and then the trainer waits for it."""
    buffer = new_buffer(max_staleness=2, groups_per_step=1)
    source = prompts()
    slow = at_once(buffer.admit(source))
    for version in (0, 1):
        other = at_once(buffer.admit(source))
        buffer.finish(make_group(other, version))
        batch = buffer.take()
        assert [group.prompt for group in batch] == [other]
        buffer.trained(batch, version + 1)
        buffer.advance(version + 1)
    other = at_once(buffer.admit(source))
    buffer.finish(make_group(other, 2))
    assert buffer.take() == []
    buffer.finish(make_group(slow, 0))
    assert [group.prompt for group in buffer.take()] == [slow]
    assert buffer.trainer_version == 2


def test_two_stragglers_are_not_left_for_one_batch():
    """Of three prompts at version 0 with one group per step, versions 0, 1 and 2 train one each: the second step may
    not take a newer prompt, or two would be left for version 2."""
    buffer = new_buffer(max_staleness=2, groups_per_step=1)
    source = prompts()
    first = [at_once(buffer.admit(source)) for _ in range(3)]
    assert buffer.room == 0
    buffer.finish(make_group(first[2]))
    buffer.trained(buffer.take(), 1)
    buffer.advance(1)
    newer = at_once(buffer.admit(source))
    buffer.finish(make_group(newer, 1))
    assert buffer.take() == []
    buffer.drop(first[0].prompt_id, "failed")
    assert [group.prompt for group in buffer.take()] == [newer]


async def test_synchronous_training_admits_nothing_until_the_policy_is_on_the_new_version():
    buffer = new_buffer(max_staleness=0, groups_per_step=2)
    source = prompts()
    batch_prompts = [at_once(buffer.admit(source)) for _ in range(2)]
    assert would_wait(buffer.admit(source))
    for prompt in batch_prompts:
        buffer.finish(make_group(prompt, 0))
    batch = buffer.take()
    assert would_wait(buffer.admit(source))
    buffer.trained(batch, 1)
    assert would_wait(buffer.admit(source))
    buffer.advance(0)
    assert would_wait(buffer.admit(source))
    buffer.advance(1)
    assert at_once(buffer.admit(source)).prompt_id == "p2"


def test_a_lagging_policy_costs_admission_one_step_of_groups_per_version():
    buffer = new_buffer(max_staleness=2, groups_per_step=2)
    source = prompts()
    for version in (1, 2):
        for _ in range(2):
            buffer.finish(make_group(at_once(buffer.admit(source))))
        buffer.trained(buffer.take(), version)
        assert buffer.room == (3 - version) * 2
    with pytest.raises(ForgeError, match="policy cannot be at version 3"):
        buffer.advance(3)


def test_the_gate_drops_tokens_older_than_their_admission():
    buffer = RolloutBuffer(BufferConfig(max_staleness=1, groups_per_step=1, retries=0), version=5)
    source = prompts()
    stale, fresh = at_once(buffer.admit(source)), at_once(buffer.admit(source))
    buffer.finish(make_group(stale, 3))
    assert buffer.take() == []
    assert dict(buffer.ledger.dropped) == {"stale": 1}
    buffer.finish(make_group(fresh, 4))
    assert len(buffer.take()) == 1


# --- fates


def test_small_failed_and_uniform_groups_are_dropped_with_their_reason():
    buffer = new_buffer(max_staleness=3, min_group_size=2, drop_uniform_groups=True)
    told: list[tuple[str, str]] = []
    buffer.on_drop = lambda prompt_id, reason: told.append((prompt_id, reason))
    source = prompts()
    for size, rewards in ((0, ()), (1, (1.0,)), (3, (0.5, 0.5, 0.5))):
        assert not buffer.finish(make_group(at_once(buffer.admit(source)), size=size, rewards=rewards))
    assert buffer.finish(make_group(at_once(buffer.admit(source)), rewards=(0.0, 1.0)))
    assert dict(buffer.ledger.dropped) == {"failed": 1, "group_too_small": 1, "uniform_reward": 1}
    assert told == [("p0", "failed"), ("p1", "group_too_small"), ("p2", "uniform_reward")]
    assert buffer.depth == 1


def test_finishing_twice_or_unknown_is_an_error():
    buffer = new_buffer()
    prompt = at_once(buffer.admit(prompts()))
    buffer.finish(make_group(prompt))
    with pytest.raises(ForgeError, match="p0 was finished twice"):
        buffer.finish(make_group(prompt))
    with pytest.raises(ForgeError, match="x was finished without being open"):
        buffer.finish(make_group(make_prompt("x")))


def test_a_skipped_step_gives_back_its_slots_and_drops_its_groups():
    buffer = new_buffer(max_staleness=0, groups_per_step=1)
    source = prompts()
    buffer.finish(make_group(at_once(buffer.admit(source))))
    buffer.trained(buffer.take(), 0)
    assert dict(buffer.ledger.dropped) == {"skipped_step": 1} and buffer.ledger.trained == 0
    assert at_once(buffer.admit(source)).prompt_id == "p1"


def test_trained_must_match_what_was_handed_out():
    buffer = new_buffer(groups_per_step=1)
    source = prompts()
    for _ in range(2):
        buffer.finish(make_group(at_once(buffer.admit(source))))
    batch = buffer.take()
    with pytest.raises(ForgeError, match="not reported"):
        buffer.take()
    with pytest.raises(ForgeError, match="p7"):
        buffer.trained([make_group(make_prompt("p7"))], 1)
    with pytest.raises(ForgeError, match="version 0 to 2"):
        buffer.trained(batch, 2)
    buffer.trained(batch, 1)
    assert buffer.ledger.trained == 1


def test_overlong_prompts_are_counted_and_skipped():
    class Source:
        def __init__(self) -> None:
            self.names = iter(["long", "fits"])

        def __next__(self) -> Prompt:
            name = next(self.names)
            if name == "long":
                raise PromptTooLong(name, "too long")
            return make_prompt(name)

    buffer = new_buffer()
    assert at_once(buffer.admit(Source())).prompt_id == "fits"
    assert dict(buffer.ledger.dropped) == {"prompt_too_long": 1}
    assert buffer.ledger.fate("long") == "dropped (prompt_too_long)"


def test_drops_without_end_fail_the_run():
    buffer = new_buffer(max_consecutive_drops=3)
    source = prompts()
    for _ in range(3):
        buffer.drop(at_once(buffer.admit(source)).prompt_id, "failed")
    with pytest.raises(RunFailed, match=r"3 prompts in a row .* failed 3"):
        at_once(buffer.admit(source))


# --- the async shell


async def run_producers(buffer: RolloutBuffer, source: Iterator[Prompt], count: int) -> None:
    async def produce() -> None:
        while (prompt := await buffer.admit(source)) is not None:
            version = buffer.policy_version
            await asyncio.sleep(0)
            buffer.finish(make_group(prompt, version))

    await asyncio.gather(*(produce() for _ in range(count)))


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize(("count", "batches"), [(12, [4, 4, 4]), (10, [4, 4, 2]), (3, [3]), (0, [])])
async def test_a_dataset_that_ends_is_trained_to_its_last_prompt(staleness, count, batches):
    buffer = new_buffer(max_staleness=staleness, groups_per_step=4)
    producers = asyncio.create_task(run_producers(buffer, prompts(count), 5))
    sizes = []
    async with asyncio.timeout(20):
        async for batch in buffer.batches(lambda: len(sizes)):
            sizes.append(len(batch))
            buffer.trained(batch, len(sizes))
            buffer.advance(len(sizes))
        await producers
    assert sizes == batches
    assert buffer.ledger.summary() == {"admitted": count, "trained": count, "dropped": {}}
    assert buffer.ended == "dataset ended"


async def test_a_partial_batch_can_be_dropped():
    buffer = new_buffer(groups_per_step=4, train_partial_batch=False)
    producers = asyncio.create_task(run_producers(buffer, prompts(6), 8))
    steps = 0
    async with asyncio.timeout(20):
        async for batch in buffer.batches():
            steps += 1
            buffer.trained(batch, steps)
            buffer.advance(steps)
        await producers
    assert steps == 1
    assert buffer.ledger.summary() == {"admitted": 6, "trained": 4, "dropped": {"partial_batch": 2}}


async def test_closing_wakes_everyone_and_decides_every_fate():
    buffer = new_buffer(max_staleness=0, groups_per_step=2)
    source = prompts()
    first, second = await buffer.admit(source), await buffer.admit(source)
    blocked = [asyncio.create_task(buffer.admit(source)) for _ in range(3)]

    async def consume() -> int:
        return len([batch async for batch in buffer.batches()])

    consumer = asyncio.create_task(consume())
    await asyncio.sleep(0)
    buffer.finish(make_group(first))
    buffer.close("run_ended")
    async with asyncio.timeout(20):
        assert await asyncio.gather(*blocked) == [None] * 3
        assert await consumer == 0
    assert not buffer.finish(make_group(second))
    buffer.drop(second.prompt_id, "failed")
    assert buffer.ledger.summary() == {"admitted": 2, "trained": 0, "dropped": {"run_ended": 2}}
    assert buffer.ledger.balanced and buffer.ledger.in_flight == 0


async def test_closing_can_leave_the_batch_in_training_to_be_reported():
    buffer = new_buffer(max_staleness=1, groups_per_step=1)
    source = prompts()
    first, _ = await buffer.admit(source), await buffer.admit(source)
    buffer.finish(make_group(first))
    batch = buffer.take()
    buffer.close(keep_batch=True)
    assert buffer.ledger.in_flight == 1
    buffer.trained(batch, 1)
    assert buffer.ledger.summary() == {"admitted": 2, "trained": 1, "dropped": {"run_ended": 1}}


async def test_a_failure_reaches_the_trainer_and_the_producers():
    buffer = new_buffer(max_staleness=0, groups_per_step=1)
    source = prompts()
    await buffer.admit(source)
    blocked = asyncio.create_task(buffer.admit(source))
    consumer = asyncio.create_task(anext(buffer.batches()))
    await asyncio.sleep(0)
    buffer.fail(RunFailed("the first cause"))
    buffer.fail(RunFailed("a later one"))
    async with asyncio.timeout(20):
        for task in (blocked, consumer):
            with pytest.raises(RunFailed, match="the first cause"):
                await task


async def test_a_trainer_at_another_version_than_reported_is_an_error():
    buffer = new_buffer(groups_per_step=1)
    buffer.finish(make_group(await buffer.admit(prompts())))
    with pytest.raises(ForgeError, match="trainer is at version 4"):
        await anext(buffer.batches(lambda: 4))


def test_config_names_key_value_and_range():
    with pytest.raises(ConfigError, match=r"max_staleness = -1: must be 0"):
        BufferConfig(max_staleness=-1)
    with pytest.raises(ConfigError, match="groups_per_step = 0"):
        BufferConfig(groups_per_step=0)
    assert BufferConfig(max_staleness=2, groups_per_step=8).capacity == 24


# --- the window


@pytest.mark.parametrize(("window", "waits_at"), [(0, 2), (1, 3), (3, 5)])
def test_a_slow_group_is_passed_over_for_the_window_and_then_waited_for(window: int, waits_at: int):
    """max_staleness 2, one group per step: prompt 0 never ends; the trainer goes on up to version 2 + window."""
    buffer = new_buffer(max_staleness=2, groups_per_step=1, window=window, stale="mask", min_group_size=1)
    source = prompts()
    slow = at_once(buffer.admit(source))
    for version in range(waits_at):
        other = at_once(buffer.admit(source))
        buffer.finish(make_group(other, version))
        assert buffer.oldest_wait == version
        batch = buffer.take()
        assert [group.prompt for group in batch] == [other], "a finished group is not held back"
        buffer.trained(batch, version + 1)
        buffer.advance(version + 1)
    buffer.finish(make_group(at_once(buffer.admit(source)), waits_at))
    assert buffer.take() == [], "it is waited for"
    buffer.finish(make_group(slow, waits_at - 1))
    (group,) = buffer.take()
    assert group.prompt is slow
    assert all(episode.trained_since <= waits_at - 1 for episode in group.episodes), "its newest token is fresh"


def test_what_a_slow_group_missed_is_generated_anew_or_dropped_as_stale():
    for retries, fate in ((0, {"stale": 1}), (1, {})):
        buffer = new_buffer(max_staleness=1, groups_per_step=1, window=2, retries=retries)
        source = prompts()
        slow = at_once(buffer.admit(source))
        for version in (0, 1):
            buffer.finish(make_group(at_once(buffer.admit(source)), version))
            buffer.trained(buffer.take(), version + 1)
            buffer.advance(version + 1)
        buffer.finish(make_group(slow, 0))
        assert buffer.take() == []
        assert dict(buffer.ledger.dropped) == fate and buffer.stale_episodes["drop"] == 2
        assert (at_once(buffer.admit(source)) is slow) == bool(retries)


def make_mixed(prompt: Prompt, *versions: int) -> Group:
    """One episode of one token per version."""
    made = [make_group(prompt, version, size=len(versions)).episodes[i] for i, version in enumerate(versions)]
    return Group(prompt, tuple(made))


def test_a_resumed_group_keeps_its_fresh_episodes_and_the_others_are_generated_anew():
    """max_staleness 1, trainer at 2: of versions 1, 0, 1 the second is too old."""
    buffer = RolloutBuffer(BufferConfig(max_staleness=1, groups_per_step=1, stale="resume", retries=1), version=2)
    source = prompts()
    prompt = at_once(buffer.admit(source))
    assert buffer.kept("p0") == ()
    first = make_mixed(prompt, 1, 0, 1)
    buffer.finish(first)
    assert buffer.take() == [], "it goes back whole, though two are enough for a baseline"
    assert buffer.open == 0 and buffer.ledger.fate("p0") == "in flight" and dict(buffer.stale_episodes) == {"resume": 1}
    assert at_once(buffer.admit(source)) is prompt, "before new prompts"
    assert buffer.kept("p0") == (first.episodes[0], first.episodes[2])
    whole = Group(prompt, (first.episodes[0], make_mixed(prompt, 2, 2).episodes[1], first.episodes[2]))
    buffer.finish(whole)
    assert buffer.take() == [whole]
    buffer.trained([whole], 3)
    assert buffer.ledger.summary() == {"admitted": 1, "trained": 1, "dropped": {}}


def test_a_group_that_was_resumed_often_enough_is_trained_without_what_is_too_old():
    buffer = RolloutBuffer(BufferConfig(max_staleness=1, groups_per_step=1, stale="resume", retries=1), version=2)
    source = prompts()
    prompt = at_once(buffer.admit(source))
    buffer.finish(make_mixed(prompt, 2, 0, 2))
    assert buffer.take() == []
    assert at_once(buffer.admit(source)) is prompt
    again = make_mixed(prompt, 2, 0, 2)  # of a replica that is behind
    buffer.finish(again)
    (group,) = buffer.take()
    assert group.episodes == (again.episodes[0], again.episodes[2])
    assert dict(buffer.stale_episodes) == {"resume": 1, "drop": 1, "mask": 0}


def test_resume_without_a_retry_is_refused():
    with pytest.raises(ConfigError, match=r"retries = 0: must be at least 1 with stale: resume.*use stale: drop"):
        BufferConfig(stale="resume", retries=0)


# --- lost work


def test_lost_work_is_generated_anew_before_new_prompts_and_trained_once():
    buffer = new_buffer(max_staleness=1, groups_per_step=1, retries=1)
    source = prompts()
    lost, other = at_once(buffer.admit(source)), at_once(buffer.admit(source))
    assert not buffer.finish(make_group(lost, size=0))
    assert (buffer.retried, buffer.ledger.fate("p0"), buffer.open) == (1, "in flight", 1)
    saved = buffer.ledger.state()
    assert saved["in_flight"] == ["p0", "p1"], "a checkpoint knows of it"
    assert at_once(buffer.admit(source)) is lost
    buffer.finish(make_group(lost))
    buffer.trained(buffer.take(), 1)  # the other one is older and still runs
    assert buffer.ledger.fate("p0") == "trained"
    assert buffer.ledger.summary() == {"admitted": 2, "trained": 1, "dropped": {}}
    buffer.drop(other.prompt_id, "failed")


def test_work_that_is_lost_again_and_again_is_dropped_with_its_reason():
    buffer = new_buffer(max_staleness=1, groups_per_step=1, retries=2)
    source = prompts()
    for _ in range(3):
        prompt = at_once(buffer.admit(source))
        assert prompt.prompt_id == "p0"
        buffer.finish(make_group(prompt, size=1))
    assert dict(buffer.ledger.dropped) == {"group_too_small": 1} and buffer.retried == 2
    assert at_once(buffer.admit(source)).prompt_id == "p1"


async def test_work_lost_after_the_datasets_end_is_admitted_again():
    buffer = new_buffer(max_staleness=1, groups_per_step=1, retries=1)
    source = prompts(1)
    prompt = await buffer.admit(source)
    waiting = asyncio.create_task(buffer.admit(source))
    await asyncio.sleep(0)
    assert not waiting.done(), "the open prompt may come back"
    buffer.finish(make_group(prompt, size=0))
    async with asyncio.timeout(5):
        assert await waiting is prompt
    buffer.finish(make_group(prompt))
    buffer.trained(buffer.take(), 1)
    assert await buffer.admit(source) is None


# --- dropping without end


def test_all_rewards_equal_for_long_warns_then_ends_the_run_and_says_what_to_do(caplog):
    """CASES: dropped groups do not stall the run silently."""
    buffer = new_buffer(max_staleness=0, groups_per_step=1, drop_uniform_groups=True)
    source = prompts()
    for count in range(1, 33):
        buffer.finish(make_group(at_once(buffer.admit(source)), rewards=(0.5, 0.5, 0.5 + 1e-9)))
        assert len(caplog.records) == (count >= 8), "a quarter of 32 x groups_per_step"
    assert "8 prompts in a row were dropped" in caplog.text and "same reward" in caplog.text
    with pytest.raises(
        RunFailed, match=r"32 prompts in a row .*uniform_reward 32\. All episodes .*drop_uniform_groups"
    ):
        at_once(buffer.admit(source))


def test_a_trained_batch_ends_a_row_of_drops():
    buffer = new_buffer(max_staleness=1, groups_per_step=1, max_consecutive_drops=3)
    source = prompts()
    for version in range(1, 5):
        for _ in range(2):
            buffer.drop(at_once(buffer.admit(source)).prompt_id, "failed")
        buffer.finish(make_group(at_once(buffer.admit(source)), version - 1))
        buffer.trained(buffer.take(), version)
        buffer.advance(version)
    assert buffer.ledger.dropped["failed"] == 8


async def test_drops_by_the_gate_end_the_run_too():
    """Found out while a batch is looked for, where nobody else would wake the trainer."""
    buffer = RolloutBuffer(
        BufferConfig(max_staleness=0, groups_per_step=1, retries=0, max_consecutive_drops=1), version=5
    )
    buffer.finish(make_group(await buffer.admit(prompts()), 3))
    with pytest.raises(RunFailed, match=r"stale 1\. Raise buffer\.max_staleness"):
        async with asyncio.timeout(5):
            await anext(buffer.batches())
