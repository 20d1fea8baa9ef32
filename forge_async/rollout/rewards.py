"""Reward functions: how they are found and called, and those that come with the project.

A reward function is plain Python::

    def right_answer(prompt: Prompt, completion: str) -> float: ...

``prompt.answer`` is the dataset's answer, ``prompt.metadata`` the row's other columns, ``completion`` the text of the
last completion. One that has a parameter ``messages`` (or ``**others``) is given the whole conversation by that name:
chat messages, the prompt's and the environment's included. It runs outside the controller's
process. The numbers below are found in text as people write them: ``-5``, ``1,024``, ``0.5``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge_async.errors import ConfigError
from forge_async.rollout.config import RewardSpec
from forge_async.types import Message, Prompt

RewardFunction = Callable[..., float]

LARGEST_REWARD = 1e15
"""In size: the squares in a deviation must not overflow, nor float32 in the trainer."""


@dataclass(frozen=True)
class RewardFailure:
    """Why an episode could not be scored: takes the place of its values."""

    function: str
    """``module:function``, or ``""`` where no single function is to blame."""
    reason: str
    """``raised``, ``timeout``, ``invalid`` (not a finite number, or a huge one) or ``worker_died``."""
    message: str
    """For people: names function, file, line and cause."""


def load_functions(specs: Sequence[RewardSpec], folder: str | None = None) -> list[RewardFunction]:
    """Import the reward functions; ``folder`` (default: the working directory) is searched after everything installed.

    Raises:
        ConfigError: no such module or function, or the module's import fails.
    """
    folder = folder or os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    functions = []
    for index, spec in enumerate(specs):
        key = f"functions[{index}]"
        module_name, _, name = spec.function.partition(":")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and (module_name + ".").startswith(error.name + "."):
                raise ConfigError(
                    key, spec.function, "module:function with an importable module", f"Looked in {folder}."
                ) from None
            raise ConfigError(key, spec.function, "a module that imports", where_raised(error)) from error
        except (Exception, SystemExit) as error:  # a user's module may fail in any way
            raise ConfigError(key, spec.function, "a module that imports", where_raised(error)) from error
        function = getattr(module, name, None)
        if not callable(function):
            found = [
                key
                for key, value in vars(module).items()
                if callable(value) and getattr(value, "__module__", "") == module_name
            ]
            raise ConfigError(
                key, spec.function, f"a function of {module.__file__}", f"It has: {', '.join(found) or 'none'}."
            )
        functions.append(function)
    return functions


def where_raised(error: BaseException) -> str:
    """``file:line in function: Kind: message`` of the innermost frame, as one line."""
    trace = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in trace if "importlib" not in frame.filename] or list(trace)
    place = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}: " if frames else ""
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}: "
    return f"{place}{type(error).__name__}: {_in_short(error, str)}"


def _in_short(value: object, shown: Callable[[object], str] = repr, length: int = 500) -> str:
    """One line about a user's object, whatever its own ``__repr__`` or ``__str__`` does."""
    try:
        text = " ".join(shown(value).split())
    except Exception as error:
        return f"(a {type(value).__name__}, whose {shown.__name__}() raises {type(error).__name__})"
    return text if len(text) <= length else text[:length] + "..."


def score_completion(
    specs: Sequence[RewardSpec],
    functions: Sequence[RewardFunction],
    prompt: Prompt,
    completion: str,
    messages: Sequence[Message] = (),
) -> dict[str, float] | RewardFailure:
    """Every function's value by name, before weighting; the first that raises or returns no finite number is the
    failure.

    Args:
        messages: the whole conversation, for the functions that take it.
    """
    values: dict[str, float] = {}
    for spec, function in zip(specs, functions, strict=True):
        try:
            more = {"messages": [dict(message) for message in messages]} if _takes_messages(function) else {}
            raw = function(prompt, completion, **more)
        except BaseException as error:  # a user's function may raise anything; it runs in a thread, so Ctrl-C does not
            return RewardFailure(spec.function, "raised", f"reward {spec.function} raised at {where_raised(error)}")
        value = _number(raw)
        if not math.isfinite(value):
            message = (
                f"reward {spec.function} returned {_in_short(raw)} for prompt {prompt.prompt_id}; "
                "a finite number is needed"
            )
            return RewardFailure(spec.function, "invalid", message)
        values[spec.name] = value
    return _huge(values, weighted_sum(specs, values), prompt) or values


def _takes_messages(function: RewardFunction) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # built in, without a signature
        return False
    return "messages" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def with_own_parts(
    specs: Sequence[RewardSpec], values: dict[str, float], own: Mapping[str, object], weight: float, prompt: Prompt
) -> dict[str, float] | RewardFailure:
    """The functions' values with those that the environment gave: finite numbers under names of their own, that add up
    to a reward which is not huge."""
    parts = dict(values)
    for name, raw in own.items():
        value = _number(raw)
        if name in parts or not math.isfinite(value):
            what = "under a name that a reward function has, too" if name in parts else _in_short(raw)
            message = (
                f"the environment's reward {name!r} for prompt {prompt.prompt_id} is {what}; "
                "a finite number under a name of its own is needed"
            )
            return RewardFailure("", "invalid", message)
        parts[name] = value
    if not parts:
        message = f"prompt {prompt.prompt_id} has no reward: reward.functions is empty, and its environment gives none"
        return RewardFailure("", "invalid", message)
    return _huge(parts, total_reward(specs, parts, weight), prompt) or parts


def _huge(parts: dict[str, float], total: float, prompt: Prompt) -> RewardFailure | None:
    if abs(total) <= LARGEST_REWARD:
        return None
    message = f"the rewards {parts} of prompt {prompt.prompt_id} add up to {total:g}, beyond {LARGEST_REWARD:g}"
    return RewardFailure("", "invalid", message)


def total_reward(specs: Sequence[RewardSpec], parts: dict[str, float], environment_weight: float) -> float:
    """The reward of an episode, of all its parts: those that no function gave are the environment's."""
    functions = {spec.name for spec in specs}
    own = sum(value for name, value in parts.items() if name not in functions)
    return weighted_sum(specs, parts) + environment_weight * own


def _number(raw: Any) -> float:
    """NaN for what is no number at all, or a whole one beyond what a float holds."""
    try:
        return float(raw)
    except Exception:
        return math.nan


def weighted_sum(specs: Sequence[RewardSpec], values: dict[str, float]) -> float:
    """What the reward functions add to an episode's reward."""
    return sum(spec.weight * values[spec.name] for spec in specs)


# --- functions that come with the project

_NUMBER = re.compile(r"(?<![\d.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_INTEGER = re.compile(r"\s*-?\d+\s*")


def last_number(text: str) -> float | None:
    """The last number in ``text``; a minus sign that follows a digit is a subtraction, not a sign."""
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return float(found[-1].replace(",", "")) if found else None


def exact_integer(prompt: Prompt, completion: str, **_: object) -> float:
    """1 if the last number of the completion equals the answer, else 0; the words around it do not matter."""
    wanted = last_number(str(prompt.answer))
    if wanted is None:
        raise ValueError(f"the answer {prompt.answer!r} of prompt {prompt.prompt_id} is not a number")
    return float(last_number(completion) == wanted)


def integer_format(prompt: Prompt, completion: str, **_: object) -> float:
    """1 if the completion is an integer and nothing else (white space aside), right or wrong, else 0."""
    return float(_INTEGER.fullmatch(completion) is not None)


def exact_match(prompt: Prompt, completion: str, **_: object) -> float:
    """1 if the completion is the answer, white space around both aside, else 0."""
    return float(completion.strip() == str(prompt.answer).strip())


def reasoning_gym_score(prompt: Prompt, completion: str, **_: object) -> float:
    """The score of the reasoning-gym task that made the prompt, for the completion as a whole."""
    import reasoning_gym

    score = reasoning_gym.get_score_answer_fn(prompt.metadata["dataset"])
    return float(score(completion.strip(), prompt.metadata["entry"]))


def brevity(prompt: Prompt, completion: str, **_: object) -> float:
    """1 for up to 16 characters, falling linearly to 0 at 256."""
    return min(1.0, max(0.0, (256 - len(completion)) / 240))
