"""Environments behind an OpenEnv server as ours: each completion is an action, each observation a user message.

Every session has a connection of its own, which is an instance of the environment on the server: that one must be
started with as many concurrent environments as there are episodes at once (``max_concurrent_envs``).
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openenv.core import GenericEnvClient

from forge_async.errors import DataError
from forge_async.rollout.datasets import Row
from forge_async.rollout.environment import Environment, Session
from forge_async.types import Completion, Message, Prompt

INSTRUCTIONS = "You act in an environment. Each of your messages is one action; each answer is what you observe."
CONNECTIONS = 512
"""Most calls of a blocking client that wait at once."""


class OpenEnvEnvironment(Environment):
    """Args:
    url: of the server, such as ``http://127.0.0.1:8000``.
    action_field: field of the action that a completion's text becomes; "": a completion is the action, as JSON.
    observation_field: field of the observation that the model is shown; "": all of it, as JSON.
    instructions: the prompt, where the prompts are the environment's own (``dataset.kind: environment``): one per
        seed, for which the server is asked to reset.
    reset: more arguments of ``reset``.
    reset_columns: columns of the dataset that are arguments of ``reset``, too.
    """

    def __init__(
        self,
        tokenizer: Any,
        url: str,
        action_field: str = "",
        observation_field: str = "",
        instructions: str = INSTRUCTIONS,
        reset: dict[str, Any] | None = None,
        reset_columns: tuple[str, ...] | list[str] = ("seed",),
    ) -> None:
        super().__init__(tokenizer)
        self.url, self.action_field, self.observation_field = url, action_field, observation_field
        self.instructions, self.reset, self.reset_columns = instructions, reset or {}, tuple(reset_columns)
        self._threads = ThreadPoolExecutor(CONNECTIONS, "openenv")

    def session(self, prompt: Prompt, episode_id: str) -> OpenEnvSession:
        return OpenEnvSession(prompt, self)

    def rows(self, size: int) -> list[Row]:
        return [Row(self.instructions, None, {"seed": seed, "task": self.url}) for seed in range(size or 1)]

    async def call(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """The client's methods block in openenv-core 0.2 and are coroutines from 0.3 on."""
        if inspect.iscoroutinefunction(function):
            return await function(*args, **named)
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **named))

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class OpenEnvSession(Session):
    """One connection to the server, from ``reset`` to the last ``step``."""

    def __init__(self, prompt: Prompt, environment: OpenEnvEnvironment) -> None:
        super().__init__(prompt)
        self.environment = environment
        self.total = 0.0
        """Sum of the steps' rewards."""
        self._client: Any = None

    async def start(self) -> list[Message]:
        environment, columns = self.environment, self.prompt.metadata
        given = {name: columns[name] for name in environment.reset_columns if name in columns}
        self._client = GenericEnvClient(base_url=environment.url)
        await environment.call(self._client.connect)
        result = await environment.call(self._client.reset, **{**environment.reset, **given})
        if result.done:
            raise DataError(f"prompt {self.prompt.prompt_id}: the OpenEnv environment was done after its reset.")
        return [self._message(result.observation)]

    async def reply(self, text: str, completion: Completion) -> list[Message]:
        action: Any = {self.environment.action_field: text}
        if not self.environment.action_field:
            action = _json_of(text)
            if not isinstance(action, dict):
                return [{"role": "user", "content": "That is no action: a JSON object is needed, and nothing else."}]
        result = await self.environment.call(self._client.step, action)
        self.total += float(result.reward or 0.0)
        return [] if result.done else [self._message(result.observation)]

    async def rewards(self) -> dict[str, float]:
        return {"openenv_reward": self.total}

    async def close(self) -> None:
        if self._client is not None:
            await self.environment.call(self._client.close)

    def _message(self, observation: dict[str, Any]) -> Message:
        field = self.environment.observation_field
        if field and field not in observation:
            raise DataError(
                f"the observation has no field {field!r} (observation_field); it has {', '.join(observation)}."
            )
        shown = observation[field] if field else observation
        return {"role": "user", "content": shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)}


def _json_of(text: str) -> Any:
    """A completion as JSON, in a code fence or not; None where it is none."""
    bare = text.strip()
    if bare.startswith("```") and bare.endswith("```"):
        bare = "\n".join(bare.splitlines()[1:-1])
    try:
        return json.loads(bare)
    except ValueError:
        return None
