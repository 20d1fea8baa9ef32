"""What the policy is shown after a reply: sampled ids as they are, the reply alone as the template renders it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forge_async.errors import DataError
from forge_async.model_zoo import byte_tokenizer
from forge_async.rollout.conversation import Conversation, check_messages
from forge_async.rollout.rendering import render_prompt
from forge_async.types import Completion, Prompt

USER = {"role": "user", "content": "1+1?"}
TOOL = {"role": "tool", "content": "2", "tool_call_id": "call-1"}
STRIPS_THOUGHTS = (
    "{% for m in messages %}[{{ m.role }}]"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def start(tokenizer: Any, *opening: dict[str, str], tools: Any = ()) -> Conversation:
    prompt = Prompt("p", (USER,), render_prompt(tokenizer, [USER]))
    return Conversation(tokenizer, prompt, opening, tools)


def answer(conversation: Conversation, ids: list[int], finish_reason: Any = "stop") -> Completion:
    versions = np.zeros(len(ids), np.int32)
    zeros = versions.astype(np.float32)
    ids_ = np.array(ids, np.int32)
    return Completion(conversation.prompt_ids, ids_, zeros, versions, versions, finish_reason)


def encoded(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_next_prompt_is_what_was_sampled_and_the_rendered_reply():
    tokenizer = byte_tokenizer()
    conversation = start(tokenizer)
    first = conversation.prompt_ids.tolist()
    sampled = [*encoded(tokenizer, "ask a tool"), tokenizer.eos_token_id]
    conversation.completed(answer(conversation, sampled), [TOOL])
    rendered = render_prompt(tokenizer, [USER, {"role": "assistant", "content": "ask a tool"}, TOOL]).tolist()
    assert conversation.prompt_ids.tolist() == rendered, "nothing was odd about this one: the template's own ids"
    assert rendered[: len(first) + len(sampled)] == first + sampled
    second = conversation.prompt_ids.tolist()
    conversation.completed(answer(conversation, [*encoded(tokenizer, "2"), tokenizer.eos_token_id]), [USER])
    assert conversation.prompt_ids.tolist()[: len(second)] == second
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "tool", "assistant", "user"]


def test_ids_that_encoding_the_text_again_would_change_stay_as_sampled():
    """A byte that is no text, and a piece of a special token's name spelt in bytes."""
    tokenizer = byte_tokenizer()
    conversation = start(tokenizer)
    odd = [*encoded(tokenizer, "é")[:1], *encoded(tokenizer, "<|im"), *encoded(tokenizer, "_end|> x")]
    assert encoded(tokenizer, tokenizer.decode(odd)) != odd
    sampled = [*odd, tokenizer.eos_token_id]
    first = conversation.prompt_ids.tolist()
    conversation.completed(answer(conversation, sampled), [TOOL])
    assert conversation.prompt_ids.tolist()[: len(first) + len(sampled)] == first + sampled


def test_a_stop_string_is_followed_by_the_templates_end_token():
    tokenizer = byte_tokenizer()
    conversation = start(tokenizer)
    first, sampled = conversation.prompt_ids.tolist(), encoded(tokenizer, "</call>")
    conversation.completed(answer(conversation, sampled), [TOOL])
    rest = conversation.prompt_ids.tolist()[len(first) :]
    assert rest[: len(sampled)] == sampled and rest[len(sampled)] == tokenizer.eos_token_id
    assert rest.count(tokenizer.eos_token_id) == 2, "the completion's and the reply's"


def test_another_end_token_than_the_templates_is_not_followed_by_a_second_one():
    tokenizer = byte_tokenizer()
    conversation = start(tokenizer)
    sampled = [*encoded(tokenizer, "x"), tokenizer.bos_token_id]
    first = conversation.prompt_ids.tolist()
    conversation.completed(answer(conversation, sampled), [TOOL])
    after = conversation.prompt_ids.tolist()[len(first) + len(sampled) :]
    assert after[0] != tokenizer.eos_token_id


def test_white_space_that_a_template_trims_is_no_fork():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    conversation = start(tokenizer)
    first, sampled = conversation.prompt_ids.tolist(), [*encoded(tokenizer, " 2 \n"), tokenizer.eos_token_id]
    conversation.completed(answer(conversation, sampled), [TOOL])
    assert conversation.prompt_ids.tolist()[: len(first) + len(sampled)] == first + sampled


def test_a_template_that_strips_thoughts_is_followed_and_the_episode_forks():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = STRIPS_THOUGHTS
    conversation = start(tokenizer)
    sampled = [*encoded(tokenizer, "<think>one and one</think>2"), tokenizer.eos_token_id]
    conversation.completed(answer(conversation, sampled), [TOOL])
    shown = tokenizer.decode(conversation.prompt_ids.tolist())
    assert shown == "[user]1+1?<|im_end|>[assistant]2<|im_end|>[tool]2<|im_end|>[assistant]"
    first = conversation.prompt_ids.tolist()
    plain = [*encoded(tokenizer, "two"), tokenizer.eos_token_id]
    conversation.completed(answer(conversation, plain), [USER])
    assert conversation.prompt_ids.tolist()[: len(first) + len(plain)] == first + plain, "it goes on from the fork"


def test_opening_messages_and_tools_are_rendered_into_the_first_prompt():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% if tools %}{{ tools[0].name }};{% endif %}" + STRIPS_THOUGHTS
    conversation = start(tokenizer, {"role": "user", "content": "a door"}, tools=[{"name": "open"}])
    assert tokenizer.decode(conversation.prompt_ids.tolist()).startswith("open;[user]1+1?\n\na door<|im_end|>")
    conversation.completed(answer(conversation, [*encoded(tokenizer, "x"), tokenizer.eos_token_id]), [TOOL])
    assert tokenizer.decode(conversation.prompt_ids.tolist()).count("open;") == 1


def test_nothing_is_rendered_after_the_last_turn():
    tokenizer = byte_tokenizer()
    conversation = start(tokenizer)
    tokenizer.chat_template = "{{ raise_exception('not to be used') }}"
    conversation.completed(answer(conversation, [7]), [TOOL], last=True)
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    "bad", ["text", {"role": "user", "content": "x"}, [{"role": "user"}], [{"content": "x"}], ["x"]]
)
def test_what_is_no_message_is_refused(bad: Any) -> None:
    with pytest.raises(DataError, match=r"episode p\.3: the environment answered .*role and content"):
        check_messages(bad, "p.3")
