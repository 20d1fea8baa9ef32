"""Claim: ``never_stop`` with ``kv: keep`` reaches at least 0.97 of the throughput without updates; and what the other
modes cost on the same workload.

``python benchmarks/update_modes.py [--model models/smollm2] [--every 4] [--train 2] [--repeats 3] ...``

One engine on one core answers requests of the same lengths in every mode, more than it has places for, drawn from a
log-normal distribution. Every few seconds there are new weights (two perturbed copies of the model's in turns), already
in this process's memory; they are prepared by a thread of a replica's priority (policy.update.pull_nice), as in a run
wherever a core is idle: the trainer's here, or with ``--busy`` none, so that the engine's is shared. A version comes so
many seconds after the last one is live. In mode blocking a train step of fixed length
stands between the hold and the swap; in the others the trainer is thought to work beside. The run without updates and
never_stop with keep are repeated in turns, and their ratio is the median over pairs; the other modes are run once. A
request longer than the time between updates would never end in abort_retry, so the longest one is chosen to fit, and
updates stop after 20. Figures per mode:

* tokens/s: tokens of completions per second of wall time, from the first request to the last completion;
* discarded: generated tokens thrown away; recomputed: tokens whose keys and values were thrown away;
* staleness of a token: versions published when its completion ended, minus the token's own version;
* idle: share of the time in which the engine did nothing.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

    from forge_async.policy.engine import PolicyEngine

LIMIT = 0.97
"""Least throughput of never_stop with kv: keep, relative to no update at all."""


@dataclass(frozen=True)
class Work:
    prompts: list[np.ndarray]
    """int32 [P] each."""
    lengths: list[int]
    """Tokens of each completion."""


class Publisher:
    """Makes new weights live every few seconds, as the mode wants it, until told to stop."""

    def __init__(
        self, engine: PolicyEngine, weights: list[dict[str, torch.Tensor]], every: float, train: float, holds: bool
    ) -> None:
        self.engine, self.weights, self.every, self.train, self.holds = engine, weights, every, train, holds
        self.published = self._first = engine.version
        """The trainer's version."""
        self.swap_ms: list[float] = []
        """How long each swap took."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        """As a replica's follower, at its priority: one version after the other, until the swap after stop()."""
        from forge_async.mesh.processes import stand_back

        stand_back(self.engine.config.update.pull_nice)
        while self.published - self._first < 20 and not self._stop.wait(self.every):
            if self.holds:
                self.engine.hold(self.published).result()
                time.sleep(self.train)
            self.published += 1
            report = self.engine.swap(self.published, self.weights[self.published % len(self.weights)]).result()
            self.engine.weights.discard()
            self.swap_ms.append(report.pause_ms)

    def __enter__(self) -> Publisher:
        if self.every:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self.every:
            self._thread.join()


def draw(count: int, median: float, sigma: float, longest: int, vocabulary: int, seed: int) -> Work:
    """Requests of always the same lengths; each seed has prompts of its own, so that no prefix cache knows them."""
    import numpy as np

    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(median), sigma, count).astype(int), 4, longest)
    random = np.random.default_rng(seed)
    prompts = [random.integers(5, vocabulary, random.integers(16, 48), dtype=np.int32) for _ in range(count)]
    return Work(prompts, lengths.tolist())


def perturbed(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The weights after a step of noise, a hundredth of each tensor's spread."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + (0.01 * tensor.float().std() * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in tensors.items()
    }


def measure(engine: PolicyEngine, work: Work, publisher: Publisher) -> dict[str, float]:
    """All requests once, from an idle engine."""
    from forge_async.policy import SamplingConfig

    before, staleness, mixed = engine.status(), [], []

    def ended(future: Future[Any]) -> None:
        versions = future.result().policy_versions
        staleness.append(publisher.published - versions)
        mixed.append(len(set(versions.tolist())) > 1)

    began = time.perf_counter()
    with publisher:
        futures = []
        for prompt, length in zip(work.prompts, work.lengths, strict=True):
            futures.append(engine.submit(prompt, SamplingConfig(max_tokens=length, ignore_eos=True)))
            futures[-1].add_done_callback(ended)
        tokens = sum(len(future.result().token_ids) for future in futures)
        wall, after = time.perf_counter() - began, engine.status()
    assert tokens == sum(work.lengths)
    grown = {k: after[k] - before[k] for k in ("busy_s", "idle_s", "swaps", "discarded_tokens", "recomputed_tokens")}
    flat = [float(value) for values in staleness for value in values]
    return {
        "tokens_per_s": tokens / wall,
        "wall_s": wall,
        "updates": grown["swaps"],
        "discarded_tokens": grown["discarded_tokens"],
        "recomputed_tokens": grown["recomputed_tokens"],
        "staleness_mean": statistics.mean(flat),
        "staleness_max": max(flat),
        "idle_share": grown["idle_s"] / (grown["idle_s"] + grown["busy_s"]),
        "mixed_completions": sum(mixed),
        "swap_ms": statistics.median(publisher.swap_ms or [0.0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2", help="a Hugging Face folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--places", type=int, default=8, help="requests decoded at once")
    parser.add_argument("--median", type=float, default=20, help="of the completions' lengths, tokens")
    parser.add_argument("--sigma", type=float, default=0.8, help="of their logarithm")
    parser.add_argument("--longest", type=int, default=64)
    parser.add_argument("--every", type=float, default=4, help="seconds between updates")
    parser.add_argument("--train", type=float, default=2, help="seconds of a train step in mode blocking")
    parser.add_argument("--repeats", type=int, default=3, help="of the two runs that are compared")
    parser.add_argument("--pair", action="store_true", help="only the two runs that are compared")
    parser.add_argument("--busy", action="store_true", help="no core but the engine's is idle: new weights share it")
    options = parser.parse_args()
    from forge_async.mesh.actor import WORKER_ENVIRONMENT
    from forge_async.mesh.processes import HOST_CORES_VARIABLE

    os.environ.setdefault(HOST_CORES_VARIABLE, ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    own = {max(os.sched_getaffinity(0))}
    os.sched_setaffinity(0, own)
    if options.busy:
        os.environ[HOST_CORES_VARIABLE] = ",".join(map(str, own))
    if any(os.environ.get(name) != value for name, value in WORKER_ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | WORKER_ENVIRONMENT)  # as a replica has it

    from forge_async.policy import PolicyConfig, UpdateConfig, checkpoint
    from forge_async.policy.engine import PolicyEngine
    from forge_async.policy.updates import RULES

    config = PolicyConfig(
        dtype=options.dtype,
        max_model_len=options.longest + 64,
        max_num_seqs=options.places,
        kv_cache_gib=1.0,
    )
    engine = PolicyEngine(config, options.model, seed=0)
    engine.start()
    base = {name: tensor.clone() for name, tensor in engine.weights.tensors()}
    vocabulary = int(str(checkpoint.read_config(options.model)["vocab_size"]))
    weights = [perturbed(base, seed) for seed in (1, 2)]
    seeds = itertools.count()

    def work() -> Work:
        return draw(options.requests, options.median, options.sigma, options.longest, vocabulary, next(seeds))

    lengths = work().lengths
    print(f"{len(lengths)} requests, {sum(lengths)} tokens, the longest {max(lengths)}", flush=True)

    modes = {"no update": UpdateConfig()}
    modes |= {f"{m} {kv}" if m == "never_stop" else m: UpdateConfig(mode=m, kv=kv) for m, kv in RULES}
    if options.pair:
        modes = {name: modes[name] for name in ("no update", "never_stop keep")}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in modes}
    measure(engine, replace(work(), lengths=[8] * len(lengths)), Publisher(engine, weights, 0, 0, False))  # warm-up
    for repeat in range(options.repeats):
        for name, update in modes.items():
            if repeat and name not in ("no update", "never_stop keep"):
                continue
            engine.set_mode(update.mode, update.kv).result()
            every = 0 if name == "no update" else options.every
            runs[name].append(
                measure(engine, work(), Publisher(engine, weights, every, options.train, update.rules.holds))
            )
            print(f"{name}: { {key: round(value, 2) for key, value in runs[name][-1].items()} }", flush=True)
    engine.stop()

    rows = {name: {key: statistics.median(run[key] for run in of) for key in of[0]} for name, of in runs.items()}
    columns = list(rows["no update"])
    print(f"{'':22}" + "".join(f"{column:>18}" for column in columns))
    for name, row in rows.items():
        print(f"{name:22}" + "".join(f"{row[column]:>18.2f}" for column in columns))
    ratios = [
        kept["tokens_per_s"] / free["tokens_per_s"]
        for kept, free in zip(runs["never_stop keep"], runs["no update"], strict=True)
    ]
    result = {
        "model": os.path.basename(options.model),
        "dtype": options.dtype,
        "requests": options.requests,
        "tokens": sum(lengths),
        "every_s": options.every,
        "spare_core": not options.busy,
        "train_s": options.train,
        "repeats": options.repeats,
        "never_stop_keep_over_no_update": round(statistics.median(ratios), 4),
        "each": [round(ratio, 4) for ratio in ratios],
        "limit": LIMIT,
        "modes": {name: {key: round(value, 3) for key, value in row.items()} for name, row in rows.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
