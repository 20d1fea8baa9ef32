"""Claim: computing shared prefixes once makes a trainer as much faster as the arithmetic says.

``python benchmarks/shared_prefix.py [--model models/smollm2] [--groups 8] [--completions 8] [--repeats 3]
[--lengths 32/256 128/128 512/32 2048/32] [--length-groups 1] [--length-completions 4]
[--memory 2048/32/16]``

The same step, its prompts shared and not (``trainer.share_prompts``), in turns on one core, after steps on two
sequences; medians. First groups of chain_sum, rendered as a run does, with random answers of about 20
tokens: useful tokens (of the sequences, prompts counted for each) per second. Then a table over prompt/completion
lengths beside the gain that counting multiplications gives: linear layers per token computed, attention per pair of
tokens, the output projection per prediction, forward and backward alike, and what a step costs whatever its tokens
(clip and optimizer, as measured). Before both, for completions of one long prompt, what forward and backward pass add
to the peak of a process beyond model and gradients, shared and not (where a row is one sequence: two of them are
computed), and as much per token of the row. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from forge_async.trainer.engine import TrainerEngine
    from forge_async.types import TrainingSequence


def sequence(name: str, prompt: np.ndarray, completion: np.ndarray, advantage: float) -> TrainingSequence:
    from forge_async.types import TrainingSequence

    ids = np.concatenate([prompt, completion]).astype(np.int32)
    mask = np.arange(len(ids)) >= len(prompt)
    return TrainingSequence(
        sequence_id=name,
        token_ids=ids,
        loss_mask=mask,
        logprobs=np.where(mask, -10.0, 0.0).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=np.where(mask, advantage, 0.0).astype(np.float32),
    )


def chain_sum(model: str, groups: int, completions: int) -> list[TrainingSequence]:
    """Prompts as a run of ``configs/grpo_smollm2.yaml`` renders them; answers of 15 to 25 random tokens."""
    from transformers import AutoTokenizer

    from forge_async.config import Config, load_config
    from forge_async.rollout.datasets import PromptSource

    config: Config = load_config(Path(__file__).parents[1] / "configs" / "grpo_smollm2.yaml")
    random = np.random.default_rng(0)
    prompts = PromptSource(config.dataset, AutoTokenizer.from_pretrained(model)).preview(groups)
    made = []
    for group, prompt in enumerate(prompts):
        for index in range(completions):
            answer = random.integers(100, 40000, int(random.integers(15, 26)))
            made.append(sequence(f"{group}.{index}", prompt.token_ids, answer, random.normal()))
    return made


def of_lengths(prompt: int, completion: int, groups: int, completions: int) -> list[TrainingSequence]:
    random, made = np.random.default_rng(1), []
    for group in range(groups):
        shared = random.integers(100, 40000, prompt)
        for index in range(completions):
            own = random.integers(100, 40000, completion)
            made.append(sequence(f"{group}.{index}", shared, own, random.normal()))
    return made


def compare(engine: TrainerEngine, sequences: list[TrainingSequence], repeats: int) -> dict[str, Any]:
    """Seconds of a step without and with sharing, what each computes, and the gain that this should give."""
    shared = dataclasses.replace(engine.config, share_prompts=True)
    configs = {"unshared": dataclasses.replace(shared, share_prompts=False), "shared": shared}
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    fixed: list[float] = []
    computed, cost = {}, {}
    for repeat in range(repeats + 1):
        for name, config in configs.items():
            engine.config = config
            if not repeat:
                engine.step(sequences[:2])
                continue
            began = time.perf_counter()
            stats = engine.step(sequences)
            ended = time.perf_counter()
            computed[name] = stats.total_tokens
            cost[name] = sum(row.cost for row in engine._rows(sequences))
            seconds[name].append(ended - began)
            fixed.append(sum(stats.phase_s[part] for part in ("clip", "optimizer")))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    steady = statistics.median(fixed)
    expected = cost["shared"] / cost["unshared"] * (medians["unshared"] - steady) + steady
    useful = sum(len(each.token_ids) for each in sequences)
    return {
        "useful_tokens": useful,
        "computed_tokens": computed,
        "useful_tokens_per_s": {name: round(useful / value, 1) for name, value in medians.items()},
        "gain": round(medians["unshared"] / medians["shared"], 3),
        "computed_gain": round(medians["unshared"] / expected, 3),
        "measured_over_computed": round(expected / medians["shared"], 3),
        "step_s": {name: [round(s, 3) for s in values] for name, values in seconds.items()},
    }


def peak(model: str, shared: bool, prompt: int, completion: int, completions: int) -> dict[str, Any]:
    """In this process: MiB that a gradient adds to its peak beyond model and gradients, and the largest row."""
    from forge_async.trainer.config import TrainerConfig
    from forge_async.trainer.engine import TrainerEngine

    tokens = prompt + completion * completions
    config = TrainerConfig(device="cpu", micro_batch_tokens=tokens, share_prompts=shared)
    engine = TrainerEngine(config, model)
    if not shared:
        engine.config = dataclasses.replace(config, micro_batch_tokens=prompt + completion)
        completions = 2
    engine.gradient(of_lengths(16, 16, 1, 1))
    # No process takes its peak back: what loading took must not count as what the gradient does.
    Path("/proc/self/clear_refs").write_text("5")
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    sequences = of_lengths(prompt, completion, 1, completions)
    engine.gradient(sequences)
    lines = Path("/proc/self/status").read_text().splitlines()
    highest = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    gradients = sum(parameter.nbytes for parameter in engine.model.parameters())
    row = max(row.tokens for row in engine._rows(sequences))
    return {"row_tokens": row, "mib": round((highest - before - gradients) / 2**20)}


def memory(model: str, lengths: str) -> dict[str, Any]:
    """:func:`peak` with and without sharing, each in a process whose freed memory goes back to the system at once."""
    found = {}
    for name in ("shared", "unshared"):
        command = [sys.executable, __file__, "--model", model, "--memory", lengths, "--peak", name]
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    per_token = {name: each["mib"] / each["row_tokens"] for name, each in found.items()}
    return found | {"per_token_shared_over_unshared": round(per_token["shared"] / per_token["unshared"], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2", help="Hugging Face folder")
    parser.add_argument("--groups", type=int, default=8, help="prompts of chain_sum per step; 0 leaves it out")
    parser.add_argument("--completions", type=int, default=8, help="of each")
    parser.add_argument("--lengths", nargs="*", default=["32/256", "128/128", "512/32", "2048/32"])
    parser.add_argument("--length-groups", type=int, default=1, help="prompts per step of the table")
    parser.add_argument("--length-completions", type=int, default=4, help="of each")
    parser.add_argument("--memory", default="2048/32/16", help="prompt/completion/completions; empty leaves it out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peak", choices=["shared", "unshared"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before torch is imported, which counts cores then
    import torch

    torch.set_num_threads(1)
    if options.peak:
        lengths = [int(part) for part in options.memory.split("/")]
        print(json.dumps(peak(options.model, options.peak == "shared", *lengths)))
        return
    from forge_async.trainer.config import OptimizerConfig, TrainerConfig
    from forge_async.trainer.engine import TrainerEngine

    result: dict[str, Any] = {"repeats": options.repeats, "bound": 2.5, "table_bound": 0.15}
    if options.memory:
        result["memory"] = memory(options.model, options.memory)
        for name in ("shared", "unshared"):
            case = result["memory"][name]
            print(f"{options.memory} {name}: {case['mib']} MiB above the model, rows of {case['row_tokens']} tokens")
    engine = TrainerEngine(TrainerConfig(device="cpu", optimizer=OptimizerConfig(lr=1e-6)), options.model)
    print(f"{'':>10} {'computed tokens':>16} {'useful tok/s':>16} {'gain':>6} {'computed':>9}")
    cases = {"chain_sum": chain_sum(options.model, options.groups, options.completions)} if options.groups else {}
    for lengths in options.lengths:
        prompt, completion = (int(part) for part in lengths.split("/"))
        cases[lengths] = of_lengths(prompt, completion, options.length_groups, options.length_completions)
    for name, sequences in cases.items():
        found = compare(engine, sequences, options.repeats)
        tokens = " -> ".join(str(value) for value in found["computed_tokens"].values())
        rate = " -> ".join(f"{value:.0f}" for value in found["useful_tokens_per_s"].values())
        print(f"{name:>10} {tokens:>16} {rate:>16} {found['gain']:6.2f} {found['computed_gain']:9.2f}", flush=True)
        result[name] = found
    print(json.dumps(result))


if __name__ == "__main__":
    main()
