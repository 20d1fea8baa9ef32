"""The torchtitan model computes what transformers computes from the same folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_samples import groups
from transformers import AutoModelForCausalLM

from forge_async.errors import ForgeError, ModelNotFoundError
from forge_async.testing.models import ModelFactory
from forge_async.trainer.config import TrainerConfig
from forge_async.trainer.engine import TrainerEngine
from forge_async.types import TrainingSequence

FAMILIES = [("llama", True), ("llama", False), ("qwen3", True), ("qwen3", False), ("qwen3_moe", False)]


def reference_logprobs(folder: Path, sequences: list[TrainingSequence]) -> list[np.ndarray]:
    """By transformers, one sequence at a time, unpadded and unpacked."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    result = []
    for sequence in sequences:
        ids = torch.tensor(sequence.token_ids, dtype=torch.long)[None]
        with torch.no_grad():
            scaled = model(ids).logits[0] / sequence.temperature
        chosen = scaled[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        result.append(np.concatenate([[0.0], chosen.numpy()]))
    return result


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_logprobs_equal_transformers(tiny_model: ModelFactory, family: str, tied: bool) -> None:
    folder = tiny_model(family, tied=tied)
    sequences = groups()
    engine = TrainerEngine(TrainerConfig(micro_batch_tokens=64, logprob_chunk=16), folder)
    for actual, expected in zip(engine.logprobs(sequences), reference_logprobs(folder, sequences), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_logprobs_are_of_scaled_logits(tiny_llama: Path) -> None:
    import dataclasses

    warm = [dataclasses.replace(sequence, temperature=0.6) for sequence in groups(1)]
    engine = TrainerEngine(TrainerConfig(), tiny_llama)
    for actual, expected in zip(engine.logprobs(warm), reference_logprobs(tiny_llama, warm), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-4)


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_an_export_after_a_step_loads_in_transformers(
    tiny_model: ModelFactory, family: str, tied: bool, tmp_path: Path
) -> None:
    folder = tiny_model(family, tied=tied)
    sequences = groups()
    engine = TrainerEngine(TrainerConfig(), folder)
    before = engine.logprobs(sequences)
    engine.sft_step(sequences)
    engine.export_hf(tmp_path / "out")
    after = engine.logprobs(sequences)
    assert max(np.abs(new - old).max() for new, old in zip(after, before, strict=True)) > 1e-5
    for actual, expected in zip(after, reference_logprobs(tmp_path / "out", sequences), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-4)
    names = {shard.name for shard in engine.hf_shards()}
    from safetensors import safe_open

    with safe_open(str(folder / "model.safetensors"), framework="pt") as source:
        assert names == set(source.keys())
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_an_export_replaces_a_model_and_nothing_else(tiny_llama: Path, tmp_path: Path) -> None:
    engine = TrainerEngine(TrainerConfig(), tiny_llama)
    (tmp_path / "empty").mkdir()
    for name in ("new", "new", "empty"):
        engine.export_hf(tmp_path / name)
        assert (tmp_path / name / "model.safetensors").is_file()
    (tmp_path / "home" / "letters").mkdir(parents=True)
    with pytest.raises(ForgeError, match="home: it exists and is no model folder"):
        engine.export_hf(tmp_path / "home")
    assert (tmp_path / "home" / "letters").is_dir()


def test_a_missing_or_foreign_model_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        TrainerEngine(TrainerConfig(), tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        TrainerEngine(TrainerConfig(), tmp_path / "empty")
    for change, message in (
        ({"model_type": "gpt2"}, "supports llama, qwen3, qwen3_moe"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type is 'yarn'"),
        ({"hidden_size": 32}, "shape"),
        ({"num_hidden_layers": 3}, "missing"),
    ):
        folder = tmp_path / next(iter(change))
        shutil.copytree(tiny_llama, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ForgeError, match=message):
            TrainerEngine(TrainerConfig(), folder)
