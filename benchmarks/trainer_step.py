"""Claim: a trainer step through the actor takes as long as the same model in a bare torchtitan loop.

``python benchmarks/trainer_step.py [--model models/smollm2] [--groups 2] [--completions 8] [--repeats 9]``

Both run on one core and in turns: the trainer's actor, which gets sequences and packs them, and in the benchmark's own
process the model by torchtitan's modules, with its rows packed and indexed before. The bare loop computes cross entropy
of the same predictions with plain PyTorch, all of a row's logits at once, clips and takes an AdamW step; it has no
importance ratios, metrics, entropy, spans or messages. Steps with one row of each loop follow each other, after a
warm-up of two; medians. Beside them stand the phases of the actor's steps. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from forge_async.types import TrainingSequence

WARM_UP = 2
"""Steps of each before what counts: the first makes the optimizer's state, the second the pages of all that a step
takes beside it."""


def batch(groups: int, completions: int, prompt: int, completion: int, seed: int) -> list[TrainingSequence]:
    """Random groups; log-probs near those of a model that knows nothing."""
    from forge_async.types import TrainingSequence

    random, made = np.random.default_rng(seed), []
    for group in range(groups):
        shared = random.integers(100, 40000, prompt)
        for index in range(completions):
            ids = np.concatenate([shared, random.integers(100, 40000, completion)]).astype(np.int32)
            mask = np.arange(len(ids)) >= prompt
            made.append(
                TrainingSequence(
                    sequence_id=f"{group}.{index}",
                    token_ids=ids,
                    loss_mask=mask,
                    logprobs=np.where(mask, -10.0, 0.0).astype(np.float32),
                    policy_versions=np.where(mask, 0, -1).astype(np.int32),
                    advantages=np.where(mask, random.normal(), 0.0).astype(np.float32),
                )
            )
    return made


def bare_loop(model_path: str, sequences: list[TrainingSequence]) -> Callable[[], None]:
    """One step of a loop around torchtitan's model: everything that can be is prepared."""
    from pathlib import Path

    import torch
    import torch.nn.functional as F

    from forge_async.trainer import titan_compat as titan
    from forge_async.trainer.build import ModelBuilder
    from forge_async.trainer.config import TrainerConfig
    from forge_async.trainer.model import read_hf_config
    from forge_async.trainer.packing import pack
    from forge_async.trainer.segments import attention_layout

    config = TrainerConfig(device="cpu")
    builder = ModelBuilder(config, torch.device("cpu"), 8192)
    model = builder.build(read_hf_config(model_path), Path(model_path))[0]
    optimizers = titan.default_adamw(lr=1e-6).build(model_parts=[model])
    schedulers = titan.LRSchedulersContainer(optimizers, lambda step: 1.0)
    prepared = [
        (
            torch.from_numpy(row.token_ids)[None],
            torch.from_numpy(row.positions)[None],
            attention_layout(row.segments),
            torch.from_numpy(row.source),
            torch.from_numpy(row.label),
        )
        for row in pack(sequences, config.micro_batch_tokens)[0]
    ]
    count = sum(len(label) for *_, label in prepared)
    at: list[Any] = [None]
    model.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0][:, at[0]],))

    def step() -> None:
        optimizers.zero_grad()
        for tokens, positions, masks, source, label in prepared:
            at[0] = source
            logits = model(tokens, positions=positions, attention_masks=masks)
            loss = F.cross_entropy(logits[0], label, reduction="sum") / count
            loss.backward()
        titan.distributed_utils.clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizers.step()
        schedulers.step()

    return step


async def measure(options: argparse.Namespace, core: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    from forge_async.mesh import MeshRuntime
    from forge_async.trainer.actor import TrainerActor
    from forge_async.trainer.config import OptimizerConfig, TrainerConfig

    sequences = batch(options.groups, options.completions, options.prompt, options.completion, 0)
    times: dict[str, list[float]] = {"actor": [], "bare": []}
    phases: list[dict[str, float]] = []
    bare = bare_loop(options.model, sequences)
    config = TrainerConfig(device="cpu", optimizer=OptimizerConfig(lr=1e-6))
    async with MeshRuntime():
        trainer = await TrainerActor.options(procs=1, cores=[core]).spawn(config, options.model)
        await trainer.call("setup")
        for repeat in range(options.repeats + WARM_UP):
            began = time.perf_counter()
            stats = (await trainer.call("step", sequences))[0]
            between = time.perf_counter()
            bare()
            ended = time.perf_counter()
            if repeat >= WARM_UP:
                times["actor"].append(between - began)
                times["bare"].append(ended - between)
                phases.append(stats.phase_s | {"messages": between - began - sum(stats.phase_s.values())})
    medians = {name: statistics.median(values) for name, values in times.items()}
    parts = {name: statistics.median(step[name] for step in phases) for name in phases[0]}
    print(f"{stats.total_tokens} tokens, {stats.trained_tokens} trained, one core")
    for name, value in medians.items():
        print(f"{name:>12} {value:8.3f} s")
    print("phases of the actor's step")
    for name, value in sorted(parts.items(), key=lambda item: -item[1]):
        print(f"{name:>12} {value:8.4f} s {value / medians['actor']:7.1%}")
    return {
        "tokens": stats.total_tokens,
        "trained_tokens": stats.trained_tokens,
        "repeats": options.repeats,
        "step_s": {name: [round(s, 3) for s in values] for name, values in times.items()},
        "phase_share": {name: round(value / medians["actor"], 4) for name, value in parts.items()},
        "bare_over_actor": round(medians["bare"] / medians["actor"], 3),
        "bound": 0.97,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2", help="Hugging Face folder")
    parser.add_argument("--groups", type=int, default=2, help="prompts per step")
    parser.add_argument("--completions", type=int, default=8, help="of each")
    parser.add_argument("--prompt", type=int, default=65, help="tokens")
    parser.add_argument("--completion", type=int, default=20, help="tokens")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})  # before torch is imported, which counts cores then
    print(json.dumps(asyncio.run(measure(options, core))))


if __name__ == "__main__":
    main()
