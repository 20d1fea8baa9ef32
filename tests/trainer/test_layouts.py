"""Trainers of several processes compute what one does, from the same checkpoint, however they are laid out."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layout_child import CONFIG, run_steps
from safetensors.torch import load_file
from trainer_samples import groups, masked

from forge_async.errors import ConfigError
from forge_async.testing.models import ModelFactory
from forge_async.trainer.config import ParallelismConfig, TrainerConfig
from forge_async.trainer.engine import TrainerEngine
from forge_async.types import StepStats

CHILD = Path(__file__).parent / "layout_child.py"

# Three heads: the shards of two ranks cut a head in two. 321 tokens: two ranks hold different numbers of rows.
THREE_HEADS = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3}
GROUPED = {"num_attention_heads": 4, "head_dim": 16, "vocab_size": 321}
CASES: dict[str, tuple[dict[str, Any], dict[str, int], int]] = {
    "fsdp": ({"family": "llama", "tied": True, **THREE_HEADS}, {}, 2),
    "tp_tied": ({"family": "llama", "tied": True, **GROUPED}, {"tp": 2}, 2),
    "tp_norms": ({"family": "qwen3", "tied": False}, {"tp": 2}, 2),
    "copies": ({"family": "llama", "tied": True}, {"dp_replicate": 2}, 2),
    "fsdp_experts": ({"family": "qwen3_moe", "tied": False}, {}, 2),
    "ep": ({"family": "qwen3_moe", "tied": False}, {"ep": 2}, 2),
    "tp_ep": ({"family": "qwen3_moe", "tied": False}, {"tp": 2, "ep": 2}, 2),
    "fsdp_tp": ({"family": "llama", "tied": True, **GROUPED}, {"tp": 2}, 4),
    "fsdp_ep": ({"family": "qwen3_moe", "tied": False}, {"ep": 2}, 4),
    "few_experts": ({"family": "qwen3_moe", "tied": False, "num_experts": 2}, {"ep": 2}, 4),  # split inside by FSDP
}
"""Name -> model, layout, processes."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(world: int, cases: Path) -> None:
    path = os.pathsep.join([str(CHILD.parent), str(CHILD.parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, str(CHILD), str(cases), str(world)]
    ranks = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        assert ranks.wait(timeout=240) == 0, "a rank failed, see above"
    finally:
        if ranks.poll() is None:
            os.killpg(ranks.pid, signal.SIGKILL)
            ranks.wait()


@pytest.fixture(scope="module")
def case(
    tiny_model: ModelFactory, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Path, list[StepStats], list[np.ndarray]]]:
    """Name -> model, the folder with what its ranks wrote, and the steps and log-probs of one process.

    The processes of all cases of a world size are forked from one.
    """
    root = tmp_path_factory.mktemp("layouts")
    expected: dict[str, tuple[list[StepStats], list[np.ndarray]]] = {}

    def run_world(world: int) -> None:
        jobs = []
        for name, (settings, layout, processes) in CASES.items():
            if processes != world:
                continue
            model = tiny_model(**settings)
            one = TrainerEngine(CONFIG, model)
            one.sft_step(groups(seed=9))
            one.save_checkpoint(root / name / "start", {})
            expected[name] = run_steps(one), one.logprobs(masked(groups()))
            jobs.append((str(model), str(root / name), layout, free_port()))
        (root / f"cases{world}.json").write_text(json.dumps(jobs))
        run_ranks(world, root / f"cases{world}.json")

    def get(name: str) -> tuple[Path, Path, list[StepStats], list[np.ndarray]]:
        settings, _, world = CASES[name]
        if name not in expected:
            run_world(world)
        return tiny_model(**settings), root / name, *expected[name]

    return get


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_every_layout_equals_one_process(case: Callable[..., Any], name: str) -> None:
    model, folder, expected, expected_logprobs = case(name)
    _, layout, world = CASES[name]
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]

    for rank in ranks:
        assert rank["data_ranks"] == world // layout.get("tp", 1)
        assert len(rank["steps"]) == len(expected)
        for got, wanted in zip(rank["steps"], expected, strict=True):
            assert (got["version"], got["trained_tokens"]) == (wanted.version, wanted.trained_tokens)
            # Rows share more where there are fewer, and times are times.
            for value in got.keys() - {"wall_s", "phase_s", "total_tokens", "prefix_sharing", "padding_fraction"}:
                assert got[value] == pytest.approx(getattr(wanted, value), rel=1e-4, abs=1e-5), value
        assert min(got["masked_fraction"], got["reference_kl"], got["clip_fraction"]) > 0.001, "of the last step"
    for rank in ranks:
        for got, wanted in zip(rank["logprobs"], expected_logprobs, strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-4)

    # The shards of all ranks put every tensor of the export together, each element once.
    exported = load_file(folder / "export" / "model.safetensors")
    assert exported.keys() == load_file(model / "model.safetensors").keys()
    for rank, written in enumerate(ranks):
        parts = load_file(folder / f"rank{rank}.safetensors")
        for index, (name, shape, offsets) in enumerate(written["shards"]):
            part = parts[str(index)]
            assert tuple(shape) == tuple(exported[name].shape)
            region = exported[name][tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))]
            assert torch.equal(region, part), name  # NaN, where it was handed out before, equals nothing
            region.fill_(torch.nan)
    assert all(tensor.isnan().all() for tensor in exported.values())

    # One rank resumes what several wrote.
    resumed = TrainerEngine(CONFIG, model)
    assert resumed.load_checkpoint(folder / "checkpoint") == {"ranks": world}
    for got, wanted in zip(resumed.logprobs(masked(groups())), ranks[0]["logprobs"], strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_layouts_that_do_not_fit_are_named(tiny_model: ModelFactory) -> None:
    for procs, layout, message in (
        (3, {"dp_shard": 2}, r"procs = 3: must be dp_shard x dp_replicate x tp \(2 x 1 x 1\)"),
        (3, {"tp": 2}, r"procs = 3: must be a multiple of dp_replicate x tp \(1 x 2\)"),
        (2, {"ep": 4}, r"parallelism.ep = 4: must be a divisor of dp_shard x tp \(2 x 1\)"),
        (2, {"tp": 0}, "tp = 0: must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            TrainerConfig(procs=procs, parallelism=ParallelismConfig(**layout))
    for procs, layout, settings, message in (
        (2, {"tp": 2}, THREE_HEADS, r"parallelism.tp = 2: must be a divisor of the model's num_attention_heads \(3\)"),
        (2, {"ep": 2}, {}, "parallelism.ep = 2: must be 1 for llama, which has no experts"),
        (3, {"ep": 3}, {"family": "qwen3_moe"}, r"parallelism.ep = 3: must be a divisor of .* num_experts \(8\)"),
        (2, {"tp": 2}, {"family": "qwen3_moe"}, "parallelism.ep = 1: must be above 1 for a mixture of experts with tp"),
    ):
        config = TrainerConfig(procs=procs, parallelism=ParallelismConfig(**layout))
        with pytest.raises(ConfigError, match=message):
            TrainerEngine(config, tiny_model(**settings))
