from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from forge_async.errors import DataError
from forge_async.model_zoo import byte_tokenizer
from forge_async.rollout.rendering import render_prompt
from forge_async.rollout.sequences import training_sequences
from forge_async.types import Completion, Episode, Group, Prompt, SamplingMask, Turn


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
    first = episode("p.0", dataclasses.replace(completion([5], [8, 3], [4, 5]), temperature=0.7))
    second = episode("p.1", completion([5], [9], [5]))
    a, b = training_sequences(group(first, second), [1.5, -1.5])
    assert a.sequence_id == "p.0" and (a.temperature, b.temperature) == (0.7, 1.0)
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


def test_a_turn_sampled_at_another_temperature_is_a_sequence_of_its_own():
    """The trainer scales a whole sequence's logits by one temperature."""
    first, second = completion([5, 6], [7], [1]), completion([5, 6, 7, 20, 21], [8, 3], [2, 2])
    hot = dataclasses.replace(second, temperature=1.5)
    a, b = training_sequences(group(episode("p.0", first, hot)), [2.0])
    assert (a.temperature, b.temperature) == (1.0, 1.5)
    assert a.token_ids.tolist() == [5, 6, 7] and b.token_ids.tolist() == [5, 6, 7, 20, 21, 8, 3]
    assert b.loss_mask.tolist() == [False] * 5 + [True, True], "the first turn is trained once"
    assert {a.episode_id, b.episode_id} == {"p.0"}


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


def with_mask(given: Completion, parts: list[list[int]]) -> Completion:
    ids = np.array([token for part in parts for token in part], np.int32)
    return dataclasses.replace(given, sampling_mask=SamplingMask(ids, np.array([len(p) for p in parts], np.int32)))


def test_sampling_masks_keep_to_their_tokens_in_chains_and_forks():
    first = with_mask(completion([5, 6], [7], [1]), [[7, 9]])
    second = with_mask(completion([5, 6, 7, 20, 21], [8, 3], [2, 2]), [[8], [2, 3, 4]])
    forked = completion([5, 20], [4], [2])
    chain, fork = training_sequences(group(episode("p.0", first, second, forked)), [1.0])
    assert chain.sampling_mask.counts.tolist() == [0, 0, 2, 0, 0, 1, 3]
    assert chain.sampling_mask.token_ids.tolist() == [7, 9, 8, 2, 3, 4]
    assert fork.sampling_mask is None, "nothing was recorded for it"
    (mixed,) = training_sequences(group(episode("p.0", completion([5, 6], [7], [1]), second)), [1.0])
    assert mixed.sampling_mask.counts.tolist() == [0, 0, 0, 0, 0, 1, 3]


def test_a_token_outside_of_its_own_sampling_mask_is_an_error():
    for parts, message in (([[8], [8]], r"p\.0: sampled token 1 \(id 9\) is not in"), ([[8]], "has 1 entries for 2")):
        with pytest.raises(DataError, match=message):
            training_sequences(group(episode("p.0", with_mask(completion([5], [8, 9], [1, 1]), parts))), [1.0])


def test_a_template_that_strips_earlier_thoughts_forks_the_episode():
    """Rendered by a template as reasoning models have it: the second prompt lacks the first answer's thoughts."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]"
        "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    messages = [{"role": "user", "content": "1+1"}]
    completions = []
    for answer, reply in (("<think>one and one</think>2", "and 2+2?"), ("<think>easy</think>4", "")):
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        completions.append(completion(render_prompt(tokenizer, messages), ids, [len(completions)] * len(ids)))
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": reply}]
    first, second = training_sequences(group(episode("p.0", *completions)), [1.0])
    for sequence, sampled in ((first, completions[0]), (second, completions[1])):
        assert sequence.token_ids[sequence.loss_mask].tolist() == sampled.token_ids.tolist()
        assert sequence.token_ids[~sequence.loss_mask].tolist() == sampled.prompt_token_ids.tolist()
    assert "one and one" not in tokenizer.decode(second.token_ids)


def test_ids_that_decoding_and_encoding_would_change_are_trained_as_sampled():
    """As when a model samples two tokens where its tokenizer writes one; here a byte that is no text."""
    tokenizer = byte_tokenizer()
    sampled = [259, 52]
    again = tokenizer(tokenizer.decode(sampled), add_special_tokens=False)["input_ids"]
    assert again != sampled
    (sequence,) = training_sequences(group(episode("p.0", completion([5], sampled, [0, 0]))), [1.0])
    assert sequence.token_ids.tolist() == [5, *sampled]


def test_the_finish_reason_decides_about_truncation_not_an_id():
    """A stop token other than the end token ends normally; an end token sampled as the last one allowed is cut off."""
    stopped = dataclasses.replace(completion([5], [8, 77], [1, 1]), stop_reason=77)
    cut = completion([5], [8, 3], [1, 1], "length")
    assert not episode("p.0", stopped).truncated and episode("p.1", cut).truncated
    kept = training_sequences(group(episode("p.0", stopped), episode("p.1", cut)), [1, -1], truncated="mask")
    assert [s.token_ids.tolist() for s in kept] == [[5, 8, 77]] and kept[0].loss_mask.tolist() == [False, True, True]


def test_a_truncated_multi_turn_episode_with_tool_replies():
    """Tool tokens are never trained; the last turn's finish reason alone says whether it was cut off."""
    call, cut = completion([5, 6], [7], [1], "stop"), completion([5, 6, 7, 20, 21], [8, 9], [2, 2], "length")
    (kept,) = training_sequences(group(episode("p.0", call, cut)), [1.0], truncated="keep")
    assert kept.token_ids[kept.loss_mask].tolist() == [7, 8, 9]
    assert kept.advantages.tolist() == [0, 0, 1, 0, 0, 1, 1]
    assert training_sequences(group(episode("p.0", call, cut)), [1.0], truncated="mask") == []
    early = dataclasses.replace(call, finish_reason="length")
    assert not episode("p.0", early, completion([5, 6, 7, 20], [8], [2])).truncated
