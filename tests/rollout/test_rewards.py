from __future__ import annotations

import asyncio
import sys

import numpy as np
import pytest

from forge_async.errors import ConfigError
from forge_async.rollout import rewards
from forge_async.rollout.config import RewardConfig
from forge_async.rollout.rewards import RewardFailure, load_functions, score_completion, weighted_sum
from forge_async.types import Prompt

BUILT_IN = "forge_async.rollout.rewards:"


def prompt(answer: object = "7", **metadata: object) -> Prompt:
    return Prompt("0-0", (), np.zeros(1, np.int32), answer, metadata)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        ("The answer is 7.", 7),
        ("3 + 4 = 7", 7),
        ("8-3", 3),
        ("3 - -5", -5),
        ("so: -5", -5),
        ("\N{MINUS SIGN}5", -5),
        ("7.0", 7),
        ("1,024 apples", 1024),
        ("1,2", 2),
        ("first 7, then 8!", 8),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(text, number):
    assert rewards.last_number(text) == number


@pytest.mark.parametrize(
    ("text", "right", "integer"),
    [
        ("7", 1, 1),
        (" 7\n", 1, 1),
        ("8", 0, 1),
        ("It is 7.", 1, 0),
        ("7 apples", 1, 0),
        ("-7", 0, 1),
        ("seven", 0, 0),
        ("", 0, 0),
        ("7.0", 1, 0),
    ],
)
def test_the_chain_sum_reward(text, right, integer):
    """0.7 for the right last number and 0.3 for an integer and nothing else, logged apart."""
    config = RewardConfig(functions=[BUILT_IN + "exact_integer", BUILT_IN + "integer_format"], weights=[0.7, 0.3])
    functions = load_functions(config.specs)
    values = score_completion(config.specs, functions, prompt("7"), text)
    assert values == {"exact_integer": right, "integer_format": integer}
    assert weighted_sum(config.specs, values) == pytest.approx(0.7 * right + 0.3 * integer)


def test_reasoning_gym_score_is_the_tasks_own():
    import reasoning_gym

    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
    scored = prompt(entry["answer"], dataset="chain_sum", entry=entry)
    assert rewards.reasoning_gym_score(scored, f" {entry['answer']}\n") == 1.0
    assert rewards.reasoning_gym_score(scored, "no idea") < 0.1


def test_brevity_and_exact_match():
    assert [rewards.brevity(prompt(), "x" * n) for n in (0, 16, 136, 256, 999)] == [1, 1, 0.5, 0, 0]
    assert [rewards.exact_match(prompt(7), text) for text in (" 7 ", "77")] == [1, 0]


def test_weights_and_names():
    specs = RewardConfig(functions=["a:f", "b:f", "b:g"]).specs
    assert [(spec.name, spec.weight) for spec in specs] == [("a:f", 1), ("b:f", 1), ("g", 1)]
    for config, message in (
        (dict(environment_weight=float("inf")), "environment_weight"),
        (dict(functions=["a:f", "a.f"]), r"functions\[1\] = 'a.f'"),
        (dict(functions=["a:f"], weights=[1.0, 2.0]), "weights"),
        (dict(functions=["a:f"], weights=[float("nan")]), "weights"),
        (dict(timeout_s=0), "timeout_s"),
    ):
        with pytest.raises(ConfigError, match=message):
            RewardConfig(**config)


def test_missing_functions_name_what_was_sought(tmp_path):
    def load(function: str) -> None:
        load_functions(RewardConfig(functions=[function]).specs, str(tmp_path))

    (tmp_path / "zoo_good.py").write_text("def right_answer(prompt, completion):\n    return 1\n")
    (tmp_path / "zoo_needs.py").write_text("import surely_not_there\n")
    (tmp_path / "zoo_syntax.py").write_text("def f(:\n")
    (tmp_path / "zoo_script.py").write_text("import sys\n\ndef f(prompt, completion): ...\n\nsys.exit(3)\n")
    load("zoo_good:right_answer")
    with pytest.raises(ConfigError, match=r"functions\[0\] = 'zoo_missing:f'.*importable module.*Looked in"):
        load("zoo_missing:f")
    with pytest.raises(ConfigError, match=r"a function of .*zoo_good\.py.*It has: right_answer"):
        load("zoo_good:wrong_answer")
    with pytest.raises(ConfigError, match=r"zoo_needs\.py:1 .*surely_not_there"):
        load("zoo_needs:f")
    with pytest.raises(ConfigError, match=r"zoo_syntax\.py:1: SyntaxError"):
        load("zoo_syntax:f")
    with pytest.raises(ConfigError, match=r"zoo_script\.py:5 .*SystemExit: 3"):
        load("zoo_script:f")


def test_a_raising_function_is_named_with_file_line_and_cause(tmp_path):
    (tmp_path / "zoo_raises.py").write_text(
        "def helper():\n    return {}['key']\n\ndef f(prompt, completion):\n    return helper()\n"
    )
    specs = RewardConfig(functions=["zoo_raises:f"]).specs
    failure = score_completion(specs, load_functions(specs, str(tmp_path)), prompt(), "x")
    assert isinstance(failure, RewardFailure) and failure.reason == "raised" and failure.function == "zoo_raises:f"
    assert "reward zoo_raises:f raised at" in failure.message
    assert "zoo_raises.py:2 in helper: KeyError: 'key'" in failure.message
    leaves = score_completion(specs, [lambda prompt, completion: sys.exit("bye")], prompt(), "x")
    assert isinstance(leaves, RewardFailure) and "SystemExit: bye" in leaves.message


class Unspeakable(BaseException):
    """Cannot even be shown."""

    def __str__(self) -> str:
        raise RuntimeError

    __repr__ = __str__


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), Unspeakable(), ValueError("a\n" * 9999)]
)
def test_whatever_a_function_raises_is_its_own_failure_in_one_line(error):
    def raises(prompt, completion):
        raise error

    failure = score_completion(RewardConfig(functions=["a:f"]).specs, [raises], prompt(), "x")
    assert isinstance(failure, RewardFailure) and failure.reason == "raised"
    assert type(error).__name__ in failure.message and "\n" not in failure.message and len(failure.message) < 1000


@pytest.mark.parametrize("values", [(1e200, 0.0), (1e308, 1e308), (-1e16, 1.0)])
def test_rewards_whose_squares_would_overflow_are_failures(values):
    specs = RewardConfig(functions=["a:f", "a:g"]).specs
    functions = [lambda prompt, completion, value=value: value for value in values]
    failure = score_completion(specs, functions, prompt(), "x")
    assert isinstance(failure, RewardFailure) and failure.reason == "invalid"
    assert "add up to" in failure.message and "0-0" in failure.message


@pytest.mark.parametrize(
    "value",
    [None, "text", float("nan"), float("inf"), [1, 2], 10**400, 10**5000, [0] * 10**6, Unspeakable()],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_is_no_finite_number_is_a_failure(value):
    specs = RewardConfig(functions=["a:f"]).specs
    failure = score_completion(specs, [lambda prompt, completion: value], prompt(), "x")
    assert isinstance(failure, RewardFailure) and failure.reason == "invalid"
    assert "a:f returned" in failure.message and "0-0" in failure.message and len(failure.message) < 1000


def test_true_and_numpy_numbers_count():
    specs = RewardConfig(functions=["a:f"]).specs
    for value in (True, 1, np.float32(1), "1"):
        assert score_completion(specs, [lambda prompt, completion, value=value: value], prompt(), "x") == {"f": 1.0}
