"""An environment of the real OpenEnv package behind its own server, on loopback, driven by a scripted policy."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("openenv", reason="the extra `openenv` is not installed")

import uvicorn
from openenv.core.env_server import Action, Observation, State, create_fastapi_app
from openenv.core.env_server import Environment as Served

from forge_async.model_zoo import byte_tokenizer
from forge_async.rollout.config import DatasetConfig, RewardConfig, RolloutConfig
from forge_async.rollout.datasets import PromptSource
from forge_async.rollout.environment import environment_maker, own_rows
from forge_async.rollout.reward_worker import LocalScorer
from forge_async.rollout.rollout import rollout_group
from forge_async.types import Completion, Group

TOKENIZER = byte_tokenizer()
OPEN: set[int] = set()
NONE_OPEN = threading.Event()


class Word(Action):
    text: str


class Seen(Observation):
    says: str


class Echo(Served):
    """Says every word back; ``bye`` ends it. The longer the word, the more it is worth."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Seen:
        self.words = []
        OPEN.add(id(self))
        NONE_OPEN.clear()
        return Seen(says=f"door {seed} {json.dumps(more)}")

    def step(self, action: Word, timeout_s: float | None = None, **more: Any) -> Seen:
        if action.text == "raise":
            raise ValueError("the floor gave way")
        if action.text == "hang":
            time.sleep(1.5)
        self.words.append(action.text)
        return Seen(says=" ".join(self.words), reward=0.1 * len(action.text), done=action.text == "bye")

    @property
    def state(self) -> State:
        return State(step_count=len(self.words))

    def close(self) -> None:
        OPEN.discard(id(self))
        if not OPEN:
            NONE_OPEN.set()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = create_fastapi_app(Echo, Word, Seen, max_concurrent_envs=8)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


async def play(
    url: str, *scripts: list[str], timeout_s: float = 20.0, **args: Any
) -> tuple[Group, list[Any], list[str]]:
    environment = environment_maker(RolloutConfig(environment=f"openenv:{url}", environment_args=args))(TOKENIZER)
    config = DatasetConfig(kind="environment", size=4, shuffle=False)
    source = PromptSource(config, TOKENIZER, rows=own_rows(environment, config))
    prompts = [next(source) for _ in range(4)]
    turns: dict[str, int] = {}
    shown: list[str] = []
    failures: list[Any] = []

    async def generate(prompt_token_ids: Any, sampling: Any, session: str, episode_id: str) -> Completion:
        turn = turns[episode_id] = turns.get(episode_id, -1) + 1
        if episode_id.endswith(".0"):
            shown.append(TOKENIZER.decode(prompt_token_ids.tolist()))
        text = scripts[int(episode_id.rpartition(".")[2])][turn]
        ids = np.array([*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id], np.int32)
        zeros = np.zeros(len(ids), np.int32)
        return Completion(prompt_token_ids, ids, zeros.astype(np.float32), zeros, zeros, "stop")

    group = await rollout_group(
        prompts[3],
        generate,
        environment,
        LocalScorer(RewardConfig(functions=[])),
        n=len(scripts),
        sampling=None,
        timeout_s=timeout_s,
        on_failure=lambda *failure: failures.append(failure),
    )
    await environment.close()
    return group, failures, shown


async def all_closed() -> None:
    """The server closes an environment when its connection has ended."""
    assert await asyncio.to_thread(NONE_OPEN.wait, 10), f"{len(OPEN)} environments are open"


async def test_episodes_of_one_prompt_are_apart_and_their_rewards_add_up(url: str) -> None:
    fields = dict(action_field="text", observation_field="says", reset={"level": 2})
    group, failures, shown = await play(url, ["a", "bb", "bye"], ["ccc", "bye"], **fields)
    assert failures == []
    first, second = group.episodes
    assert first.reward_parts == {"openenv_reward": pytest.approx(0.1 + 0.2 + 0.3)}
    assert second.reward == pytest.approx(0.6)
    assert first.opening == ({"role": "user", "content": 'door 3 {"level": 2}'},)
    assert [turn.reply[0]["content"] for turn in first.turns[:-1]] == ["a", "a bb"] and first.turns[-1].reply == ()
    assert second.turns[0].reply[0]["content"] == "ccc", "the other episode's words are not there"
    assert "You act in an environment" in shown[0] and "door 3" in shown[0]
    await all_closed()


async def test_actions_and_observations_as_json(url: str) -> None:
    group, failures, _ = await play(url, ["hello", '```json\n{"text": "bye"}\n```'])
    assert failures == []
    (episode,) = group.episodes
    assert "a JSON object is needed" in episode.turns[0].reply[0]["content"]
    assert json.loads(episode.opening[0]["content"])["says"].startswith("door 3")
    assert episode.reward == pytest.approx(0.3)
    await all_closed()


async def test_faults_and_timeouts_are_failed_episodes_and_connections_are_closed(url: str) -> None:
    fields = dict(action_field="text", observation_field="says")
    group, failures, _ = await play(url, ["bye"], ["raise"], ["hang"], timeout_s=1.0, **fields)
    assert len(group.episodes) == 1
    assert {failure[0].rpartition(".")[2]: failure[1] for failure in failures} == {"1": "error", "2": "timeout"}
    await all_closed()


async def test_no_server_and_a_wrong_field_are_errors_that_say_so(url: str) -> None:
    _, failures, _ = await play("http://127.0.0.1:9", ["x"])
    assert failures[0][1] == "error" and "127.0.0.1:9" in failures[0][2]
    _, failures, _ = await play(url, ["x"], observation_field="sees")
    assert "no field 'sees' (observation_field)" in failures[0][2]
    await all_closed()
