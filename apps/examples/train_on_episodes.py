"""A trainer on its own: take steps on a JSONL of scored episodes, and write the model.

    python apps/examples/train_on_episodes.py models/tiny_sft episodes.jsonl models/trained

Each line: {"prompt": "101", "completion": "2", "reward": 1.0}; lines of one prompt are a group. Nobody noted the
log-probs of these episodes: they are taken as the model's own, as if it had just sampled them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from forge_async.mesh import MeshRuntime
from forge_async.prepare import load_tokenizer
from forge_async.rollout.rendering import build_messages, render_prompt
from forge_async.trainer.actor import TrainerActor
from forge_async.trainer.advantages import advantages
from forge_async.trainer.config import OptimizerConfig, TrainerConfig
from forge_async.trainer.sft import answer_sequence
from forge_async.types import Prompt, TrainingSequence


def read(episodes: str, tokenizer: Any) -> Iterator[TrainingSequence]:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in map(json.loads, Path(episodes).read_text().splitlines()):
        groups[row["prompt"]].append(row)
    values = advantages([[row["reward"] for row in group] for group in groups.values()])
    for (text, group), group_values in zip(groups.items(), values, strict=True):
        ids = render_prompt(tokenizer, build_messages(text, system_prompt=None))
        for row, value in zip(group, group_values, strict=True):
            sequence = answer_sequence(Prompt(text, (), ids, answer=row["completion"]), tokenizer)
            yield replace(sequence, advantages=np.full(len(sequence.token_ids), value, np.float32))


async def main(model: str, episodes: str, target: str, steps: int = 4) -> None:
    sequences = list(read(episodes, load_tokenizer(model)))
    async with MeshRuntime():
        trainer = await TrainerActor.spawn(TrainerConfig(optimizer=OptimizerConfig(lr=1e-4)), model)
        await trainer.call("setup")
        for _ in range(steps):
            (logprobs,) = await trainer.call("logprobs", sequences)
            fresh = [replace(sequence, logprobs=own) for sequence, own in zip(sequences, logprobs, strict=True)]
            (stats,) = await trainer.call("step", fresh)
            print(f"version {stats.version}: loss {stats.loss:.4f}, gradient norm {stats.grad_norm:.3f}")
        await trainer.call("export_hf", target)


if __name__ == "__main__":
    model, episodes, target = sys.argv[1:]
    asyncio.run(main(model, episodes, target))
