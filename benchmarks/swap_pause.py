"""Claim: a swap by copy pauses generation for little more than a memcpy of the weights, a flip for milliseconds.

``python benchmarks/swap_pause.py --model FOLDER [--batch 8] [--repeats 20] [--ways copy-live flip-live flip-packed]``

One engine on one core generates without end for ``--batch`` requests while versions are swapped in, one after the
other, in each way. A pause reaches from the end of the last forward pass with the old weights to the start of the first
with the new ones. The memcpy of the same bytes, the C library's as replicas tune it, stands where a swap by copy does:
between two forward passes, in the same thread.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import sys
import time
from pathlib import Path
from typing import Any

LIMITS = {"copy-live": "at most 1.3 times memcpy", "flip-live": "at most 5 ms", "flip-packed": "at most 10 ms"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--ways", nargs="+", default=list(LIMITS), metavar="SWAP-LAYERS")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from forge_async.mesh.actor import WORKER_ENVIRONMENT

    environment = {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": WORKER_ENVIRONMENT["GLIBC_TUNABLES"]}  # as in a replica
    if not environment.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environment)

    import numpy as np
    import torch
    from safetensors.torch import load_file

    from forge_async.policy import PolicyConfig, SamplingConfig, UpdateConfig
    from forge_async.policy.engine import PolicyEngine

    sampling = SamplingConfig(max_tokens=900, ignore_eos=True)
    config = PolicyConfig(
        dtype=options.dtype, max_model_len=1024, max_num_seqs=options.batch, kv_cache_gib=1.0, sampling=sampling
    )
    engine = PolicyEngine(config, options.model)
    engine.start()
    dtype = getattr(torch, options.dtype)
    files = sorted(Path(options.model).glob("*.safetensors"))
    loaded = {name: tensor for path in files for name, tensor in load_file(path).items()}
    versions = [{name: (tensor * scale).to(dtype) for name, tensor in loaded.items()} for scale in (1.0, 1.001)]
    steps = StepTimes(engine)
    source = np.ones(engine.weights.plan.nbytes, dtype=np.uint8)
    destination = np.zeros_like(source)
    copies: list[float] = []
    pauses: dict[str, list[float]] = {way: [] for way in options.ways}
    prepare: dict[str, list[float]] = {way: [] for way in options.ways}
    for round_number in range(2):
        for way in options.ways:
            swap, layers = way.split("-")
            engine.weights.flips, engine.weights.config = swap == "flip", UpdateConfig(swap=swap, layers=layers)
            running = [
                engine.submit([5 + i] * 32, request_id=f"{way}-{round_number}-{i}") for i in range(options.batch)
            ]
            for repeat in range(1 + options.repeats // 2):
                prepared = engine.prepare(versions[engine.version % 2])
                pause = steps.pause_of(lambda prepared=prepared: engine.swap(engine.version + 1, prepared))
                engine.weights.discard()
                if repeat:  # the first one changes the form of the layers
                    pauses[way].append(pause)
                    prepare[way].append(prepared.cost_s if engine.weights.flips else 0.0)
                copies.append(steps.between(lambda: np.copyto(destination, source)))
            for i in range(options.batch):
                engine.abort(f"{way}-{round_number}-{i}")
            for future in running:
                future.result()
    engine.stop()

    copy_ms = statistics.median(copies)
    print(f"{engine.weights.plan.nbytes / 1e6:.0f} MB, {options.dtype}, batch {options.batch}; memcpy {copy_ms:.1f} ms")
    print(f"{'way':<12} {'pause ms':>9} {'worst':>7} {'/ memcpy':>8}  {'processor s beside':>18}  limit")
    result: dict[str, Any] = {"model": Path(options.model).name, "dtype": options.dtype, "memcpy_ms": round(copy_ms, 2)}
    for way, values in pauses.items():
        middle, beside = statistics.median(values), statistics.median(prepare[way])
        ratio = middle / copy_ms
        print(f"{way:<12} {middle:>9.2f} {max(values):>7.1f} {ratio:>8.2f}  {beside:>18.3f}  {LIMITS.get(way, '')}")
        result[way] = {
            "pause_ms": round(middle, 2),
            "over_memcpy": round(ratio, 3),
            "swaps": len(values),
            "prepare_s": round(beside, 3),
        }
    print(json.dumps(result))


class StepTimes:
    """Begin and end of each forward pass of an engine."""

    def __init__(self, engine: Any) -> None:
        self.passes: list[tuple[float, float, int]] = []
        self._work: Any = None
        self._seconds: queue.Queue[float] = queue.Queue()
        step = engine._engine.step

        def timed() -> Any:
            work, self._work = self._work, None
            if work is not None:
                began = time.perf_counter()
                work()
                self._seconds.put(time.perf_counter() - began)
            began = time.perf_counter()
            outputs = step()
            self.passes.append((began, time.perf_counter(), engine.version))
            return outputs

        engine._engine.step = timed

    def between(self, work: Any) -> float:
        """Milliseconds that ``work`` takes between two passes, in their thread."""
        self._work = work
        return self._seconds.get(timeout=60) * 1e3

    def pause_of(self, swap: Any) -> float:
        """Milliseconds between the last pass before the swap and the first after it, with requests running."""
        known = len(self.passes)
        while len(self.passes) < known + 2:
            time.sleep(0.002)
        version = swap().result().version
        while self.passes[-1][2] != version:
            time.sleep(0.002)
        after = next(i for i, passed in enumerate(self.passes) if passed[2] == version)
        return (self.passes[after][0] - self.passes[after - 1][1]) * 1e3


if __name__ == "__main__":
    main()
