"""Environments: what happens after a completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from forge_async.types import IdArray, Prompt, Turn


class Environment(Protocol):
    """What a rollout talks to. One instance serves all episodes at once, so it keeps no state of an episode itself."""

    def decode(self, token_ids: IdArray) -> str:
        """The text of a completion, as reward functions see it."""
        ...

    async def reply(self, prompt: Prompt, turns: Sequence[Turn], text: str) -> tuple[dict[str, str], ...]:
        """The messages that answer the completion ``text``; empty when the episode has ended.

        Args:
            turns: the episode's earlier turns.
        """
        ...


class SingleTurnEnvironment:
    """One completion is the whole episode.

    Args:
        tokenizer: a Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def decode(self, token_ids: IdArray) -> str:
        """Text without special tokens. It is for people and rewards only: what is trained are the ids themselves."""
        return str(self.tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=True))

    async def reply(self, prompt: Prompt, turns: Sequence[Turn], text: str) -> tuple[dict[str, str], ...]:
        return ()
