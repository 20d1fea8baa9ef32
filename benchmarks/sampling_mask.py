"""Claim: recording the sampling mask, and a seed per request, cost little of the generation's speed.

``python benchmarks/sampling_mask.py --model models/smollm2 [--top-k 20] [--batch 32] [--tokens 48] [--repeats 5]``

One engine serves the same requests with masks and seeds, with seeds, and with neither, in turns after a warm-up;
medians of tokens per second. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

from forge_async.policy import PolicyConfig, SamplingConfig
from forge_async.policy.engine import PolicyEngine

CASES = {"mask, seed": (True, True), "seed": (False, True), "neither": (False, False)}
"""Name -> whether masks are recorded, and whether each request has a seed of its own."""


def speed(engine: PolicyEngine, sampling: SamplingConfig, batch: int, seeded: bool) -> float:
    """Tokens per second of one batch."""
    began = time.perf_counter()
    running = [engine.submit([10 + i] * 16, sampling, seed=i if seeded else None) for i in range(batch)]
    tokens = sum(len(future.result().token_ids) for future in running)
    return tokens / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--top-k", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sampling = SamplingConfig(
        temperature=0.6, top_k=options.top_k, top_p=0.9, max_tokens=options.tokens, ignore_eos=True
    )
    config = PolicyConfig(max_model_len=256, max_num_seqs=options.batch, kv_cache_gib=1.0, sampling=sampling)
    engine = PolicyEngine(config, options.model)
    engine.start()
    speeds: dict[str, list[float]] = {name: [] for name in CASES}
    for repeat in range(options.repeats + 1):
        for name, (recorded, seeded) in CASES.items():
            measured = speed(engine, replace(sampling, sampling_mask=recorded), options.batch, seeded)
            if repeat:
                speeds[name].append(measured)
    engine.stop()
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    print(f"{'recorded':>10} {'tokens/s':>10}   each")
    for name, values in speeds.items():
        print(f"{name:>10} {medians[name]:10.1f}   " + " ".join(f"{value:.0f}" for value in values))
    result = {
        "model": Path(options.model).name,
        "top_k": options.top_k,
        "batch": options.batch,
        "repeats": options.repeats,
    }
    ratios = {
        "mask_over_no_mask": round(medians["mask, seed"] / medians["seed"], 3),
        "seed_over_no_seed": round(medians["seed"] / medians["neither"], 3),
    }
    print(json.dumps(result | ratios))


if __name__ == "__main__":
    main()
