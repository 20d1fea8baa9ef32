"""Damaged model folders are named before anything is spawned; what makes a missing one ends with the run."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forge_async.config import ModelConfig
from forge_async.errors import ConfigError, ModelNotFoundError
from forge_async.prepare import ensure_model, load_tokenizer, model_positions, run_to_end


def cut(file: Path, end: int) -> None:
    file.write_bytes(file.read_bytes()[:end])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no .*safetensors file"),
        (lambda folder: cut(folder / "model.safetensors", -100), r"model\.safetensors is damaged or cut off: it has"),
        (lambda folder: cut(folder / "model.safetensors", 50), "header would be longer"),
        (lambda folder: cut(folder / "model.safetensors", 0), "damaged or cut off"),
        (lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs"), "damaged or cut off"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}'
            ),
            r"model-00002\.safetensors is missing",
        ),
    ],
)
async def test_damaged_weights_are_named(
    tiny_llama: Path, tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    folder = tmp_path / "ein Modell mit Ümlaut"
    shutil.copytree(tiny_llama, folder)
    assert await ensure_model(ModelConfig(path=str(folder))) == folder
    assert model_positions(folder) == 2048
    damage(folder)
    with pytest.raises(ModelNotFoundError, match=words):
        await ensure_model(ModelConfig(path=str(folder)))


def test_a_missing_tokenizer_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelNotFoundError, match=r"model\.path = .*its tokenizer cannot be loaded"):
        load_tokenizer(folder)


def test_an_unknown_recipe_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"prepare = 'tyni': must be one of '', 'sft', 'tiny'"):
        ModelConfig(path="none", prepare="tyni", warmup_config="configs/sft_tiny.yaml")


SLEEPER = [sys.executable, "-c", "import os, sys, time; print(os.getpid(), flush=True); time.sleep(60)"]


def ends(pid: int, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


async def test_a_cancelled_command_is_ended(tmp_path: Path) -> None:
    running = asyncio.create_task(run_to_end(["sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 60"], grace_s=0.2))
    for _ in range(100):
        await asyncio.sleep(0.05)
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip():
            break
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ends(int((tmp_path / "pid").read_text()), 0.5)


def test_a_command_does_not_outlive_the_process_that_started_it() -> None:
    script = f"import asyncio; from forge_async.prepare import run_to_end; asyncio.run(run_to_end({SLEEPER!r}))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert ends(pid)
