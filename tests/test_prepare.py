"""Damaged model folders are named before anything is spawned."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from forge_async.config import ModelConfig
from forge_async.errors import ModelNotFoundError
from forge_async.prepare import ensure_model, load_tokenizer, model_positions


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
def test_damaged_weights_are_named(
    tiny_llama: Path, tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    folder = tmp_path / "ein Modell mit Ümlaut"
    shutil.copytree(tiny_llama, folder)
    assert ensure_model(ModelConfig(path=str(folder))) == folder
    assert model_positions(folder) == 2048
    damage(folder)
    with pytest.raises(ModelNotFoundError, match=words):
        ensure_model(ModelConfig(path=str(folder)))


def test_a_missing_tokenizer_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelNotFoundError, match=r"model\.path = .*its tokenizer cannot be loaded"):
        load_tokenizer(folder)
