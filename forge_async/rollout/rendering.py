"""Chat messages to token ids, by the tokenizer's own template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from forge_async.errors import DataError
from forge_async.rollout.config import Example
from forge_async.types import IdArray

Message = dict[str, str]


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


def render_prompt(tokenizer: Any, messages: Sequence[Message]) -> IdArray:
    """int32 [P]: the messages with the generation prompt.

    The template alone decides about special tokens: its text is encoded without adding any, so that a BOS of the
    template is not doubled by one of the tokenizer.

    Raises:
        DataError: there is no chat template, or it refuses these messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"the tokenizer of {getattr(tokenizer, 'name_or_path', '') or 'the model'} has no chat template; "
            "put a chat_template.jinja into the model folder."
        )
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise whatever they like; jinja2 need not be imported here
        raise DataError(f"the chat template refuses the messages {list(messages)}: {error}") from error
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
