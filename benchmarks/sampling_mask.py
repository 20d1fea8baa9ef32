"""Claim: recording the sampling mask costs little of the generation's speed.

``python benchmarks/sampling_mask.py --model models/smollm2 [--top-k 20] [--batch 32] [--tokens 48] [--repeats 5]``

One engine serves the same seeded requests with and without recording, in turns after a warm-up; medians of tokens per
second. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import replace

from forge_async.policy import PolicyConfig, SamplingConfig
from forge_async.policy.engine import PolicyEngine


def speed(engine: PolicyEngine, sampling: SamplingConfig, batch: int) -> float:
    """Tokens per second of one batch."""
    began = time.perf_counter()
    running = [engine.submit([10 + i] * 16, sampling, seed=i) for i in range(batch)]
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
    speeds: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(options.repeats + 1):
        for recorded in (True, False):
            measured = speed(engine, replace(sampling, sampling_mask=recorded), options.batch)
            if repeat:
                speeds[recorded].append(measured)
    engine.stop()
    with_mask, without = (statistics.median(speeds[recorded]) for recorded in (True, False))
    print(f"{'mask':>8} {'tokens/s':>10}   each")
    for name, recorded in (("recorded", True), ("off", False)):
        each = " ".join(f"{value:.0f}" for value in speeds[recorded])
        print(f"{name:>8} {statistics.median(speeds[recorded]):10.1f}   {each}")
    result = {"model": options.model, "top_k": options.top_k, "batch": options.batch, "repeats": options.repeats}
    print(json.dumps(result | {"with_over_without": round(with_mask / without, 3)}))


if __name__ == "__main__":
    main()
