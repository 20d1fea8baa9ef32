"""The conversation of one episode, as messages and as the ids that the policy sees.

What was sampled stays as it is: a turn's prompt is the previous prompt, the sampled ids and the ids of the reply alone,
as the chat template renders it. Where the template's own rendering of the whole conversation says something else about
the past (templates of reasoning models leave earlier thoughts out), the next prompt is that rendering, and the episode
*forks*: ``training_sequences`` sees that the prompt does not continue what came before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from forge_async.errors import DataError
from forge_async.rollout.rendering import encode, render_prompt, render_text
from forge_async.types import Completion, IdArray, Message, Prompt

STAND_IN = "\u27e6completion\u27e7"
"""Rendered in the place of a completion, to find out what the template puts after one."""


class Conversation:
    """Grows turn by turn.

    Args:
        prompt: its ids are taken as they are unless ``opening`` or ``tools`` change them.
        opening: messages of the environment that follow the prompt's own.
        tools: JSON schemas for the template.
    """

    def __init__(
        self, tokenizer: Any, prompt: Prompt, opening: Sequence[Message] = (), tools: Sequence[dict[str, Any]] = ()
    ) -> None:
        self.tokenizer, self.tools = tokenizer, list(tools)
        self.messages: list[Message] = _joined(prompt.messages, opening)
        self.prompt_ids: IdArray = prompt.token_ids
        """int32 [P]: what the next completion continues."""
        if opening or tools:
            self.prompt_ids = render_prompt(tokenizer, self.messages, self.tools)
        self._text: str | None = None
        """The prompt as text; None: not rendered yet, as most episodes have one turn."""

    def completed(self, completion: Completion, reply: Sequence[Message], last: bool = False) -> None:
        """Take a completion with the environment's answer, and make the next prompt unless it was the last one."""
        text = str(self.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True))
        before = list(self.messages)
        self.messages += [{"role": "assistant", "content": text}, *(dict(message) for message in reply)]
        if last:
            return
        if self._text is None:
            self._text = self._render(before)
        answered = self.messages[len(before) + 1 :]
        # What stands after a completion does not depend on it: closing tokens, the reply, the next generation prompt.
        stand_in = self._render([*before, {"role": "assistant", "content": STAND_IN}, *answered])
        _, found, tail = stand_in.rpartition(STAND_IN)
        whole = self._render(self.messages)
        joined = self._text + text + tail
        if found and _same(whole, joined):
            rest = self._after_the_end(tail) if completion.token_ids[-1] in self.tokenizer.all_special_ids else tail
            self.prompt_ids = np.concatenate(
                [completion.prompt_token_ids, completion.token_ids, encode(self.tokenizer, rest)], dtype=np.int32
            )
            self._text = joined
        else:
            self.prompt_ids, self._text = encode(self.tokenizer, whole), whole

    def _after_the_end(self, tail: str) -> str:
        """``tail`` without the end token that it begins with, as the model has sampled its own."""
        bare = tail.lstrip()
        for token in self.tokenizer.all_special_tokens:
            if bare.startswith(token):
                return bare[len(token) :]
        return tail

    def _render(self, messages: Sequence[Message]) -> str:
        return render_text(self.tokenizer, messages, self.tools)


def _joined(first: Sequence[Message], more: Sequence[Message]) -> list[Message]:
    """One conversation of two; where they meet, messages of one role become one, as many templates want roles to take
    turns."""
    if first and more and first[-1]["role"] == more[0]["role"]:
        middle = {**first[-1], "content": f"{first[-1]['content']}\n\n{more[0]['content']}"}
        return [*first[:-1], middle, *more[1:]]
    return [*first, *more]


def check_messages(messages: Any, episode_id: str) -> tuple[Message, ...]:
    """What an environment gave, if it is messages.

    Raises:
        DataError: it is something else; the message names the episode.
    """
    if isinstance(messages, str | dict) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages
    ):
        raise DataError(
            f"episode {episode_id}: the environment answered {messages!r:.200}; "
            "messages with role and content, both text, are needed."
        )
    return tuple(dict(message) for message in messages)


def _same(one: str, other: str) -> bool:
    """Equal but for white space, which templates trim around a message."""
    return "".join(one.split()) == "".join(other.split())
