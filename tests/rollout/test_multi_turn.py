"""Episodes of many turns, with a policy that answers from a script: no engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from forge_async.errors import ConfigError
from forge_async.journal import batch_line
from forge_async.model_zoo import byte_tokenizer
from forge_async.observability.episodes import describe
from forge_async.observability.seen import SeenEpisode
from forge_async.rollout.config import DatasetConfig, RewardConfig, RolloutConfig
from forge_async.rollout.datasets import PromptSource, Row
from forge_async.rollout.environment import Environment, Session, environment_maker, own_rows
from forge_async.rollout.rendering import render_prompt
from forge_async.rollout.reward_worker import LocalScorer
from forge_async.rollout.rollout import Limits, rollout_group
from forge_async.rollout.sequences import training_sequences
from forge_async.types import Completion, Group, Message, Prompt

TOKENIZER = byte_tokenizer()
USER = {"role": "user", "content": "guess my number"}
PROMPT = Prompt("0-1", (USER,), render_prompt(TOKENIZER, [USER]), answer="5", metadata={"task": "guess"})


class Guess(Session):
    """Says ``higher`` or ``lower`` until the number is found; counts what is open."""

    def __init__(self, prompt: Prompt, world: Guessing) -> None:
        super().__init__(prompt)
        self.world, self.tries, self.found = world, 0, False

    async def start(self) -> list[Message]:
        self.world.open += 1
        return [{"role": "user", "content": "1 to 9"}] if self.world.opens else []

    async def reply(self, text: str, completion: Completion) -> list[Message]:
        self.tries += 1
        if text == "raise":
            raise KeyError("state")
        if text == "hang":
            self.world.hanging.set()
            await asyncio.Event().wait()
        self.found = text == self.prompt.answer
        word = "higher" if text < self.prompt.answer else "lower"
        return [] if self.found else [{"role": "tool", "content": word, "tool_call_id": f"c{self.tries}"}]

    async def rewards(self) -> dict[str, Any]:
        return self.world.own or {"found": float(self.found), "tries": -0.1 * self.tries}

    async def close(self) -> None:
        await asyncio.sleep(0.01)
        self.world.open -= 1
        self.world.closed += 1


class Guessing(Environment):
    def __init__(self, tokenizer: Any = TOKENIZER, opens: bool = False, own: Any = None) -> None:
        super().__init__(tokenizer)
        self.opens, self.own, self.open, self.closed = opens, own, 0, 0
        self.hanging = asyncio.Event()

    def session(self, prompt: Prompt, episode_id: str) -> Guess:
        return Guess(prompt, self)

    def rows(self, size: int) -> Sequence[Row]:
        return [Row("guess my number", str(number), {"task": "guess"}) for number in range(1, (size or 9) + 1)]


class Policy:
    """Says its lines one by one, per episode; versions grow with every completion."""

    def __init__(self, *scripts: list[str]) -> None:
        self.scripts = scripts
        self.prompts: dict[str, list[list[int]]] = {}
        self.version = 0

    async def __call__(self, prompt_token_ids: Any, sampling: Any, session: str, episode_id: str) -> Completion:
        assert session == "0-1"
        turns = self.prompts.setdefault(episode_id, [])
        turns.append(prompt_token_ids.tolist())
        text = self.scripts[int(episode_id.rpartition(".")[2])][len(turns) - 1]
        await asyncio.sleep(0)
        self.version += 1
        cut = text.endswith("...")
        ids = [*TOKENIZER(text)["input_ids"], *([] if cut else [TOKENIZER.eos_token_id])]
        versions = np.full(len(ids), self.version, np.int32)
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
        reason: Any = "length" if cut else "stop"
        return Completion(prompt_token_ids, np.array(ids, np.int32), logprobs, versions, versions - 1, reason)


async def play(
    policy: Policy, world: Guessing, functions: Sequence[str] = (), **kwargs: Any
) -> tuple[Group, list[tuple[str, ...]]]:
    failures: list[tuple[str, ...]] = []
    group = await rollout_group(
        PROMPT,
        policy,
        world,
        LocalScorer(RewardConfig(functions=list(functions))),
        n=len(policy.scripts),
        sampling=None,
        timeout_s=kwargs.pop("timeout_s", 20.0),
        on_failure=lambda *failure: failures.append(failure),
        **kwargs,
    )
    assert world.open == 0 and world.closed == len(policy.scripts), "every session is closed, once"
    return group, failures


async def test_a_conversation_goes_on_until_the_environment_is_silent():
    policy, world = Policy(["7", "3", "5"], ["5"]), Guessing()
    group, failures = await play(policy, world)
    assert failures == []
    first, second = group.episodes
    assert [len(first.turns), len(second.turns)] == [3, 1]
    assert [turn.reply for turn in first.turns] == [
        ({"role": "tool", "content": "lower", "tool_call_id": "c1"},),
        ({"role": "tool", "content": "higher", "tool_call_id": "c2"},),
        (),
    ]
    assert first.reward == pytest.approx(1.0 - 0.3) and second.reward == pytest.approx(0.9)
    assert first.reward_parts == pytest.approx({"found": 1.0, "tries": -0.3})
    assert not first.truncated and first.metadata == {"text": "5"}
    prompts = policy.prompts["0-1.0"]
    for turn, later in zip(first.turns, prompts[1:], strict=False):
        so_far = [*turn.completion.prompt_token_ids.tolist(), *turn.completion.token_ids.tolist()]
        assert later[: len(so_far)] == so_far and len(later) > len(so_far)
    assert "higher" in TOKENIZER.decode(prompts[2])


async def test_exactly_the_sampled_tokens_of_all_turns_are_trained():
    group, _ = await play(Policy(["7", "5"]), Guessing())
    (episode,) = group.episodes
    (sequence,) = training_sequences(group, [2.0])
    sampled = [token for turn in episode.turns for token in turn.completion.token_ids.tolist()]
    assert sequence.token_ids[sequence.loss_mask].tolist() == sampled
    assert sequence.policy_versions[sequence.loss_mask].tolist() == [1, 1, 2, 2]
    assert sequence.logprobs[sequence.loss_mask].tolist() == [-1, -2, -1, -2]
    assert "lower" in TOKENIZER.decode(sequence.token_ids[~sequence.loss_mask].tolist())


async def test_a_template_that_rewrites_history_makes_two_sequences_of_one_episode():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]"
        "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    policy = Policy(["<think>high</think>7", "5"])
    group, _ = await play(policy, Guessing(tokenizer))
    first, second = training_sequences(group, [1.0])
    assert (first.sequence_id, second.sequence_id) == ("0-1.0", "0-1.0/1")
    assert tokenizer.decode(policy.prompts["0-1.0"][1]) == "[user]guess my number[assistant]7[tool]lower[assistant]"
    assert TOKENIZER.decode(first.token_ids[first.loss_mask].tolist()) == "<think>high</think>7<|im_end|>"
    assert TOKENIZER.decode(second.token_ids[second.loss_mask].tolist()) == "5<|im_end|>"


async def test_a_limit_of_turns_truncates_the_episode():
    for policy_, expected in (("keep", 0.8), ("mask", 0.8), ("penalise", 0.0)):
        policy = Policy(["7", "7", "7", "5"])
        limits = Limits(turns=2)
        world = Guessing(own={"got": 0.8})
        group, _ = await play(policy, world, limits=limits, truncated=policy_)
        (episode,) = group.episodes
        assert (len(episode.turns), episode.cut, episode.truncated) == (2, "turns", True)
        assert episode.reward == expected and len(policy.prompts["0-1.0"]) == 2
        assert len(training_sequences(group, [1.0], truncated=policy_)) == (policy_ != "mask")


async def test_a_turn_that_does_not_fit_the_context_truncates_the_episode():
    room = len(PROMPT.token_ids) + 40
    policy = Policy(["7"] * 9)
    group, _ = await play(policy, Guessing(), limits=Limits(tokens=room))
    (episode,) = group.episodes
    assert episode.cut == "context" and episode.truncated and 1 <= len(episode.turns) < 9
    assert all(len(prompt) < room for prompt in policy.prompts["0-1.0"])


async def test_a_completion_that_was_cut_off_ends_the_episode():
    policy = Policy(["7", "and then...", "5"])
    group, _ = await play(policy, Guessing())
    (episode,) = group.episodes
    assert len(episode.turns) == 2 and episode.truncated and episode.cut == ""
    assert episode.turns[-1].reply, "the environment saw it"


async def test_an_opening_that_leaves_no_room_is_a_failed_episode():
    limits = Limits(tokens=len(PROMPT.token_ids) + 4)
    group, failures = await play(Policy(["5"]), Guessing(opens=True), limits=limits)
    assert group.failed == 1 and failures[0][1] == "error" and "policy.max_model_len" in failures[0][2]


async def test_sessions_are_closed_on_every_way_out():
    """Finished, raised, timed out; then cancelled in the midst of a reply, twice."""
    group, failures = await play(Policy(["5"], ["raise"], ["hang"]), Guessing(), timeout_s=0.3)
    assert len(group.episodes) == 1 and group.failed == 2
    assert sorted(failure[:2] for failure in failures) == [("0-1.1", "error"), ("0-1.2", "timeout")]

    policy, world = Policy(["7", "hang"]), Guessing()
    task = asyncio.ensure_future(play(policy, world))
    await world.hanging.wait()
    assert world.open == 1
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (world.open, world.closed) == (0, 1)


async def test_a_session_that_does_not_close_changes_nothing(monkeypatch, caplog):
    class Clings(Guess):
        async def close(self) -> None:
            await super().close()
            await asyncio.Event().wait()

    class World(Guessing):
        def session(self, prompt: Prompt, episode_id: str) -> Guess:
            return Clings(prompt, self)

    monkeypatch.setattr("forge_async.rollout.rollout.CLOSE_S", 0.05)
    group, failures = await play(Policy(["5"]), World())
    assert len(group.episodes) == 1 and not failures
    assert "0-1.0: its environment's session did not close" in caplog.text


async def test_rewards_see_the_whole_conversation(tmp_path, monkeypatch):
    (tmp_path / "zoo_talk.py").write_text(
        "import json\n"
        "def last(prompt, completion):\n    return len(completion)\n"
        "def turns(prompt, completion, messages):\n"
        "    open('seen.json', 'w').write(json.dumps(messages))\n"
        "    return sum(message['role'] == 'assistant' for message in messages)\n"
    )
    monkeypatch.chdir(tmp_path)
    world = Guessing(opens=True)
    group, failures = await play(Policy(["77", "5"]), world, ["zoo_talk:last", "zoo_talk:turns"], environment_weight=2)
    assert failures == []
    (episode,) = group.episodes
    assert episode.reward_parts == pytest.approx({"last": 1, "turns": 2, "found": 1, "tries": -0.2})
    assert episode.reward == pytest.approx(1 + 2 + 2 * 0.8)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert [message["role"] for message in seen] == ["user", "assistant", "tool", "assistant"]
    assert seen[0]["content"] == "guess my number\n\n1 to 9" and seen[-1]["content"] == "5"


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"found": float("nan")}, "the environment's reward 'found' for prompt 0-1 is nan"),
        ({"found": "much"}, "'found' for prompt 0-1 is 'much'"),
        ({"exact_match": 1.0}, "'exact_match' for prompt 0-1 is under a name that a reward function has, too"),
        ({"found": 1e16}, "add up to 1e+16, beyond 1e+15"),
    ],
)
async def test_a_reward_of_the_environment_is_checked(own, message):
    group, failures = await play(Policy(["5"]), Guessing(own=own), ["forge_async.rollout.rewards:exact_match"])
    assert group.failed == 1 and failures[0][1] == "reward_invalid" and message in failures[0][2]


async def test_rewards_that_are_no_parts_fail_the_episode_and_nothing_else():
    group, failures = await play(Policy(["5"], ["5"]), Guessing(own=1.0))
    assert group.failed == 2 and "the environment's rewards are 1.0" in failures[0][2]


async def test_a_timeout_inside_an_environment_is_its_own_error():
    class Slow(Guess):
        async def reply(self, text: str, completion: Completion) -> list[Message]:
            raise TimeoutError("the tool took too long")

    class World(Guessing):
        def session(self, prompt: Prompt, episode_id: str) -> Guess:
            return Slow(prompt, self)

    _, failures = await play(Policy(["5"]), World())
    assert failures == [("0-1.0", "error", "TimeoutError: the tool took too long")]


async def test_no_reward_at_all_is_an_error_that_says_so():
    group, failures = await play_silent()
    assert group.failed == 1 and failures[0][1] == "reward_invalid" and "reward.functions is empty" in failures[0][2]


async def play_silent() -> tuple[Group, list[tuple[str, ...]]]:
    failures: list[tuple[str, ...]] = []
    scorer = LocalScorer(RewardConfig(functions=[]))
    environment = Environment(TOKENIZER)
    group = await rollout_group(
        PROMPT, Policy(["5"]), environment, scorer, 1, None, 5.0, on_failure=lambda *each: failures.append(each)
    )
    return group, failures


async def test_records_and_journal_of_many_turns():
    """The reader's record shows the opening, each turn with its own versions, and each reply; the journal's digest
    covers the tokens of all turns."""
    group, _ = await play(Policy(["7", "5"]), Guessing(opens=True))
    (episode,) = group.episodes
    sequences = training_sequences(group, [1.0])
    trainer = {sequences[0].sequence_id: np.arange(len(sequences[0].token_ids), dtype=np.float32)}
    record = describe(group, episode, TOKENIZER, None, sequences, trainer)
    assert [message["content"] for message in record["prompt"]] == ["guess my number", "1 to 9"]
    assert [turn["completion"] for turn in record["turns"]] == ["7<|im_end|>", "5<|im_end|>"]
    assert [turn["versions"] for turn in record["turns"]] == [[[1, 2]], [[2, 2]]]
    assert record["turns"][0]["reply"][0]["content"] == "lower" and record["turns"][1]["reply"] == []
    assert all(turn["trained"] == [[1, 2]] for turn in record["turns"])
    starts = np.flatnonzero(sequences[0].loss_mask)
    assert record["turns"][1]["trainer_logprobs"] == [float(starts[2]), float(starts[3])]
    seen = SeenEpisode(1, json.loads(json.dumps(record)), episode)
    assert seen.text == "7<|im_end|>\n5<|im_end|>" and seen.versions == (1, 2) and seen.cells()[6] == 4
    assert seen.cells()[-1] == "stop"
    cut, _ = await play(Policy(["7", "7"]), Guessing(), limits=Limits(turns=1))
    assert SeenEpisode(1, describe(cut, cut.episodes[0], TOKENIZER)).cells()[-1] == "turns"
    digest = batch_line(1, [group], sequences)["digest"]
    other, _ = await play(Policy(["7", "5"]), Guessing(opens=False))
    assert digest["token_ids"] != batch_line(1, [other], training_sequences(other, [1.0]))["digest"]["token_ids"]


def test_the_config_names_an_environment(tmp_path, monkeypatch):
    (tmp_path / "zoo_world.py").write_text(
        "from forge_async.rollout.environment import Environment\n"
        "class World(Environment):\n"
        "    def __init__(self, tokenizer, size=1):\n        super().__init__(tokenizer)\n        self.size = size\n"
        "def no_environment(tokenizer):\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)

    def make(environment: str, **args: Any) -> Environment:
        return environment_maker(RolloutConfig(environment=environment, environment_args=args))(TOKENIZER)

    made: Any = make("zoo_world:World", size=3)
    assert made.size == 3 and type(make("")) is Environment
    for name, args, message in (
        ("zoo_world:World", {"sise": 3}, r"environment = 'zoo_world:World'.*sise"),
        ("zoo_world:Nothing", {}, "Nothing"),
        ("zoo_no:World", {}, "No module named 'zoo_no'"),
        ("zoo_world:no_environment", {}, "It is a int"),
        ("", {"size": 3}, "size"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(name, **args)
    with pytest.raises(ConfigError, match="module:Class"):
        RolloutConfig(environment="nonsense")


def test_prompts_may_come_from_the_environment():
    config = DatasetConfig(kind="environment", size=3, shuffle=False)
    source = PromptSource(config, TOKENIZER, rows=own_rows(Guessing(), config))
    assert [next(source).answer for _ in range(3)] == ["1", "2", "3"]
    assert own_rows(Guessing(), DatasetConfig()) is None
    with pytest.raises(ConfigError, match="Environment has no prompts of its own"):
        own_rows(Environment(TOKENIZER), config)
