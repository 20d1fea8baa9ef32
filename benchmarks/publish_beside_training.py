"""Claim: publishing holds training up for at most 5% of a step.

``python benchmarks/publish_beside_training.py [--model models/smollm2] [--repeats 6] [--sequences 8] [--tokens 64]``

The real trainer actor on one core takes steps in turns with and without a version in publication. Shown are: how long
training was *blocked* (the call of ``publish``, and the wait before the optimizer step until the weights are copied),
and how much longer a step with publishing takes in all, which includes the core time that copying, casting and the
store take beside it. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from forge_async.mesh import MeshRuntime
from forge_async.store import StoreConfig, WeightStore
from forge_async.trainer.actor import TrainerActor
from forge_async.trainer.config import TrainerConfig
from forge_async.types import TrainingSequence


def batch(count: int, tokens: int, seed: int) -> list[TrainingSequence]:
    """Random sequences, half prompt and half completion."""
    random = np.random.default_rng(seed)
    mask = np.arange(tokens) >= tokens // 2
    return [
        TrainingSequence(
            sequence_id=f"{seed}.{index}",
            token_ids=random.integers(100, 40000, tokens).astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -8.0, 0.0).astype(np.float32),
            policy_versions=np.where(mask, 0, -1).astype(np.int32),
            advantages=np.where(mask, random.normal(), 0.0).astype(np.float32),
            temperature=1.0,
        )
        for index in range(count)
    ]


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    core = [sorted(os.sched_getaffinity(0))[0]]
    rows: dict[bool, list[float]] = {False: [], True: []}
    blocked: list[float] = []
    commits: list[float] = []
    async with MeshRuntime():
        store = await WeightStore.create(StoreConfig(dtype="bfloat16"))
        config = TrainerConfig(procs=options.procs, max_sequence_tokens=options.tokens, device="cpu")
        trainer = await TrainerActor.options(procs=options.procs, cores=core).spawn(config, options.model, store=store)
        await trainer.call("setup")
        await trainer.call("step", batch(options.sequences, options.tokens, 0))
        for repeat in range(-1, 2 * options.repeats):
            publishing = repeat % 2 == 1 or repeat < 0
            sequences = batch(options.sequences, options.tokens, repeat + 2)
            before = (await trainer.call("status"))[0]["publish_blocked_s"]
            began = time.perf_counter()
            version = (await trainer.call("publish"))[0] if publishing else -1
            await trainer.call("step", sequences)
            wall = time.perf_counter() - began
            if publishing:
                commit = (await trainer.call("published", version))[0]["wall_s"]
            if repeat < 0:  # makes the segments' pages
                continue
            rows[publishing].append(wall)
            if publishing:
                blocked.append((await trainer.call("status"))[0]["publish_blocked_s"] - before)
                commits.append(commit)
        await store.close()
    plain, beside = statistics.median(rows[False]), statistics.median(rows[True])
    share = statistics.median(blocked) / plain
    print(f"step alone            {plain:8.3f} s")
    print(f"step with publishing  {beside:8.3f} s")
    print(f"training blocked      {statistics.median(blocked):8.3f} s")
    print(f"publish to commit     {statistics.median(commits):8.3f} s")
    return {
        "model": Path(options.model).name,
        "trainer_procs": options.procs,
        "repeats": options.repeats,
        "tokens_per_step": options.sequences * options.tokens,
        "blocked_over_step": round(share, 4),
        "bound": 0.05,
        "step_with_over_without": round(beside / plain, 3),
        "step_s": {"alone": [round(s, 3) for s in rows[False]], "publishing": [round(s, 3) for s in rows[True]]},
        "blocked_s": [round(s, 4) for s in blocked],
        "publish_to_commit_s": [round(s, 3) for s in commits],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2", help="Hugging Face folder")
    parser.add_argument("--procs", type=int, default=1, help="trainer ranks; more than one: FSDP2")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=8, help="per step")
    parser.add_argument("--tokens", type=int, default=64, help="per sequence")
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
