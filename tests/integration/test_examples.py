"""The scripts of apps/examples, each as a reader starts it, on a tiny model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from forge_async.cli import app
from forge_async.rollout.rendering import build_messages, render_prompt
from forge_async.testing.models import ModelFactory

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(200)]


def start(name: str, *words: str | Path, folder: Path) -> str:
    """What the script prints."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(ROOT / "apps/examples" / f"{name}.py"), *map(str, words)]
    result = subprocess.run(command, cwd=folder, env=environ, text=True, capture_output=True, timeout=180)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def test_a_policy_service_answers_on_its_own(tiny_model: ModelFactory, tmp_path: Path) -> None:
    out = start("generate", tiny_model("llama", tied=True), "101101", folder=tmp_path)
    assert len(re.findall(r"ended by (?:stop|length)$", out, re.M)) == 4
    assert len(re.findall(r"log-probs \[.*\], versions \[0[ 0]*\]", out)) == 4


def test_the_buffer_is_usable_by_hand(tmp_path: Path) -> None:
    out = start("buffer_by_hand", folder=tmp_path)
    batches = re.findall(r"^version (\d) trains prompt-(\d+), prompt-(\d+)$", out, re.M)
    assert batches == [("0", "1", "2"), ("1", "3", "4"), ("2", "5", "6"), ("3", "7", "8")], "all but the slow one"
    assert out.splitlines()[-1] == "{'admitted': 11, 'trained': 8, 'dropped': {'run_ended': 2, 'stale': 1}}"


def test_a_trainer_learns_from_a_file_of_scored_episodes(tiny_model: ModelFactory, tmp_path: Path) -> None:
    model = tiny_model("llama", tied=True)
    rows = [{"prompt": p, "completion": c, "reward": float(c == "2")} for p in ("101", "11") for c in ("1", "2", "3")]
    (tmp_path / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = start("train_on_episodes", model, "episodes.jsonl", "trained", folder=tmp_path)
    assert re.findall(r"^version (\d): loss -?[\d.]+, gradient norm (?!0\.000)[\d.]+$", out, re.M) == list("1234")
    assert preference(tmp_path / "trained") > preference(model) + 0.01, "what was rewarded became likelier"


def test_the_warm_up_of_forge_async_sft_trains_and_exports(tiny_model: ModelFactory, tmp_path: Path) -> None:
    settings = [
        "steps=20",
        "eval_every=1",
        "batch_size=16",
        "eval_prompts=8",
        "target_accuracy=1",
        "accuracy_limits=[0, 1]",
    ]
    settings += ["trainer.optimizer.lr=3e-3", "trainer.optimizer.warmup_steps=0"]
    places = [f"model.path={tiny_model('llama', tied=True)}", "model.prepare=", f"export_path={tmp_path / 'warm'}"]
    result = CliRunner().invoke(app, ["sft", str(ROOT / "configs/sft_tiny.yaml"), *settings, *places])
    assert result.exit_code == 0, result.output
    losses = [float(loss) for loss in re.findall(r"warm-up step \d+: loss ([\d.]+)", result.stdout)]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.5
    assert AutoTokenizer.from_pretrained(tmp_path / "warm").eos_token_id is not None


@torch.no_grad()
def preference(folder: Path) -> float:
    """Log-prob of "2" less the mean of those of "1" and "3", as the answer to "101", by transformers."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = render_prompt(tokenizer, build_messages("101", None))
    logprobs = model(torch.tensor(ids, dtype=torch.long)[None]).logits[0, -1].float().log_softmax(-1)
    one, two, three = (logprobs[tokenizer(digit, add_special_tokens=False)["input_ids"][0]].item() for digit in "123")
    return two - (one + three) / 2


def test_versions_published_by_hand_are_seen_by_one_long_request(tiny_model: ModelFactory, tmp_path: Path) -> None:
    out = start("publish_by_hand", tiny_model("llama", tied=True), folder=tmp_path)
    digests = re.findall(r"^version (\d) is live, digest (\w{8}), 1 requests went on$", out, re.M)
    assert [version for version, _ in digests] == ["1", "2", "3"] and len({digest for _, digest in digests}) == 3
    assert "versions in the store (2)" in out
    spans = json.loads(out.splitlines()[-1].partition(": ")[2])
    assert [version for version, _ in spans] == [0, 1, 2, 3] and sum(tokens for _, tokens in spans) == 400
