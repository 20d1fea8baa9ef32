"""The notebooks run as a reader would run them, on a tiny model; they are the tests of the handle on real engines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
import yaml
from nbclient import NotebookClient
from nbformat import NotebookNode
from typer.testing import CliRunner

from forge_async.cli import app
from forge_async.replay import NotReplayable, Recorded
from forge_async.testing.models import ModelFactory

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "docs" / "notebooks"

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


GRADED = '''
def odd(prompt, completion):
    """Groups of a random model are not all of one reward by it."""
    return sum(ord(letter) % 2 for letter in completion) / max(1, len(completion))
'''


def read(name: str) -> NotebookNode:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: ModelFactory) -> Path:
    """What a reader has: configs (here of small steps) and a model that is warmed up (here a random one)."""
    folder = tmp_path_factory.mktemp("reader")
    config = yaml.safe_load((ROOT / "configs/grpo_tiny.yaml").read_text())
    config["rollout"]["group_size"] = 4
    config["buffer"] |= {"groups_per_step": 4, "max_open_groups": 8}
    config["checks"] = {"ratio_samples": 2}
    config["reward"] = {"functions": ["graded:odd"]}
    (folder / "graded.py").write_text(GRADED)
    config["metrics"] = {"tensorboard": False, "plot": False}
    (folder / "configs").mkdir()
    (folder / "configs/grpo_tiny.yaml").write_text(yaml.safe_dump(config))
    (folder / "models").mkdir()
    (folder / "models/tiny_sft").symlink_to(tiny_model("llama", tied=True))
    return folder


def execute(notebook: NotebookNode, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Run it there; what each cell put out as text, by the cell's source."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    for name, value in {
        "PYTHONPATH": path,
        "IPYTHONDIR": folder / "ipython",
        "JUPYTER_RUNTIME_DIR": folder / "jupyter",
    }.items():
        monkeypatch.setenv(name, str(value))
    client = NotebookClient(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute()
    return {cell.source: "".join(map(text_of, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"}


def text_of(output: NotebookNode) -> str:
    if output.output_type == "stream":
        return str(output.text)
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}"
    return str(output.data.get("text/plain", ""))


def output_of(outputs: dict[str, str], words: str) -> str:
    (found,) = [output for source, output in outputs.items() if words in source]
    return found


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def driven(folder: Path) -> tuple[dict[str, str], Path]:
    """Notebook 1, with a trainer that is killed before the run is stopped."""
    notebook = read("1_drive_a_run")
    *cells, stop, epilogue = notebook.cells
    kill = "import os, signal\n\nos.kill(run.engines.trainer.pids()[0], signal.SIGKILL)"
    waits = nbformat.v4.new_code_cell("await run.step(1)", metadata={"tags": ["raises-exception"]})
    usable = "print(run.state, len(run.episodes(3)), len(run.metrics.frame()) > 2, await run.policy.generate('1'))"
    more = [nbformat.v4.new_code_cell(kill), waits, nbformat.v4.new_code_cell(usable)]
    notebook.cells = [*cells, *more, stop, epilogue]
    with pytest.MonkeyPatch.context() as monkeypatch:
        outputs = execute(notebook, folder, monkeypatch)
    return outputs, folder / "runs" / "by_hand"


def test_a_run_is_driven_by_hand(driven: tuple[dict[str, str], Path]) -> None:
    outputs, run = driven
    assert "IProgress" not in "".join(outputs.values())
    assert "run by_hand: paused" in output_of(outputs, "await run.start()")
    assert output_of(outputs, "await run.step(2)\n").splitlines()[-1].startswith("[(1, ")
    assert "version    2 of 40" in outputs["run.status()"] and "healthy, version 2" in outputs["run.status()"]
    assert outputs["run.episodes(last=5)"].startswith("episodes (5)")
    assert outputs["run.buffer.peek()"].startswith("open prompts (")
    assert "train/loss" in output_of(outputs, '"train/loss"')
    assert output_of(outputs, ".tail(2)").split()[-1] == "0.0001"
    assert output_of(outputs, "temperature=0.7)").startswith("completions (4)")
    assert "policy.sampling.top_p = 1.5: must be in (0, 1]" in output_of(outputs, "top_p=1.5")
    assert "step: the run is training. Call `await run.pause()`" in output_of(outputs, "except RunStateError")
    changed = [(e["key"], e["old"], e["new"]) for e in events(run) if e["kind"] == "changed"]
    assert changed == [
        ("trainer.optimizer.lr", 3e-4, 1e-4),
        ("policy.sampling.temperature", 1.0, 0.9),
        ("policy.update.mode", "never_stop", "abort_resume"),
    ]
    rates = [line["train/learning_rate"] for line in map(json.loads, (run / "metrics.jsonl").open())]
    assert rates[:2] == [3e-4, 3e-4] and set(rates[2:]) == {1e-4}


def test_a_fault_is_an_exception_in_the_cell_that_waits_and_the_handle_stays_usable(
    driven: tuple[dict[str, str], Path],
) -> None:
    outputs, run = driven
    error = outputs["await run.step(1)"]
    assert (
        error.startswith("RunFailed: ")
        and "the trainer failed" in error
        and "Resume with resume=runs/by_hand." in error
    )
    assert output_of(outputs, "len(run.episodes(3))").startswith("failed 3 True completions (1)")
    status = output_of(outputs, "await run.stop()")
    assert "run by_hand: stopped" in status and "the trainer failed" in status
    assert events(run)[-1]["outcome"] == "failed"
    (started,) = [event for event in events(run) if event["kind"] == "started"]
    assert not [pid for pid in [*started["trainer"], *started["policy"]] if Path(f"/proc/{pid}").exists()]


def test_what_was_done_by_hand_cannot_be_replayed_and_the_part_before_can(driven: tuple[dict[str, str], Path]) -> None:
    _, run = driven
    with pytest.raises(NotReplayable, match="a prompt was answered by hand after step 2.*--steps 2"):
        Recorded.read(run)
    assert Recorded.read(run, 2).steps == 2


def test_the_runs_folder_is_read_from_a_shell(
    driven: tuple[dict[str, str], Path], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run = driven
    monkeypatch.chdir(folder)
    shell = CliRunner()
    shown = shell.invoke(app, ["episodes", str(run), "--step", "2"])
    assert shown.exit_code == 0 and "episodes (4)" in shown.output
    missing = shell.invoke(app, ["export", str(run), "--version", "77"])
    assert missing.exit_code == 1 and "--version = 77: must be one of the run's checkpoints" in missing.stderr
    made = shell.invoke(app, ["export", str(run), "--to", str(tmp_path / "model")])
    assert made.exit_code == 0, made.output
    assert made.output.strip() == str(tmp_path / "model")
    check_export(run, folder, tmp_path / "model")


def check_export(run: Path, folder: Path, model: Path) -> None:
    """The checkpoint's weights, and no longer the first ones."""
    from safetensors.torch import load_file

    first = load_file(folder / "models/tiny_sft/model.safetensors")
    last = load_file(model / "model.safetensors")
    assert set(last) == set(first)
    assert sum(bool((last[name] != first[name]).any()) for name in last) > len(last) // 2
    assert (model / "tokenizer.json").exists()


def test_an_environment_and_a_reward_of_ones_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = read("2_environment_and_reward")
    for cell in notebook.cells:  # a random model hardly ever ends by itself, and would not be answered
        ends = f'"policy.sampling.stop_token_ids={list(range(20, 60))}"'
        cell.source = cell.source.replace('"policy.sampling.max_tokens=12"', f'"policy.sampling.max_tokens=12", {ends}')
    outputs = execute(notebook, folder, monkeypatch)
    assert "reward_parts/exact" in output_of(outputs, "reward_parts/exact")
    assert "run backwards: stopped" in output_of(outputs, "run.stop(save=False)")
    run = folder / "runs/backwards"
    assert [event["outcome"] for event in events(run) if event["kind"] == "end"] == ["stopped"]
    assert not any((run / "checkpoints").iterdir()) and not (run / "model").exists()
    episodes = list(map(json.loads, (run / "episodes.jsonl").open()))
    for line in episodes:
        parts = line["reward_parts"]
        assert line["reward"] == pytest.approx(parts["exact"] + 0.5 * parts["letters"] + 0.25 * parts["unaided"])
        assert parts["unaided"] == (line["turns"][0]["reply"] == [])
    check_turns([line for line in episodes if len(line["turns"]) == 2])


def check_turns(episodes: list[dict[str, Any]]) -> None:
    """The trainer sees each turn as the policy did, token by token: the second after the first and its reply."""
    fresh = 0
    for line in episodes:
        first, second = line["turns"]
        assert first["reply"] == [{"role": "user", "content": f"No. It begins with {line['answer'][0]}."}]
        assert second["reply"] == []
        on_policy = line["newest"] == line["oldest"] == line["step"] - 1
        fresh += on_policy
        for turn in (first, second):
            assert turn["trained"] == [[1, turn["tokens"]]]
            assert not on_policy or np.allclose(turn["logprobs"], turn["trainer_logprobs"], atol=2e-3)
    assert fresh, f"none of {len(episodes)} episodes of two turns was sampled from the weights it was trained on"


def test_staleness_and_ratios_are_as_the_notebook_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = execute(read("3_staleness_and_ratios"), folder, monkeypatch)
    assert float(output_of(outputs, "fresh = []").replace("np.float32(", "").rstrip(")")) < 1e-4
    ages = [line.split()[0] for line in output_of(outputs, "value_counts").splitlines()[1:]]
    assert {"0", "1"} <= set(ages), "some token was older than its trainer"
    warm = output_of(outputs, "warm = await").split("}")
    assert warm[0] == "{0.7" and float(warm[1]) < 1e-4


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_no_output_is_kept_in_git(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert cells and all(cell.outputs == [] and cell.execution_count is None for cell in cells)
