"""Environments of the real ``verifiers`` package, driven by a scripted policy."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verifiers", reason="the extra `verifiers` is not installed")

from forge_async.errors import ConfigError
from forge_async.model_zoo import byte_tokenizer
from forge_async.rollout.config import DatasetConfig, RewardConfig, RolloutConfig
from forge_async.rollout.datasets import PromptSource
from forge_async.rollout.environment import environment_maker, own_rows
from forge_async.rollout.reward_worker import LocalScorer
from forge_async.rollout.rollout import Limits, rollout_group
from forge_async.rollout.sequences import training_sequences
from forge_async.types import Completion, Group

TOKENIZER = byte_tokenizer()
TOKENIZER.chat_template = (
    "{% if tools %}{{ tools | map(attribute='function.name') | join(',') }};{% endif %}" + TOKENIZER.chat_template
)

MODULE = '''
import verifiers as vf
from datasets import Dataset

CLEANED = []
ROWS = Dataset.from_dict({"question": ["What is 2 + 3?", "What is 4 + 4?"], "answer": ["5", "8"]})


class Guess(vf.MultiTurnEnv):
    @vf.stop
    async def found(self, state):
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1]["content"] == state["answer"]

    @vf.cleanup
    async def clean(self, state):
        CLEANED.append(len(state["trajectory"]))

    async def env_response(self, messages, state, **kwargs):
        if messages[-1]["content"] == "raise":
            raise vf.Error("a broken door")
        return [{"role": "user", "content": f"not {messages[-1]['content']}"}]


def right(completion, answer, **kwargs):
    return float(completion[-1]["content"] == answer)


def tries(state, **kwargs):
    return len(state["trajectory"])


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


def load_environment(kind="guess", max_turns=5):
    rubric = vf.Rubric(funcs=[right, tries], weights=[1.0, -0.1])
    if kind == "tools":
        return vf.ToolEnv(tools=[add], dataset=ROWS, rubric=rubric, max_turns=max_turns, system_prompt="Use tools.")
    if kind == "reasoning_gym":
        return vf.ReasoningGymEnv(gym="chain_sum", num_train_examples=3, num_eval_examples=1)
    return Guess(dataset=ROWS, rubric=rubric, max_turns=max_turns)
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import sys

    (tmp_path / "zoo_verifiers.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "zoo_verifiers", raising=False)
    yield
    monkeypatch.delitem(sys.modules, "zoo_verifiers", raising=False)


def make(**args: Any) -> Any:
    config = RolloutConfig(environment="verifiers:zoo-verifiers", environment_args=args)
    return environment_maker(config)(TOKENIZER)


async def play(environment: Any, *scripts: list[str], **kwargs: Any) -> tuple[Group, list[Any], list[str]]:
    """Episodes of the environment's first prompt; failures, and what the first episode's policy was shown."""
    config = DatasetConfig(kind="environment", size=2, shuffle=False, max_prompt_tokens=2000)
    prompt = next(PromptSource(config, TOKENIZER, rows=own_rows(environment, config)))
    turns: dict[str, int] = {}
    shown: list[str] = []
    failures: list[Any] = []

    async def generate(prompt_token_ids: Any, sampling: Any, session: str, episode_id: str) -> Completion:
        script = scripts[int(episode_id.rpartition(".")[2])]
        turn = turns[episode_id] = turns.get(episode_id, -1) + 1
        if episode_id.endswith(".0"):
            shown.append(TOKENIZER.decode(prompt_token_ids.tolist()))
        if script[turn] == "never":
            await asyncio.Event().wait()
        ids = np.array([*TOKENIZER(script[turn])["input_ids"], TOKENIZER.eos_token_id], np.int32)
        zeros = np.zeros(len(ids), np.int32)
        return Completion(prompt_token_ids, ids, zeros.astype(np.float32), zeros, zeros, "stop")

    group = await rollout_group(
        prompt,
        generate,
        environment,
        LocalScorer(RewardConfig(functions=[])),
        n=len(scripts),
        sampling=None,
        timeout_s=kwargs.pop("timeout_s", 20.0),
        on_failure=lambda *failure: failures.append(failure),
        **kwargs,
    )
    return group, failures, shown


async def test_a_multi_turn_environment_with_its_rubric():
    group, failures, shown = await play(make(), ["4", "5"], ["5"], ["1", "2", "3", "4", "6"])
    assert failures == []
    found, at_once, never = group.episodes
    assert [len(each.turns) for each in group.episodes] == [2, 1, 5]
    assert found.reward_parts == pytest.approx({"right": 1.0, "tries": -0.2}) and found.reward == pytest.approx(0.8)
    assert at_once.reward == pytest.approx(0.9) and never.reward == pytest.approx(-0.5)
    assert found.turns[0].reply == ({"role": "user", "content": "not 4"},) and found.turns[1].reply == ()
    assert "What is 2 + 3?" in shown[0] and "not 4" in shown[1]
    (sequence,) = training_sequences(group, [1.0, 0.0, -1.0])[:1]
    assert TOKENIZER.decode(sequence.token_ids[sequence.loss_mask].tolist()) == "4<|im_end|>5<|im_end|>"


async def test_tools_are_told_to_the_template_called_and_answered():
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    group, failures, shown = await play(make(kind="tools"), [f"Let me see. {call}", "5"], ["<tool_call>{", "x"])
    assert failures == []
    first, second = group.episodes
    assert first.turns[0].reply == ({"role": "tool", "content": "5", "tool_call_id": "call_0"},)
    assert first.reward_parts == pytest.approx({"right": 1.0, "tries": -0.2})
    assert len(second.turns) == 1, "what is no call ends the episode"
    assert shown[0].startswith("add;") and "Use tools." in shown[0]
    assert f"Let me see. {call}<|im_end|>" in shown[1], "the model's own words, not a rendering of the call"


async def test_an_environment_that_comes_with_the_package():
    environment = make(kind="reasoning_gym")
    answer = environment.env.rg_dataset[int(environment.rows(1)[0].answer)]["answer"]
    group, failures, _ = await play(environment, [f"<answer>{answer}</answer>"], ["<answer>no</answer>"])
    assert failures == []
    assert group.episodes[0].reward > group.episodes[1].reward


async def test_limits_of_ours_end_the_episode_as_truncated_and_it_is_scored():
    group, failures, _ = await play(make(), ["1", "2", "3"], limits=Limits(turns=2))
    assert failures == []
    (episode,) = group.episodes
    assert episode.cut == "turns" and episode.reward == pytest.approx(-0.2)


async def test_errors_and_timeouts_are_failed_episodes_and_are_cleaned_up():
    import sys

    group, failures, _ = await play(make(), ["5"], ["raise", "x"], ["1", "never"], ["", "5"], timeout_s=1.0)
    assert sorted(failure[:2] for failure in failures) == [("0-0.1", "error"), ("0-0.2", "timeout")]
    assert "a broken door" in next(failure[2] for failure in failures if failure[0].endswith(".1"))
    assert sorted(sys.modules["zoo_verifiers"].CLEANED) == [1, 1, 1, 2]
    assert len(group.episodes) == 2 and len(group.episodes[1].turns) == 2, "an empty answer is one, too"


def test_the_runs_own_signal_handlers_stay():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    make()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_wrong_name_or_argument_is_a_config_error():
    with pytest.raises(ConfigError, match="verifiers:zoo-nothing"):
        environment_maker(RolloutConfig(environment="verifiers:zoo-nothing"))(TOKENIZER)
    with pytest.raises(ConfigError, match="kinds"):
        make(kinds="tools")
