"""One rank of ``test_fsdp.py``: loads a checkpoint, steps, writes what it saw. Arguments: model, checkpoint, output."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path


def main(model: str, checkpoint: str, output: str) -> None:
    from trainer_samples import groups, sequence

    from forge_async.trainer.config import OptimizerConfig, TrainerConfig
    from forge_async.trainer.engine import TrainerEngine

    world = int(os.environ["WORLD_SIZE"])
    config = TrainerConfig(procs=world, micro_batch_tokens=64, optimizer=OptimizerConfig(lr=1e-3))
    engine = TrainerEngine(config, model)
    engine.load_checkpoint(checkpoint)
    uneven = [sequence("ten", [5, 6], [7] * 10), sequence("two", [8], [9] * 2)]
    steps = [engine.step(uneven), engine.step(groups()), engine.sft_step(groups(seed=1)), engine.step(groups(seed=2))]
    logprobs = engine.logprobs(groups())
    shards = [
        (shard.name, list(shard.global_shape), list(shard.offsets), list(shard.tensor.shape))
        for shard in engine.hf_shards()
    ]
    engine.save_checkpoint(Path(output) / "checkpoint", {"ranks": world})
    engine.export_hf(Path(output) / "export")
    result = {
        "steps": [dataclasses.asdict(stats) for stats in steps],
        "logprobs": [values.tolist() for values in logprobs],
        "shards": shards,
    }
    (Path(output) / f"rank{engine.rank}.json").write_text(json.dumps(result))
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
