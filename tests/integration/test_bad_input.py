"""What a user gets wrong is answered before anything is spawned: one line, exit code 1, no traceback."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.path=nowhere"], ["model.path", "nowhere", "config.json"]),
        (["trainer.optmizer.lr=1"], ["trainer.optmizer.lr", "Did you mean trainer.optimizer.lr"]),
        (["buffer.groups_per_step=0"], ["buffer.groups_per_step", "at least 1"]),
        (["trainer.procs=2", "trainer.parallelism.dp_shard=3"], ["trainer.procs", "dp_shard"]),
        (["dataset.name=chain_sun"], ["dataset.name", "chain_sun", "chain_sum"]),
        (["dataset.kind=jsonl", "dataset.path=none.jsonl"], ["none.jsonl"]),
        (["reward.functions=[tiny_task:missing]"], ["reward.functions[0]", "tiny_task:missing"]),
        (["resume=runs/none"], ["resume", "runs/none"]),
        (["dataset.max_prompt_tokens=5", "dataset.overlong_prompts=error"], ["max_prompt_tokens", "5"]),
    ],
)
def test_bad_input(app, overrides: list[str], words: list[str]) -> None:
    code, output = app.run(*overrides, timeout=180)
    assert code == 1, output
    assert "Traceback" not in output
    for word in words:
        assert word in output
    assert not any(event["kind"] == "started" for event in app.events())


def test_print_config_shows_the_resolved_tree(app) -> None:
    code, output = app.run("--print-config", "seed=7", timeout=60)
    assert code == 0
    assert "seed: 7" in output
    assert "max_staleness: 2" in output
