from __future__ import annotations

import asyncio

import numpy as np
import pytest

from forge_async.errors import DataError, RunFailed
from forge_async.model_zoo import byte_tokenizer
from forge_async.rollout.config import RewardConfig
from forge_async.rollout.environment import Environment, Session
from forge_async.rollout.reward_worker import LocalScorer
from forge_async.rollout.rewards import RewardFailure
from forge_async.rollout.rollout import rollout_group
from forge_async.types import Completion, Group, Prompt

ENVIRONMENT = Environment(byte_tokenizer())
PROMPT = Prompt("3-1", ({"role": "user", "content": "3 + 4 ="},), np.array([2, 9], np.int32), "7")
CHAIN_SUM = RewardConfig(
    functions=[f"forge_async.rollout.rewards:{name}" for name in ("exact_integer", "integer_format")],
    weights=[0.7, 0.3],
)


def completion_of(text: str, finish_reason: str = "stop") -> Completion:
    ids = np.array(ENVIRONMENT.tokenizer(text)["input_ids"] + [3], np.int32)
    zeros = np.zeros(len(ids), np.int32)
    return Completion(PROMPT.token_ids, ids, zeros.astype(np.float32), zeros, zeros, finish_reason)


class Policy:
    """Answers from a script: a text, a Completion, an exception to raise, or None for never."""

    def __init__(self, *script) -> None:
        self.script = list(script)
        self.sessions: list[str] = []
        self.cancelled = 0

    async def __call__(self, prompt_token_ids, sampling, session, episode_id) -> Completion:
        assert prompt_token_ids is PROMPT.token_ids and sampling == "sampling"
        self.sessions.append(session)
        item = self.script[len(self.sessions) - 1]
        try:
            await (asyncio.Event().wait() if item is None else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(item, Exception):
            raise item
        return item if isinstance(item, Completion) else completion_of(item)


async def run(policy: Policy, rewards=None, timeout_s: float = 20, **kwargs) -> tuple[Group, list[tuple[str, ...]]]:
    failures: list[tuple[str, ...]] = []
    group = await rollout_group(
        PROMPT,
        policy,
        ENVIRONMENT,
        rewards or LocalScorer(CHAIN_SUM),
        n=len(policy.script),
        sampling="sampling",
        timeout_s=timeout_s,
        on_failure=lambda *failure: failures.append(failure),
        **kwargs,
    )
    return group, failures


async def test_a_group_is_scored_function_by_function():
    group, failures = await run(Policy("7", "The answer is 7", "8", "eight"))
    assert [episode.reward for episode in group.episodes] == pytest.approx([1.0, 0.7, 0.3, 0.0])
    assert group.episodes[1].reward_parts == {"exact_integer": 1.0, "integer_format": 0.0}
    assert [episode.episode_id for episode in group.episodes] == ["3-1.0", "3-1.1", "3-1.2", "3-1.3"]
    assert group.failed == 0 and failures == []
    assert group.episodes[0].metadata == {"text": "7"}


async def test_only_what_a_group_lacks_is_generated():
    first, _ = await run(Policy("7", "8", "eight"))
    kept = (first.episodes[0], first.episodes[2])
    policy = Policy("7", "-", "-")
    group, _ = await run(policy, kept=kept)
    assert len(policy.sessions) == 1, "one request, for the episode that is missing"
    assert group.episodes[0] is kept[0] and group.episodes[2] is kept[1]
    assert (group.episodes[1].episode_id, group.episodes[1].reward) == ("3-1.1", 1.0)


async def test_failed_episodes_are_counted_and_the_rest_is_kept():
    aborted = completion_of("7", "abort")
    policy = Policy("7", None, ValueError("no luck"), "8", DataError("prompt too long for the policy"), aborted)
    group, failures = await run(policy, timeout_s=0.2)
    assert [episode.episode_id for episode in group.episodes] == ["3-1.0", "3-1.3"]
    assert group.failed == 4
    assert sorted(failures) == [
        ("3-1.1", "timeout", "not finished within 0.2 s (rollout.timeout_s)"),
        ("3-1.2", "error", "ValueError: no luck"),
        ("3-1.4", "error", "prompt too long for the policy"),
        ("3-1.5", "error", "episode 3-1.5: its request was aborted after 2 tokens."),
    ]
    assert policy.cancelled == 1


async def test_a_failed_reward_is_a_failed_episode_not_a_zero():
    class Scorer:
        specs = CHAIN_SUM.specs

        async def score(self, prompt, completions, conversations):
            if completions == ["8"]:
                return [RewardFailure("m:f", "raised", "reward m:f raised at m.py:3")]
            return [{"exact_integer": 1.0, "integer_format": 1.0}]

    group, failures = await run(Policy("7", "8"), Scorer())
    assert len(group.episodes) == 1 and group.failed == 1
    assert failures == [("3-1.1", "reward_raised", "reward m:f raised at m.py:3")]


async def test_truncated_episodes_can_be_penalised():
    policy = Policy(completion_of("7", "length"), "7")
    group, _ = await run(policy, truncated="penalise")
    assert [episode.reward for episode in group.episodes] == [0.0, 1.0]
    assert group.episodes[0].reward_parts["exact_integer"] == 1.0 and group.episodes[0].truncated


async def test_a_failed_run_and_a_cancellation_end_the_whole_group():
    policy = Policy(None, RunFailed("the store is gone"), None)
    with pytest.raises(RunFailed, match="the store is gone"):
        await run(policy)
    assert policy.cancelled == 2

    policy = Policy(None, None)
    task = asyncio.create_task(run(policy))
    for _ in range(3):  # the task, then its episodes, then their requests
        await asyncio.sleep(0)
    assert len(policy.sessions) == 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert policy.cancelled == 2


async def test_rewards_that_never_work_end_the_run(tmp_path, monkeypatch, caplog):
    (tmp_path / "zoo_never.py").write_text("def f(prompt, completion):\n    raise OSError('disk')\n")
    monkeypatch.chdir(tmp_path)
    scorer = LocalScorer(RewardConfig(functions=["zoo_never:f"], max_initial_failures=3))
    with pytest.raises(
        RunFailed, match=r"none of the first 3 .* zoo_never:f raised at .*zoo_never\.py:2 in f: OSError: disk"
    ):
        await run(Policy("1", "2", "3", "4"), scorer)
    assert "zoo_never.py:2" in caplog.text


@pytest.mark.parametrize("error", [KeyError("state"), asyncio.CancelledError()], ids=["error", "cancelled within"])
async def test_an_environment_that_raises_fails_its_episode(error: BaseException):
    class Broken(Session):
        async def reply(self, text, completion):
            raise error

    class Breaks(Environment):
        def session(self, prompt, episode_id):
            return Broken(prompt)

    group = await rollout_group(
        PROMPT, Policy("7"), Breaks(byte_tokenizer()), LocalScorer(CHAIN_SUM), 1, "sampling", 5.0
    )
    assert group.episodes == () and group.failed == 1
