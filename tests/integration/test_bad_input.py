"""What a user gets wrong is answered before anything is spawned: one line, exit code 1, no traceback."""

from __future__ import annotations

import pytest

from forge_async import cli
from forge_async.config import Config


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.path=nowhere"], ["model.path", "nowhere", "config.json"]),
        (["trainer.optmizer.lr=1"], ["trainer.optmizer.lr", "Did you mean trainer.optimizer.lr"]),
        (["buffer.groups_per_step=0"], ["buffer.groups_per_step", "at least 1"]),
        (["trainer.procs=2", "trainer.parallelism.dp_shard=3"], ["trainer.procs", "dp_shard"]),
        (["policy.max_model_len=9000", "trainer.max_sequence_tokens=9000"], ["policy.max_model_len", "9000"]),
        (["resume=runs/none"], ["resume", "runs/none"]),
        (["reward.functions=[tiny_tsk:share_of_digits]"], ["reward.functions[0]", "tiny_tsk:share_of_digits"]),
        (["reward.functions=[tiny_task:share_of_digit]"], ["Did you mean tiny_task:share_of_digits?"]),
    ],
)
def test_settings_are_refused(app, monkeypatch, capsys, overrides: list[str], words: list[str]) -> None:
    monkeypatch.chdir(app.folder)
    assert cli.run_app(cli.train, Config, "tiny.yaml", None, overrides) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    for word in words:
        assert word in error
    assert not (app.folder / "runs").exists(), "nothing was begun"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["dataset.kind=jsonl", "dataset.path=none.jsonl"], ["none.jsonl"]),
        (["dataset.max_prompt_tokens=5", "dataset.overlong_prompts=error"], ["max_prompt_tokens", "5"]),
    ],
)
def test_data_are_refused_by_the_app(app, overrides: list[str], words: list[str]) -> None:
    code, output = app.run(*overrides, timeout=180)
    assert code == 1, output
    assert "Traceback" not in output
    for word in words:
        assert word in output
    assert not any(event["kind"] == "started" for event in app.events())


def test_print_config_shows_the_resolved_tree(app, monkeypatch, capsys) -> None:
    monkeypatch.chdir(app.folder)
    assert cli.run_app(cli.train, Config, "tiny.yaml", None, ["--print-config", "seed=7"]) == 0
    output = capsys.readouterr().out
    assert "seed: 7" in output
    assert "max_staleness: 2" in output
