"""The ranks of ``test_layouts.py``: for each of the cases in a file they load its start, step, and write what they saw.

They are forked from one process that has imported everything, which takes longer than their work.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

from safetensors.torch import save_file
from torch.multiprocessing import start_processes
from trainer_samples import forked, groups, masked, sequence

from forge_async.trainer.config import OptimizerConfig, ParallelismConfig, TrainerConfig
from forge_async.trainer.engine import TrainerEngine
from forge_async.trainer.loss_config import CorrectionConfig, KLConfig, LossConfig
from forge_async.types import StepStats

LOSS = LossConfig(
    correction=CorrectionConfig(importance="mask", low=0.1, high=3.0, level="sequence"), kl=KLConfig(coefficient=0.1)
)
CONFIG = TrainerConfig(micro_batch_tokens=64, logprob_chunk=16, loss=LOSS, optimizer=OptimizerConfig(lr=1e-3))


def run_steps(engine: TrainerEngine) -> list[StepStats]:
    uneven = [sequence("ten", [5, 6], [7] * 10), sequence("two", [8], [9] * 2)]
    return [
        engine.step(uneven),
        engine.step(forked()),
        engine.sft_step(groups(seed=1)),
        engine.step(masked(groups(seed=2))),
    ]


def run_case(model: str, folder: Path, layout: ParallelismConfig) -> None:
    world = int(os.environ["WORLD_SIZE"])
    engine = TrainerEngine(dataclasses.replace(CONFIG, procs=world, parallelism=layout), model)
    engine.load_checkpoint(folder / "start")
    steps = run_steps(engine)
    logprobs = engine.logprobs(masked(groups()))
    shards = engine.hf_shards()
    save_file(
        {
            str(index): shard.tensor.detach().reshape(shard.shape or shard.tensor.shape).clone()
            for index, shard in enumerate(shards)
        },
        folder / f"rank{engine.rank}.safetensors",
    )
    engine.save_checkpoint(folder / "checkpoint", {"ranks": world})
    engine.export_hf(folder / "export")
    result = {
        "steps": [dataclasses.asdict(stats) for stats in steps],
        "logprobs": [values.tolist() for values in logprobs],
        "shards": [(shard.name, list(shard.global_shape), list(shard.offsets)) for shard in shards],
        "data_ranks": engine.data_ranks,
    }
    (folder / f"rank{engine.rank}.json").write_text(json.dumps(result))
    engine.close()


def run_rank(rank: int, world: int, model: str, folder: str, layout: dict[str, int], port: int) -> None:
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_PORT": str(port)}
    os.environ |= ranks
    run_case(model, Path(folder), ParallelismConfig(**layout))


if __name__ == "__main__":
    world = int(sys.argv[2])
    for case in json.loads(Path(sys.argv[1]).read_text()):
        # New ones for each: a process that leaves one process group and joins another has ended in glibc's malloc().
        start_processes(run_rank, (world, *case), nprocs=world, start_method="fork")
