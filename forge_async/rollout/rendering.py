"""Chat messages to token ids, by the tokenizer's own template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from forge_async.errors import DataError
from forge_async.rollout.config import Example
from forge_async.types import IdArray, Message


def build_messages(
    content: str | Sequence[Message], system_prompt: str | None, examples: Sequence[Example] = ()
) -> tuple[Message, ...]:
    """System message, worked examples, then the prompt itself.

    Args:
        content: the user message's text, or a whole conversation that ends with it. A conversation with a system
            message of its own keeps that one.
        system_prompt: None adds no system message, "" an empty one.
    """
    conversation = [{"role": "user", "content": content}] if isinstance(content, str) else [dict(m) for m in content]
    shots = [
        message
        for example in examples
        for message in ({"role": "user", "content": example.prompt}, {"role": "assistant", "content": example.answer})
    ]
    if conversation and conversation[0]["role"] == "system":
        return (conversation[0], *shots, *conversation[1:])
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return (*system, *shots, *conversation)


def render_prompt(tokenizer: Any, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> IdArray:
    """int32 [P]: the messages with the generation prompt, as :func:`render_text` and :func:`encode` make them."""
    return encode(tokenizer, render_text(tokenizer, messages, tools))


def encode(tokenizer: Any, text: str) -> IdArray:
    """int32: ids of rendered text. The template alone decides about special tokens: none is added, so that a BOS of the
    template is not doubled by one of the tokenizer."""
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)


def render_text(tokenizer: Any, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
    """The messages with the generation prompt, by the chat template.

    Args:
        tools: JSON schemas that the template tells the model about.

    Raises:
        DataError: there is no chat template, or it refuses these messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"the tokenizer of {getattr(tokenizer, 'name_or_path', '') or 'the model'} has no chat template; "
            "put a chat_template.jinja into the model folder."
        )
    given = {"tools": list(tools)} if tools else {}
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **given))
    except Exception as error:  # templates raise whatever they like; jinja2 need not be imported here
        raise DataError(f"the chat template refuses the messages {list(messages)}: {error}") from error
