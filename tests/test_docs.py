"""The docs are true: links lead somewhere, configs load, code blocks run, settings exist."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import forge_async
from forge_async.buffer import RolloutBuffer
from forge_async.config import Config, SFTConfig, _valid_keys, load_config
from forge_async.observability import Summary
from forge_async.observability.console import StepView, line
from forge_async.observability.frames import RunMetrics
from forge_async.store import WeightStore
from tests.pages import BLOCKS, PAGES, ROOT, Block, functions_of, name_of


def test_links_lead_somewhere() -> None:
    missing = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith("http") and not (page.parent / target).exists():
                missing.append(f"{name_of(page)}: {target}")
    assert missing == []


def test_every_page_is_in_the_index() -> None:
    for index in (ROOT / "docs/index.md", ROOT / "docs/api/index.md"):
        text = index.read_text()
        assert [page.name for page in index.parent.glob("*.md") if page != index and f"({page.name})" not in text] == []


def test_scripts_that_are_named_exist() -> None:
    """``folder/script.py`` in running text, the package's own also without its name."""
    named = {path for page in PAGES for path in re.findall(r"`((?:\w+/)+\w+\.py)(?:::\w+)?`", page.read_text())}
    assert {"forge_async/types.py", "benchmarks/weight_path.py"} <= named
    missing = [path for path in sorted(named) if not any((ROOT / room / path).exists() for room in ("", "forge_async"))]
    assert missing == []


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
                missing.append(f"{name_of(page)}: run{name}")
    assert missing == []


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
                unknown.append(f"{name_of(page)}: {name}")
    assert unknown == []


def test_summary_keys_are_all_explained() -> None:
    page = (ROOT / "docs/observability.md").read_text()
    summary = Summary(steps=0, wall_s=0, rewards=[]).to_dict()
    for outer, value in summary.items():
        for name in [f"{outer}.{inner}" for inner in value] if isinstance(value, dict) else [outer]:
            assert f"`{name}`" in page, name


@pytest.mark.parametrize("tool", ["config_reference", "cli_reference"])
def test_the_lists_of_settings_and_commands_are_up_to_date(tool: str) -> None:
    spec = importlib.util.spec_from_file_location(tool, ROOT / f"tools/{tool}.py")
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    assert reference.PAGE.read_text() == reference.page(), f"{reference.PAGE} is behind the code: run `make reference`"


def test_every_case_names_tests_that_exist() -> None:
    rows = [line for line in (ROOT / "docs/cases.md").read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith("| situation |")]
    named = [re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row) for row in rows]
    assert len(rows) >= 38
    assert [row for row, tests in zip(rows, named, strict=True) if not tests] == []
    missing = [f"{path}::{name}" for tests in named for path, name in tests if name not in functions_of(path)]
    assert missing == []


STEP = re.compile(
    r"step +(\d+)/(\d+)  reward ([\d.]+)  staleness ([\d.]+) max (\d+)  tok/s gen (\d+) train (\d+)"
    r"  buffer (\d+)\+(\d+)  idle trainer (\d+)% gen (\d+)%  ([\d.]+) s"
)


@pytest.mark.parametrize("page", ["observability.md", "first-run.md"])
def test_the_lines_of_the_console_are_what_it_prints(page: str) -> None:
    """Every line shown is one that the code makes: steps by a function, others by the words of their source."""
    (shown,) = [block.text.splitlines() for block in BLOCKS if block.page == page and "tok/s gen" in block.text]
    sources = "".join((ROOT / f"forge_async/{name}.py").read_text() for name in SAYING)
    summary = dict(Summary(steps=6, wall_s=7.0, rewards=[0.2] * 6).lines(Path("runs/grpo_tiny/reward.png")))
    for text in shown:
        label = text.split(" ")[0]
        if found := STEP.fullmatch(text):
            step, total, *figures, idle, other, seconds = [float(w) if "." in w else int(w) for w in found.groups()]
            view = StepView(step, *figures, idle / 100, [other / 100], seconds)  # type: ignore[arg-type]
            assert line(view, int(total)) == text
        elif label in summary:
            assert (
                re.sub(r"[\d.%]+", "0", text).split("dropped:")[0]
                == re.sub(r"[\d.%]+|-(?=$)", "0", f"{label:<11}{summary[label]}").split("dropped:")[0]
            )
        elif text not in ("...", "runs/grpo_tiny/summary.json"):
            words = re.split(r"\d[\d.e-]*|runs/\S+|http\S+", text)
            assert all(word.strip() in sources for word in words), text


SAYING = ("run/engines", "run/parts", "dashboard/monitor")
"""Where lines of the console come from."""
