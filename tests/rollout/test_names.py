"""A misspelt reward or environment is told before anything starts, and nothing of the user's is run to find out."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_async.errors import ConfigError
from forge_async.rollout import names
from forge_async.rollout.config import RewardConfig
from forge_async.rollout.names import check_names

TASK = """
raise SystemExit("importing it ends the process")
import math
from difflib import SequenceMatcher as matcher

def exact(prompt, completion): ...
async def slow(prompt, completion): ...
class Judge: ...
close = exact
if math:
    def below(prompt, completion): ...
try:
    from math import floor as rounded
except ImportError:
    rounded = None
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "seen_task.py").write_text(TASK)
    (tmp_path / "seen_pack/inner").mkdir(parents=True)
    (tmp_path / "seen_pack/__init__.py").write_text(TASK)
    (tmp_path / "seen_pack/inner/rewards.py").write_text("from math import *\n")
    (tmp_path / "seen_broken.py").write_text("def exact(:\n")
    return tmp_path


def check(name: str, folder: Path) -> None:
    check_names(RewardConfig(functions=[name]), "", str(folder))


@pytest.mark.parametrize("name", ["exact", "slow", "Judge", "close", "below", "rounded", "matcher", "math"])
def test_what_a_module_defines_is_found_without_running_it(folder: Path, name: str) -> None:
    check(f"seen_task:{name}", folder)


def test_an_environment_is_looked_for_in_the_same_way(folder: Path) -> None:
    rewards = RewardConfig(functions=[])
    for there in ("", "seen_task:Judge", "forge_async.rollout.environment:Environment"):
        check_names(rewards, there, str(folder))
    for name, words in (
        ("seen_tsk:Judge", r"rollout.environment = 'seen_tsk:Judge': .* There is no seen_tsk in "),
        ("seen_task:Jugde", r"rollout.environment = .*: must be a class of .* Did you mean seen_task:Judge\?"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_names(rewards, name, str(folder))


def test_an_environment_whose_extra_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "find_module", lambda name, folder: (False, None))
    with pytest.raises(ConfigError, match=r"pip install 'forge-async\[openenv\]'"):
        check_names(RewardConfig(functions=[]), "openenv:http://localhost:1")


def test_installed_modules_and_what_only_their_import_would_tell_pass(folder: Path) -> None:
    check("forge_async.rollout.rewards:exact_match", folder)
    check("math:floor", folder)  # it has no source
    check("os.path:join", folder)  # there is no such file
    check("seen_pack.inner.rewards:anything", folder)  # it may come with the star


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("seen_tsk:exact", ["functions[0] = 'seen_tsk:exact'", "There is no seen_tsk in "]),
        ("seen_task:exat", ["Did you mean seen_task:exact?"]),
        ("seen_pack:zzzzzz", ["It has: Judge, below, close, exact"]),
        ("seen_pack.outer:exact", ["There is no seen_pack.outer in "]),
        ("seen_task.inner:exact", ["There is no seen_task.inner in "]),
        ("forge_async.rollout.rewards:exact_macth", ["Did you mean forge_async.rollout.rewards:exact_match?"]),
        ("seen_broken:exact", ["seen_broken.py, line 1:"]),
    ],
)
def test_what_is_not_there_is_told_with_what_is(folder: Path, name: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(name, folder)
    assert [word for word in words if word not in str(caught.value)] == []
