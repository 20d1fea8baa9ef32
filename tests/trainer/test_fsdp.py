"""Two FSDP2 processes compute what one does, from the same checkpoint."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from trainer_samples import groups, sequence

from forge_async.testing.models import ModelFactory
from forge_async.trainer.config import OptimizerConfig, TrainerConfig
from forge_async.trainer.engine import TrainerEngine

CHILD = Path(__file__).parent / "fsdp_child.py"
CONFIG = TrainerConfig(micro_batch_tokens=64, optimizer=OptimizerConfig(lr=1e-3))


def two_ranks(model: Path, checkpoint: Path, output: Path) -> list[dict]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    path = os.pathsep.join([str(CHILD.parent), str(CHILD.parents[2]), os.environ.get("PYTHONPATH", "")])
    children = [
        subprocess.Popen(
            [sys.executable, str(CHILD), str(model), str(checkpoint), str(output)],
            env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": path},
        )
        for rank in range(2)
    ]
    try:
        codes = [child.wait(timeout=240) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert codes == [0, 0]
    return [json.loads((output / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen3_moe", False)])
def test_two_ranks_equal_one(tiny_model: ModelFactory, tmp_path: Path, family: str, tied: bool) -> None:
    # Three heads: the shards of two ranks cut a head in two.
    three = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3}
    settings = three if family == "llama" else {}
    model = tiny_model(family, tied=tied, **settings)
    one = TrainerEngine(CONFIG, model)
    one.sft_step(groups(seed=9))
    one.save_checkpoint(tmp_path / "start", {})
    uneven = [sequence("ten", [5, 6], [7] * 10), sequence("two", [8], [9] * 2)]
    expected = [one.step(uneven), one.step(groups()), one.sft_step(groups(seed=1)), one.step(groups(seed=2))]
    ranks = two_ranks(model, tmp_path / "start", tmp_path)

    for rank in ranks:
        assert len(rank["steps"]) == len(expected)
        for got, wanted in zip(rank["steps"], expected, strict=True):
            assert (got["version"], got["trained_tokens"]) == (wanted.version, wanted.trained_tokens)
            for name in ("loss", "grad_norm", "ratio_mean", "entropy", "clip_fraction"):
                assert got[name] == pytest.approx(getattr(wanted, name), rel=1e-3, abs=1e-4), name
    for rank in ranks:
        for got, wanted in zip(rank["logprobs"], one.logprobs(groups()), strict=True):
            np.testing.assert_allclose(got, wanted, atol=2e-3)

    # The shards of both ranks cover every tensor of the export exactly once.
    exported = load_file(tmp_path / "export" / "model.safetensors")
    covered: dict[str, int] = {}
    for rank in ranks:
        for name, shape, _, local in rank["shards"]:
            assert tuple(shape) == tuple(exported[name].shape)
            covered[name] = covered.get(name, 0) + math.prod(local)
    assert covered == {name: tensor.numel() for name, tensor in exported.items()}

    # One rank resumes what two wrote.
    resumed = TrainerEngine(CONFIG, model)
    assert resumed.load_checkpoint(tmp_path / "checkpoint") == {"ranks": 2}
    for got, wanted in zip(resumed.logprobs(groups()), ranks[0]["logprobs"], strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)
