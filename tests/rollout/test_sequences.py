from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from forge_async.errors import DataError
from forge_async.rollout.sequences import training_sequences
from forge_async.types import Completion, Episode, Group, Prompt, Turn


def completion(prompt, tokens, versions, finish_reason="stop") -> Completion:
    logprobs = np.array([-0.5 * (index + 1) for index in range(len(tokens))], np.float32)
    versions = np.array(versions, np.int32)
    return Completion(
        np.array(prompt, np.int32), np.array(tokens, np.int32), logprobs, versions, versions, finish_reason
    )


def episode(name: str, *completions: Completion) -> Episode:
    return Episode(name, "p", tuple(Turn(c) for c in completions), 0.0)


def group(*episodes: Episode) -> Group:
    return Group(Prompt("p", (), np.array([5, 6], np.int32)), episodes)


def test_prompt_and_completion_side_by_side():
    """[P, R1, R2]: exactly R1 and R2 are trained, each with its own log-prob, version and advantage."""
    first = episode("p.0", completion([5], [8, 3], [4, 5]))
    second = episode("p.1", completion([5], [9], [5]))
    a, b = training_sequences(group(first, second), [1.5, -1.5], temperature=0.7)
    assert a.sequence_id == "p.0" and a.temperature == 0.7
    assert a.token_ids.tolist() == [5, 8, 3]
    assert a.loss_mask.tolist() == [False, True, True]
    assert a.logprobs.tolist() == [0, -0.5, -1.0]
    assert a.policy_versions.tolist() == [-1, 4, 5]
    assert a.advantages.tolist() == [0, 1.5, 1.5]
    assert a.oldest_version == 4
    assert b.token_ids.tolist() == [5, 9] and b.advantages.tolist() == [0, -1.5]
    assert [x.dtype for x in (a.token_ids, a.loss_mask, a.logprobs, a.policy_versions)] == [
        "int32",
        "bool",
        "float32",
        "int32",
    ]


def test_a_turn_that_continues_is_one_sequence_with_the_reply_masked():
    two_turns = episode("p.0", completion([5, 6], [7], [1]), completion([5, 6, 7, 20, 21], [8, 3], [2, 2]))
    (sequence,) = training_sequences(group(two_turns), [2.0])
    assert sequence.token_ids.tolist() == [5, 6, 7, 20, 21, 8, 3]
    assert sequence.loss_mask.tolist() == [False, False, True, False, False, True, True]
    assert sequence.policy_versions.tolist() == [-1, -1, 1, -1, -1, 2, 2]
    assert sequence.logprobs.tolist() == [0, 0, -0.5, 0, 0, -0.5, -1.0]


def test_a_rewritten_history_forks_the_episode():
    forked = episode("p.0", completion([5, 6], [7, 7], [1, 1]), completion([5, 6, 20], [8], [2]))
    first, second = training_sequences(group(forked), [2.0])
    assert (first.sequence_id, second.sequence_id) == ("p.0", "p.0/1")
    assert (first.episode_id, second.episode_id) == ("p.0", "p.0")  # together they weigh as one episode
    assert first.token_ids.tolist() == [5, 6, 7, 7] and second.token_ids.tolist() == [5, 6, 20, 8]
    assert second.loss_mask.tolist() == [False, False, False, True]


def test_truncated_episodes_can_be_left_out():
    cut = episode("p.0", completion([5], [8], [1], "length"))
    whole = episode("p.1", completion([5], [9], [1]))
    assert [s.sequence_id for s in training_sequences(group(cut, whole), [1, -1], truncated="mask")] == ["p.1"]
    assert len(training_sequences(group(cut, whole), [1, -1])) == 2


def test_unusable_episodes_are_named():
    good = completion([5], [8, 9], [1, 1])
    cases = {
        "p.0: logprobs has 1 entries for 2": dataclasses.replace(good, logprobs=good.logprobs[:1]),
        "p.0: logprobs has none": dataclasses.replace(good, logprobs=None),
        "p.0: no token was sampled": completion([5], [], []),
        "p.0: its request was aborted": dataclasses.replace(good, finish_reason="abort"),
    }
    for message, bad in cases.items():
        with pytest.raises(DataError, match=message):
            training_sequences(group(episode("p.0", bad)), [1.0])
    with pytest.raises(DataError, match="p.0: it has no turn"):
        training_sequences(group(episode("p.0")), [1.0])
    with pytest.raises(DataError, match="p.0: its advantage is nan"):
        training_sequences(group(episode("p.0", good)), [float("nan")])
    with pytest.raises(DataError, match="2 advantages for 1 episodes"):
        training_sequences(group(episode("p.0", good)), [1.0, 2.0])
