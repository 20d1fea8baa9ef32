"""Environments: what happens after a completion.

An :class:`Environment` is made once per run and makes a :class:`Session` per episode. Neither is shared between
processes: their code runs in the controller's event loop, so what blocks belongs into ``asyncio.to_thread``. Its time
counts towards ``rollout.timeout_s``.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from forge_async.errors import ConfigError
from forge_async.rollout.config import DatasetConfig, RolloutConfig
from forge_async.rollout.names import EXTRAS, install
from forge_async.rollout.rewards import where_raised
from forge_async.types import Completion, IdArray, Message, Prompt

if TYPE_CHECKING:
    from forge_async.rollout.datasets import Row


class Session:
    """One episode's side of the conversation; this one says nothing, so that one completion is the whole episode.

    ``start``, then ``reply`` once per completion, then ``rewards`` where the episode was finished. ``close`` comes last
    on every way out: finished, timed out, cancelled, failed, even in ``start``.
    """

    tools: Sequence[dict[str, Any]] = ()
    """JSON schemas of the tools that the chat template tells the model about; set by the end of ``start``."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt

    async def start(self) -> Sequence[Message]:
        """Messages that follow the prompt's own, before the first completion."""
        return ()

    async def reply(self, text: str, completion: Completion) -> Sequence[Message]:
        """The messages (role ``tool`` or ``user``) that answer a completion; none when the episode has ended.

        Args:
            text: as :meth:`Environment.decode` makes it.
            completion: with its ids and finish reason; after ``length`` the episode ends, whatever is answered.
        """
        return ()

    async def rewards(self) -> dict[str, float]:
        """Parts of the reward that the environment itself gives, by name; they are added up."""
        return {}

    async def close(self) -> None:
        """Let go of whatever the session holds. An exception is logged and changes nothing."""


class Environment:
    """Makes the sessions of a run's episodes. Subclass it for one of your own.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        args: ``rollout.environment_args``; this one takes none.
    """

    def __init__(self, tokenizer: Any, **args: Any) -> None:
        if args:
            raise TypeError(f"{type(self).__name__} takes no arguments, it was given {', '.join(args)}")
        self.tokenizer = tokenizer

    def session(self, prompt: Prompt, episode_id: str) -> Session:
        """A new episode of ``prompt``. Must not block: what takes time belongs into ``Session.start``."""
        return Session(prompt)

    def decode(self, token_ids: IdArray) -> str:
        """Text without special tokens. It is for people and rewards only: what is trained are the ids themselves."""
        return str(self.tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=True))

    def rows(self, size: int) -> Sequence[Row]:
        """The prompts that come with the environment (``dataset.kind: environment``), at most ``size``; 0: all."""
        raise ConfigError(
            "kind", "environment", "reasoning_gym, jsonl or hf", f"{type(self).__name__} has no prompts of its own."
        )

    async def close(self) -> None:
        """Called at the end of the run, after the last session's."""


def own_rows(environment: Environment, config: DatasetConfig) -> Sequence[Row] | None:
    """The environment's prompts where ``dataset.kind`` asks for them, else None."""
    return environment.rows(config.size) if config.kind == "environment" else None


EnvironmentMaker = Callable[[Any], Environment]
"""Makes the environment of the tokenizer."""


def environment_maker(config: RolloutConfig) -> EnvironmentMaker:
    """What ``rollout.environment`` names, with ``rollout.environment_args``.

    Raises:
        ConfigError: (by the maker) it cannot be imported, or refuses its arguments.
    """

    def make(tokenizer: Any) -> Environment:
        kind, _, name = config.environment.partition(":")
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            if not config.environment:
                return Environment(tokenizer, **config.environment_args)
            if kind == "openenv":
                from forge_async.rollout.openenv_environment import OpenEnvEnvironment

                return OpenEnvEnvironment(tokenizer, name, **config.environment_args)
            if kind == "verifiers":
                from forge_async.rollout.verifiers_environment import VerifiersEnvironment

                return VerifiersEnvironment(tokenizer, name, **config.environment_args)
            made = getattr(importlib.import_module(kind), name)(tokenizer, **config.environment_args)
        except ConfigError:
            raise
        except ModuleNotFoundError as error:
            remedy = f"{error}. "
            if kind in EXTRAS:
                remedy += install(kind)
            raise ConfigError("environment", config.environment, "an environment that is installed", remedy) from error
        except (Exception, SystemExit) as error:  # user code may fail in any way
            allowed = f"an environment that can be made with environment_args {config.environment_args}"
            raise ConfigError("environment", config.environment, allowed, where_raised(error)) from error
        if not isinstance(made, Environment):
            allowed = "a subclass of forge_async.rollout.environment.Environment"
            raise ConfigError("environment", config.environment, allowed, f"It is a {type(made).__name__}.")
        return made

    return make
