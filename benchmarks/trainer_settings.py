"""Which precision, compilation and activation checkpointing pay on this device: time and memory of a trainer's step.

``python benchmarks/trainer_settings.py [--model models/smollm2] [--groups 8] [--repeats 3] [--device auto]
[--only NAME ...]``

Each setting takes the same steps of chain_sum's groups (see ``shared_prefix.py``) in a process of its own, on a CPU on
one core: two steps of warm-up, in which compiled layers are compiled (their time is shown), then medians. Memory is
what the peak is above the trainer at rest before its first step: with gradients and optimizer state, which are the
same in all, and with the compiler where there is one. The settings run in turns, ``--rounds`` times. The last line is
one JSON object, with each setting over the first.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32, compiled": {"compile": True},
    "float32, selective": {"activation_checkpointing": "selective"},
    "float32, full": {"activation_checkpointing": "full"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, compiled": {"dtype": "bfloat16", "compile": True},
}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own: seconds of the first and of later steps, bytes of memory."""
    cuda = options.device == "cuda"
    if not cuda:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    sys.path.append(str(ROOT))
    import torch

    from benchmarks.shared_prefix import chain_sum
    from forge_async.trainer.config import OptimizerConfig, TrainerConfig
    from forge_async.trainer.engine import TrainerEngine

    if not cuda:
        torch.set_num_threads(1)
    config = TrainerConfig(device=options.device, optimizer=OptimizerConfig(lr=1e-6), **SETTINGS[name])
    engine = TrainerEngine(config, options.model)
    sequences = chain_sum(options.model, options.groups, 8)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    before = torch.cuda.memory_allocated() if cuda else resident
    seconds = []
    for _ in range(2 + options.repeats):
        began = time.perf_counter()
        engine.step(sequences)
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"first_s": seconds[0], "step_s": statistics.median(seconds[2:]), "mib": (peak - before) / MIB}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2", help="Hugging Face folder")
    parser.add_argument("--groups", type=int, default=8, help="prompts of chain_sum per step, with 8 completions each")
    parser.add_argument("--repeats", type=int, default=3, help="measured steps of one process")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each setting")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), choices=list(SETTINGS), metavar="NAME")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, options)))
        return
    if options.device == "auto":
        import torch

        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    fixed = ["--model", options.model, "--groups", str(options.groups), "--repeats", str(options.repeats)]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in options.only}
    for _ in range(options.rounds):
        for name in options.only:
            command = [sys.executable, __file__, "--child", name, "--device", options.device, *fixed]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    medians = {n: {key: statistics.median(r[key] for r in runs) for key in runs[0]} for n, runs in found.items()}
    base = medians[options.only[0]]
    print(f"{'':>20} {'s per step':>11} {'of default':>11} {'first step, s':>14} {'memory, MiB':>12}")
    for name, values in medians.items():
        share = values["step_s"] / base["step_s"]
        print(f"{name:>20} {values['step_s']:11.2f} {share:11.2f} {values['first_s']:14.1f} {values['mib']:12.0f}")
    ratios = {name: round(values["step_s"] / base["step_s"], 3) for name, values in medians.items()}
    print(json.dumps({"device": options.device, "over": options.only[0], "step": ratios, "medians": medians}))


if __name__ == "__main__":
    main()
