"""Environments of the ``verifiers`` package (``load_environment``, releases 0.1.x) as ours.

Such an environment drives the episode itself: its ``rollout`` asks an OpenAI client for completions. Here that client
is the session: a request of the environment ends our ``start`` or ``reply``, and our next completion answers it. So
every stop condition, clean-up and non-standard rollout is the environment's own code, and ids never leave our side.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import verifiers
from openai.types.chat import ChatCompletion

from forge_async.errors import ConfigError, DataError
from forge_async.rollout.datasets import Row
from forge_async.rollout.environment import Environment, Session
from forge_async.types import Completion, Message, Prompt

ToolParser = Callable[[str], tuple[str, list[tuple[str, str]]]]
"""A completion's text -> what is no call, and the calls: name and arguments as JSON text."""

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


def hermes_calls(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Calls as Hermes and Qwen models write them: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. One
    that is not JSON stays text."""
    calls: list[tuple[str, str]] = []

    def take(match: re.Match[str]) -> str:
        try:
            call = json.loads(match[1])
            calls.append((str(call["name"]), json.dumps(call.get("arguments", {}))))
        except (ValueError, KeyError, TypeError, AttributeError):
            return match[0]
        return ""

    return _CALL.sub(take, text).strip() if "<tool_call>" in text else text, calls


class VerifiersEnvironment(Environment):
    """Args:
    name: the environment's id: an installed package, or a module in the working directory, with ``load_environment``.
    tool_parser: ``module:function`` that finds tool calls in text (:data:`ToolParser`).
    args: handed to ``load_environment``.
    """

    def __init__(self, tokenizer: Any, name: str, tool_parser: str = "", **args: Any) -> None:
        super().__init__(tokenizer)
        if not hasattr(verifiers, "load_environment"):
            allowed = "verifiers 0.1.x, which has load_environment"
            raise ConfigError("environment", f"verifiers:{name}", allowed, "pip install 'forge-async[verifiers]'.")
        with _signal_handlers_kept():
            self.env = verifiers.load_environment(name, **args)
        if self.env.message_type != "chat":
            raise ConfigError("environment", f"verifiers:{name}", "an environment of chat messages")
        module, _, function = tool_parser.partition(":")
        self.parse: ToolParser = getattr(importlib.import_module(module), function) if tool_parser else hermes_calls

    def session(self, prompt: Prompt, episode_id: str) -> VerifiersSession:
        return VerifiersSession(prompt, self)

    def rows(self, size: int) -> list[Row]:
        rows = []
        for example in self.env.get_dataset(size or -1):
            columns = dict(example)
            content, answer = columns.pop("prompt"), columns.pop("answer", None)
            rows.append(
                Row(content if isinstance(content, str) else [_plain(each) for each in content], answer, columns)
            )
        return rows


class VerifiersSession(Session):
    """One call of the environment's ``rollout``, held between two of its requests."""

    def __init__(self, prompt: Prompt, environment: VerifiersEnvironment) -> None:
        super().__init__(prompt)
        self.environment = environment
        self._rollout: asyncio.Task[dict[str, Any]] | None = None
        self._requests: asyncio.Queue[tuple[list[Message], asyncio.Future[ChatCompletion]]] = asyncio.Queue()
        self._answer: asyncio.Future[ChatCompletion] | None = None
        self._seen: list[Message] = list(prompt.messages)

    async def start(self) -> list[Message]:
        known = ("example_id", "task", "info")
        given = {name: self.prompt.metadata[name] for name in known if self.prompt.metadata.get(name) is not None}
        example = {
            "example_id": 0,
            "task": "default",
            "answer": "" if self.prompt.answer is None else self.prompt.answer,
        }
        example |= given
        client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=self._create)))
        rollout = self.environment.env.rollout(
            {**example, "prompt": [dict(message) for message in self.prompt.messages]}, client, "policy", {}
        )
        self._rollout = asyncio.ensure_future(rollout)
        opening = await self._until_it_asks(len(self._seen))
        if opening is None:
            raise DataError(f"prompt {self.prompt.prompt_id}: its environment ended before the first completion.")
        return opening

    async def reply(self, text: str, completion: Completion) -> list[Message]:
        assert self._answer is not None
        content, calls = self.environment.parse(text)
        self._answer.set_result(_response(content, calls, completion))
        return await self._until_it_asks(len(self._seen) + 1) or []

    async def rewards(self) -> dict[str, float]:
        """The rubric's reward functions, weighted."""
        assert self._rollout is not None
        if not self._rollout.done() and self._answer is not None:  # a limit of ours: as a provider says it
            words = "maximum context length is reached"
            response = httpx.Response(400, text=words, request=httpx.Request("POST", "http://policy"))
            self._answer.set_exception(openai.BadRequestError(words, response=response, body=None))
        state = await self._rollout
        _raise_error(state)
        rubric = self.environment.env.rubric
        await rubric.score_rollout(state)
        reward, values = float(state["reward"]), state["metrics"] or {}
        weights = dict(_weights(rubric))
        parts = {name: weights[name] * value for name, value in values.items() if weights.get(name)}
        same = math.isclose(sum(parts.values()), reward, rel_tol=1e-6, abs_tol=1e-9)
        return parts if parts and same else {"verifiers_reward": reward}

    async def close(self) -> None:
        if self._rollout is not None:
            self._rollout.cancel()  # it calls the environment's clean-up then
            await asyncio.gather(self._rollout, return_exceptions=True)

    async def _create(self, *, messages: list[Any], tools: Any = None, **_: Any) -> ChatCompletion:
        """What the environment calls as ``client.chat.completions.create``."""
        self.tools = tools or ()
        answer: asyncio.Future[ChatCompletion] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(([_plain(message) for message in messages], answer))
        return await answer

    async def _until_it_asks(self, known: int) -> list[Message] | None:
        """The messages of the next request after the first ``known`` ones; None when the episode has ended."""
        assert self._rollout is not None
        asked = asyncio.ensure_future(self._requests.get())
        try:
            await asyncio.wait({asked, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                self._answer = None
                _raise_error(self._rollout.result())
                return None
            messages, self._answer = asked.result()
        finally:
            asked.cancel()
        if messages[: len(self._seen)] != self._seen:
            raise DataError(
                f"prompt {self.prompt.prompt_id}: its environment rewrote earlier messages, which is not supported."
            )
        self._seen = messages
        return messages[known:]


def _response(content: str, calls: Sequence[tuple[str, str]], completion: Completion) -> ChatCompletion:
    tool_calls = [
        {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(calls)
    ]
    # An answer without any text is refused as a fault of the provider; here it is one that earns nothing.
    message = {"role": "assistant", "content": content or (None if calls else " "), "tool_calls": tool_calls or None}
    reason = "length" if completion.finish_reason == "length" else "tool_calls" if calls else "stop"
    choice = {"index": 0, "finish_reason": reason, "message": message}
    body = {"id": "policy", "object": "chat.completion", "created": int(time.time()), "model": "policy"}
    return ChatCompletion.model_validate({**body, "choices": [choice]})


def _plain(message: Any) -> Message:
    """Role, content as text, and what else is set: datasets fill absent fields with None."""
    fields = {key: value for key, value in dict(message).items() if value is not None}
    content = fields.get("content", "")
    if not isinstance(content, str):
        content = "\n".join(str(part.get("text", "")) for part in content)
    return {**fields, "content": content}


def _raise_error(state: Any) -> None:
    if state.get("error") is not None:
        raise state["error"]


def _weights(rubric: Any) -> Iterator[tuple[str, float]]:
    """Weight by name of a rubric's functions, or of those of a group of rubrics."""
    for inner in getattr(rubric, "rubrics", ()):
        yield from _weights(inner)
    for function, weight in zip(rubric.funcs, rubric.weights, strict=True):
        yield function.__name__, weight


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """An environment takes Ctrl-C and SIGTERM for itself when it is made; a run has handlers of its own."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
