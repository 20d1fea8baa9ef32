"""The docs are true: links lead somewhere, commands and configs load, code blocks run, settings exist."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

import forge_async
from forge_async import cli, model_zoo
from forge_async.buffer import RolloutBuffer
from forge_async.config import Config, SFTConfig, _valid_keys, load_config
from forge_async.observability import Summary
from forge_async.observability.frames import RunMetrics
from forge_async.store import WeightStore

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str


def blocks() -> Iterator[Block]:
    for page in PAGES:
        for match in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", page.read_text(), re.M | re.S):
            text = "".join(line.removeprefix(match[1]) for line in match[3].splitlines(keepends=True))
            yield Block(page.name, match[2], text)


BLOCKS = list(blocks())


def commands(*languages: str) -> list[list[str]]:
    """The commands in blocks of these languages, in words."""
    lines = [line for block in BLOCKS if block.language in languages for line in block.text.splitlines()]
    found = [shlex.split(line, comments=True) for line in lines if line.startswith(("make", "python", "tensorboard"))]
    assert found
    return found


def test_links_lead_somewhere() -> None:
    missing = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith("http") and not (page.parent / target).exists():
                missing.append(f"{page.name}: {target}")
    assert missing == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    assert [page.name for page in PAGES[1:] if page.name != "README.md" and f"({page.name})" not in index] == []


def test_every_command_would_do_something() -> None:
    """Shells with code of our own are started; what trains for minutes is checked up to its config."""
    for words in commands("bash"):
        if words[0] == "make":
            make = shutil.which("make")
            if make is not None:
                environ = {"PATH": os.environ["PATH"]}
                subprocess.run([make, "-n", *words[1:]], cwd=ROOT, env=environ, check=True, capture_output=True)
        elif words[0] == "tensorboard":
            assert (Path(sys.executable).parent / "tensorboard").exists()
        elif words[1] != "-m":
            assert words[1:4] == ["apps/grpo_main.py", "--config", "configs/grpo_tiny.yaml"], words
            overrides = [word for word in words[4:] if not word.startswith("--")]
            load_config(ROOT / words[3], overrides)


def test_the_model_zoo_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (words,) = [words for words in commands("bash") if words[:3] == ["python", "-m", "forge_async.model_zoo"]]
    assert model_zoo.main(words[3:]) == 0
    assert (tmp_path / words[4] / "config.json").exists()


def test_the_replay_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are understood, up to the run that is not there."""
    monkeypatch.chdir(tmp_path)
    lines = [line for block in BLOCKS for line in block.text.splitlines() if line.startswith("forge-async replay ")]
    assert len(lines) >= 2
    for line in lines:
        assert cli.main(shlex.split(line)[1:]) == 1
        assert "must be a run's folder" in capsys.readouterr().err


def shown(command: str) -> list[list[str]]:
    """The words of every ``forge-async`` line, after its name, whatever the block."""
    lines = [line for block in BLOCKS for line in block.text.splitlines() if line.startswith(command)]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def test_every_forge_async_command_is_understood_and_its_settings_exist() -> None:
    """Up to what it would do; tests/test_cli.py and tests/integration do it."""
    group = typer.main.get_command(cli.app)
    lines = shown("forge-async ")
    assert {words[0] for words in lines} >= {
        "run",
        "doctor",
        "sft",
        "replay",
        "generate",
        "episodes",
        "compare",
        "dashboard",
        "trace",
    }
    for words in lines:
        if words == ["--install-completion"]:
            continue
        command = group.commands[words[0]]  # type: ignore[attr-defined]
        parsed = command.make_context(words[0], list(words[1:])).params
        schema = SFTConfig if words[0] == "sft" else Config
        load_config(ROOT / parsed["config"] if "config" in parsed else None, parsed.get("overrides"), schema)


def test_what_the_pages_say_of_the_handle_exists() -> None:
    """``run.x.y(...)`` in the pages, notebooks apart, which run."""
    handle = forge_async.launch(Config())
    missing = []
    for page in PAGES:
        for name in re.findall(r"\brun((?:\.[a-z_]+)+)\(", page.read_text()):
            owners = {".buffer": RolloutBuffer, ".metrics": RunMetrics, ".weights": WeightStore}
            first, _, rest = name[1:].partition(".")
            owner = owners.get(f".{first}") or (getattr(handle, first, None) if rest else handle)
            if not hasattr(owner, rest or first):
                missing.append(f"{page.name}: run{name}")
    assert missing == []


def test_scripts_that_are_only_shown_exist() -> None:
    for words in commands("text"):
        if words[0] == "python":
            assert (ROOT / words[1]).exists(), words


def test_print_config_prints_what_can_be_loaded(tmp_path: Path) -> None:
    command = [sys.executable, "apps/grpo_main.py", "--config", "configs/grpo_tiny.yaml", "--print-config", "seed=7"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environ, check=True, stdout=subprocess.PIPE, text=True)
    (tmp_path / "printed.yaml").write_text(result.stdout)
    assert load_config(tmp_path / "printed.yaml") == load_config(ROOT / "configs/grpo_tiny.yaml", ["seed=7"])


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml"], ids=lambda b: b.page)
def test_configs_load(block: Block, tmp_path: Path) -> None:
    (tmp_path / "shown.yaml").write_text(block.text)
    load_config(tmp_path / "shown.yaml")


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=lambda b: b.page)
def test_code_compiles(block: Block) -> None:
    compile(block.text, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def run_page(name: str) -> dict:
    namespace: dict = {}
    for block in BLOCKS:
        if (
            block.page == name
            and block.language == "python"
            and "await" not in block.text
            and "run.log" not in block.text
        ):
            exec(compile(block.text, name, "exec"), namespace)
    return namespace


def test_the_tutorial_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("writing-your-own-task.md")
    rows = (tmp_path / "backwards.jsonl").read_text().splitlines()
    assert len(rows) == 200
    assert '"answer": "' in rows[0]
    exact, close = map(float, capsys.readouterr().out.split())
    assert exact == 1.0
    assert close == pytest.approx(2 / 3)  # "tca" has two of three letters of "tac" in order


def test_the_readme_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    reward = run_page("README.md")["right_answer"]
    prompt = SimpleNamespace(answer="7")
    assert [reward(prompt, text) for text in ("3+4 is 7", "8", "no", "")] == [1.0, 0.1, 0.0, 0.0]


def test_the_other_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    run_page("configuration.md")
    run_page("observability.md")
    assert (tmp_path / "my_run/metrics.jsonl").exists()


def test_every_setting_that_is_named_exists() -> None:
    keys = {*_valid_keys(Config), *_valid_keys(SFTConfig)}
    summary = Summary(steps=0, wall_s=0, rewards=[]).to_dict()
    known = keys | {
        f"{outer}.{inner}" for outer, value in summary.items() if isinstance(value, dict) for inner in value
    }
    roots = {key.split(".")[0] for key in known}
    unknown = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for name in re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?:[=:][^`]*)?`", text):
            if (
                name.split(".")[0] in roots
                and not name.endswith((".py", ".yaml", ".jsonl", ".json", ".png"))
                and name not in known
            ):
                unknown.append(f"{page.name}: {name}")
    assert unknown == []


def test_summary_keys_are_all_explained() -> None:
    page = (ROOT / "docs/observability.md").read_text()
    summary = Summary(steps=0, wall_s=0, rewards=[]).to_dict()
    for outer, value in summary.items():
        for name in [f"{outer}.{inner}" for inner in value] if isinstance(value, dict) else [outer]:
            assert f"`{name}`" in page, name


def test_the_list_of_settings_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("config_reference", ROOT / "tools/config_reference.py")
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    written = (ROOT / "docs/configuration-reference.md").read_text()
    assert written == reference.page(), "docs/configuration-reference.md is behind the code: run `make docs`"


def test_every_case_names_tests_that_exist() -> None:
    rows = [line for line in (ROOT / "docs/cases.md").read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith("| situation |")]
    named = [re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row) for row in rows]
    assert len(rows) >= 38
    assert [row for row, tests in zip(rows, named, strict=True) if not tests] == []
    defined: dict[str, set[str]] = {}
    for path in {path for tests in named for path, _ in tests}:
        tree = ast.parse((ROOT / path).read_text())
        defined[path] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert [f"{path}::{name}" for tests in named for path, name in tests if name not in defined[path]] == []
