"""``forge-async``: every command, its help, its errors and exit codes. What needs engines is in tests/integration."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from forge_async import cli
from forge_async.config import Config, to_yaml
from forge_async.errors import ForgeError
from forge_async.observability import Summary
from forge_async.observability.seen import of_file
from forge_async.policy.turns import Diverged
from forge_async.run.checkpoints import mark_exported
from forge_async.run.controls import Answer
from forge_async.types import Completion

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_TORCH = (
    "import sys; from forge_async import cli; code = cli.main(sys.argv[1:]); "
    "sys.exit(99 if 'torch' in sys.modules else code)"
)
"""A command whose exit code is 99 where it has imported torch."""
COMMANDS = ("run", "doctor", "sft", "replay", "generate", "episodes", "compare", "export", "dashboard", "trace")


def invoke(*arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    result = CliRunner().invoke(cli.app, [str(word) for word in arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def make_run(folder: Path, rewards: list[float], ended: bool = True) -> Path:
    """A run's folder as a run leaves it."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(Config(name=folder.name)))
    lines = [{"step": i, "reward": r, "train/loss": -r, "train/ratio_mean": 1.0} for i, r in enumerate(rewards, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    episode = {
        **{
            "prompt_id": "0-1",
            "reward": 0.5,
            "reward_parts": {},
            "group_reward_mean": 0.5,
            "answer": "7",
            "metadata": {},
        },
        "prompt": [{"role": "user", "content": "3+4="}],
        "turns": [{"completion": "seven", "tokens": 3, "finish_reason": "stop", "versions": [[1, 2], [2, 1]]}],
    }
    records = [{"step": step, "episode_id": f"0-1.{step}", **episode} for step in range(1, len(rewards) + 1)]
    (folder / "episodes.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"cut off')
    if ended:
        Summary(steps=len(rewards), wall_s=2.5, rewards=rewards, trained_tokens=77).write(folder / "summary.json")
    return folder


def test_help_names_every_command_and_each_commands_help_has_examples_that_exist() -> None:
    code, out, _ = invoke("--help")
    assert code == 0 and all(re.search(rf"\b{name}\b", out) for name in COMMANDS)
    assert set(COMMANDS) == {command.name or command.callback.__name__ for command in cli.app.registered_commands}  # type: ignore[union-attr]
    for name in COMMANDS:
        code, out, _ = invoke(name, "--help")
        assert code == 0 and f"forge-async {name} " in out and "Example" in out


def test_wrong_usage_says_what_is_missing_or_meant() -> None:
    assert invoke()[0] == 2
    code, _, err = invoke("run")
    assert code == 2 and "Missing argument 'CONFIG'" in err
    code, _, err = invoke("epsodes", "x")
    assert code == 2 and "Did you mean 'episodes'" in err


def test_a_setting_that_does_not_exist_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    for command in ("run", "doctor", "sft"):
        code, out, err = invoke(
            command, "configs/sft_tiny.yaml" if command == "sft" else "configs/grpo_tiny.yaml", "seeed=1"
        )
        assert (code, out) == (1, "") and err.startswith("error: seeed = 1") and "Did you mean seed?" in err
        assert err.count("\n") == 1


def test_what_is_wrong_with_a_setting_or_a_name_is_told_before_an_engine_is_imported(tmp_path: Path) -> None:
    rewards = "forge_async.rollout.rewards:exact_match"
    for command, setting, error, words in (
        ("run", "no.such=1", "no.such = 1", "must be a known setting"),
        ("run", "reward.functions=[my_tsk:f]", "reward.functions[0] = 'my_tsk:f'", "There is no my_tsk in "),
        ("doctor", f"reward.functions=[{rewards[:-2]}]", "reward.functions[0] = ", f"Did you mean {rewards}?"),
        ("run", "rollout.environment=my_task:World", "rollout.environment = 'my_task:World'", "There is no my_task in"),
    ):
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        words_given = [command, str(ROOT / "configs/grpo_tiny.yaml"), setting]
        result = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, *words_given],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 1 and result.stderr.startswith(f"error: {error}")
        assert words in result.stderr and result.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_print_config_prints_the_resolved_one(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("steps: 3\n")
    for command, words in (("run", "rollout:"), ("doctor", "rollout:"), ("sft", "eval_every:")):
        code, out, _ = invoke(command, tmp_path / "a.yaml", "--print-config", "seed=9")
        assert code == 0 and "steps: 3" in out and "seed: 9" in out and words in out


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ForgeError("no such luck"), 1, "error: no such luck\n"),
        (Diverged("turn 3"), 3, "differs: turn 3\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (
            ZeroDivisionError("by hand"),
            1,
            "error: ZeroDivisionError: by hand. With --debug this shows where it happened.\n",
        ),
    ],
)
def test_what_ends_a_command_is_a_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: str
) -> None:
    async def fail(config: Any) -> None:
        raise error

    monkeypatch.setattr(cli, "train", fail)
    assert invoke("run", "configs/grpo_tiny.yaml") == (code, "", words)


@pytest.mark.parametrize("place", ["before", "after"])
def test_with_debug_the_exception_comes_through(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    async def fail(config: Any) -> None:
        raise ForgeError("no such luck")

    monkeypatch.setattr(cli, "train", fail)
    words = ["run", "configs/grpo_tiny.yaml"]
    result = CliRunner().invoke(cli.app, ["--debug", *words] if place == "before" else [*words, "--debug"])
    assert isinstance(result.exception, ForgeError)


def test_main_returns_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "nowhere.yaml"]) == 1
    assert "nowhere.yaml" in capsys.readouterr().err
    assert cli.main(["--help"]) == 0


def test_completion_of_the_shell_can_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(cli.app, ["--show-completion", "bash"], prog_name="forge-async")
    assert "_FORGE_ASYNC_COMPLETE=complete_bash" in result.stdout
    environ = {"_FORGE_ASYNC_COMPLETE": "complete_bash", "COMP_WORDS": "forge-async ep", "COMP_CWORD": "1"}
    result = CliRunner().invoke(cli.app, [], prog_name="forge-async", env=environ)
    assert result.stdout.split() == ["episodes"]


def test_replay_of_what_was_not_recorded(tmp_path: Path) -> None:
    code, _, err = invoke("replay", make_run(tmp_path / "a", [0.5]), "--steps", "1")
    assert code == 1 and "schedule/loop.jsonl" in err


def test_episodes_shows_the_last_ones(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", [0.1] * 12)
    code, out, _ = invoke("episodes", run, "--last", "2")
    assert code == 0 and "episodes (2)" in out and "0-1.11" in out and "0-1.12" in out and "0-1.10" not in out
    assert all(words in out for words in ("3+4=", "seven", "1-2", "stop"))
    assert "0-1.3" in invoke("episodes", run, "--step", "3")[1]
    code, _, err = invoke("episodes", run, "--step", "99")
    assert code == 1 and "no episode of step 99" in err
    assert len(of_file(run / "episodes.jsonl")) == 12, "a line that is cut off is left out"


def test_a_folder_that_is_no_run_names_those_that_are(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [0.5])
    for command in ("episodes", "compare", "export"):
        code, _, err = invoke(command, tmp_path / "b")
        assert code == 1 and "must be a run's folder" in err and str(tmp_path / "a") in err


def test_compare_shows_curves_and_final_figures_side_by_side(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "one", [0.1, 0.2, 0.75]), make_run(tmp_path / "two", [0.4] * 8, ended=False)
    code, out, _ = invoke("compare", one, two, "--picture", tmp_path / "curves.png")
    assert code == 0
    reward = next(line.split() for line in out.splitlines() if line.startswith("reward "))
    assert reward == ["reward", "one", "3", "0.1", "▁▂█", "0.75"]
    figures = {
        line.split()[0]: line.split()[1:] for line in out.partition("final figures")[2].splitlines() if line.strip()
    }
    assert figures["steps"] == ["3", "8*"] and figures["tokens/trained"] == ["77", "-"]
    assert figures["reward/first5"] == ["0.35", "0.4*"] and figures["wall_s"] == ["2.5", "-"]
    assert "* The run has not ended" in out and "has not ended" not in invoke("compare", one)[1]
    assert out.splitlines()[-1] == str(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    code, _, err = invoke("compare", one, "--picture", tmp_path / "curves.nothing")
    assert code == 1 and "--picture" in err


def test_compare_of_a_series_without_a_number(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", [0.5, 0.25], ended=False)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"train/loss": "nan", "staleness_max": None}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, err = invoke("compare", run)
    assert code == 0, err
    curves = out.partition("final figures")[0]
    assert "train/ratio_mean" in curves and "train/loss" not in curves


def test_compare_of_runs_of_one_name_and_of_one_that_logged_nothing(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / where / "same", [0.5, 0.6]) for where in ("a", "b")]
    assert str(runs[1]) in invoke("compare", *runs)[1]
    assert invoke("compare", runs[0], runs[0])[1] == invoke("compare", runs[0])[1], "a run beside itself is one run"
    code, _, err = invoke("compare", runs[0], make_run(tmp_path / "empty", []))
    assert code == 1 and "a run that has logged a step" in err


def test_export_of_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    code, _, err = invoke("export", make_run(tmp_path / "a", [0.5]), "--version", "1")
    assert code == 1 and "--version = 1" in err and "the run saved no checkpoint" in err


def test_export_of_a_version_that_is_not_there_does_not_wait_for_the_engines(tmp_path: Path) -> None:
    words = ["export", make_run(tmp_path / "a", [0.5]), "--version", "7"]
    result = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *words], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (
        1,
        "error: --version = 7: must be one of the run's checkpoints (none: the run saved no checkpoint).\n",
    )


@pytest.mark.parametrize("steps", ["0", "-3"])
def test_a_replay_of_no_step_names_option_value_and_what_is_allowed(tmp_path: Path, steps: str) -> None:
    code, _, err = invoke("replay", make_run(tmp_path / "a", [0.5]), "--steps", steps)
    assert (code, err) == (
        1,
        f"error: --steps = {steps}: must be 1 or more. Without it every step is repeated.\n",
    )


def test_generate_asks_the_newest_weights_of_a_run(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine itself is a fake here; apps/examples/generate.py asks a real one."""
    from forge_async.commands import generate

    asked: dict[str, Any] = {}

    class Service:
        async def fan_out(self, name: str) -> list[None]:
            return [None]

        async def call(self, name: str, ids: np.ndarray, sampling: Any, *args: Any, session: str) -> Completion:
            asked["sampling"], asked["ids"] = sampling, ids
            tokens = np.array([40, 41], np.int32)
            zeros = np.zeros(2, np.int32)
            return Completion(ids, tokens, np.zeros(2, np.float32), zeros, zeros, "stop")

    class Actor:
        @staticmethod
        def options(**options: Any) -> type:
            return Actor

        @staticmethod
        async def as_service(config: Any, model: Path, version: int, num_replicas: int) -> Service:
            asked["config"], asked["model"], asked["version"] = config, model, version
            return Service()

    monkeypatch.setattr(generate, "PolicyActor", Actor)
    run = make_run(tmp_path / "a", [0.5])
    shutil.copytree(tiny_llama, run / "model")

    def save(version: int) -> None:
        (run / f"checkpoints/version-0000{version:02d}").mkdir(parents=True)
        (run / f"checkpoints/version-0000{version:02d}/forge.json").write_text("{}")

    save(4)
    mark_exported(run / "model", 12)
    code, out, err = invoke(
        "generate", run, "101", "-n", "2", "policy.sampling.temperature=0.5", "policy.num_replicas=3"
    )
    assert code == 0, err
    assert "completions (2)" in out
    assert asked["model"] == run / "model" and asked["sampling"].temperature == 0.5
    assert asked["config"].num_replicas == 1 and asked["version"] == 12

    def export(folder: Any, config: Any, version: int | None, target: Path) -> None:
        asked["exported"] = version
        shutil.copytree(tiny_llama, target)

    with monkeypatch.context() as patched:
        patched.setattr(generate, "export", export)
        save(12)
        assert invoke("generate", run, "101")[0] == 0 and asked["model"] == run / "model"
        save(13)  # of a leg that was resumed and has not ended
        assert invoke("generate", run, "101")[0] == 0
    assert asked["model"] != run / "model" and (asked["exported"], asked["version"]) == (None, 13)
    assert invoke("generate", tiny_llama, "101")[0] == 0 and asked["model"] == tiny_llama
    assert invoke("generate", tiny_llama, "101", "policy.sampling.temperature=0")[0] == 0
    assert asked["sampling"].temperature == 0, "an answer may be greedy where training may not"
    code, _, err = invoke("generate", run, "101", "policy.sampling.temperature=warm")
    assert code == 1 and err.startswith("error: policy.sampling.temperature = 'warm': must be a number")
    code, _, err = invoke("generate", tmp_path / "none", "101")
    assert code == 1 and "is neither a run's folder" in err
    code, _, err = invoke("generate", make_run(tmp_path / "b", [0.5]), "101")
    assert code == 1 and "saved no checkpoint" in err


def test_an_answer_shows_itself() -> None:
    ids, versions = np.array([1, 2, 3], np.int32), np.array([4, 4, 5], np.int32)
    answer = Answer("abc", Completion(ids, ids, np.array([-1, -2, -3], np.float32), versions, versions, "length"))
    assert answer.cells() == ("abc", 3, -6.0, [4, 5], "length")
    assert answer.token_ids is ids and answer.policy_versions is versions
