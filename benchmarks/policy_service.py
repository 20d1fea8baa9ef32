"""Claim: the policy service, with weights arriving, generates as fast as a bare vLLM engine without any of it.

``python benchmarks/policy_service.py --model FOLDER [--batch 32] [--windows 4] [--seconds 20] [key=value ...]``

Two processes take turns on one core: a bare engine as vLLM itself sets it up (packed layers on CPU), and a policy
replica behind the service with its RPCs. Both generate for ``--batch`` requests at once, the same prompts and sampling.
In every window of the service a new version is published from this process, on the other core, and swapped in. After
it, requests that only decode are timed by themselves and while one more version is published and pulled. ``key=value``
sets ``policy.update``. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

WARM_UP_TOKENS = 2
"""Per request, before a window begins: its first forward pass computes all prompts and takes seconds."""

WARM_UP_VERSIONS = 3
"""Before the first window: they make the pages of the store's places and of the replica's two sets."""


def workload(batch: int) -> Iterator[tuple[list[int], int, int]]:
    """(prompt, tokens to generate, seed), without end."""
    for i in itertools.count():
        yield [(17 * i + 31 * j) % 40000 + 10 for j in range(64)], 48 + 29 * i % 97, i


def bare(connection: Connection, model: str, dtype: str, batch: int, core: int) -> None:
    """A bare engine: for each number of seconds received, tokens per second of a window; ends by None."""
    os.sched_setaffinity(0, {core})
    os.environ["OMP_NUM_THREADS"] = "1"
    from forge_async.policy import SamplingConfig, vllm_compat
    from forge_async.policy.request import sampling_params

    engine = vllm_compat.build_engine(
        exchangeable=False,
        model=model,
        dtype=dtype,
        max_model_len=512,
        max_num_seqs=batch,
        max_num_batched_tokens=2048,
        block_size=32,
        kv_cache_memory_bytes=2**30,
        seed=0,
    )
    vocabulary = engine.model_config.get_vocab_size()
    connection.send("ready")
    for window, seconds in enumerate(iter(connection.recv, None)):
        requests, tokens = workload(batch), 0
        running: set[str] = set()
        counting = None
        while True:
            now = time.perf_counter()
            if counting is None and tokens >= WARM_UP_TOKENS * batch:
                counting, tokens = now, 0
            if counting is not None and now > counting + seconds:
                break
            while len(running) < batch:
                prompt, count, seed = next(requests)
                name = f"{window}-{seed}"
                params = sampling_params(SamplingConfig(max_tokens=count, ignore_eos=True), None, vocabulary)
                engine.add_request(name, {"prompt_token_ids": prompt, "cache_salt": str(window)}, params)
                running.add(name)
            for output in engine.step():
                tokens += len(output.outputs[0].token_ids)
                if output.finished:
                    running.discard(output.request_id)
        engine.abort_request(list(running))
        while engine.has_unfinished_requests():
            engine.step()
        connection.send(tokens / (now - counting))


class ServiceUnderLoad:
    """The service's side of a window."""

    def __init__(self, service: Any, store: Any, tensors: dict[str, Any], batch: int) -> None:
        self.service, self.store, self.tensors, self.batch = service, store, tensors, batch
        self.version = 0

    async def status(self) -> tuple[float, int, int]:
        """(seconds, tokens generated, live version) as of now."""
        (status,) = await self.service.fan_out("status")
        if isinstance(status, Exception):
            raise status
        return time.perf_counter(), status["generated_tokens"], status["version"]

    async def publish(self) -> None:
        from forge_async.store import TensorShard

        shards = [TensorShard.whole(name, tensor) for name, tensor in self.tensors.items()]
        await self.store.publish(self.version + 1, 0, 1, shards)
        self.version += 1
        for tensor in self.tensors.values():
            tensor.mul_(1 + 1e-5 * (self.version % 3))

    async def window(self, number: int, seconds: float) -> tuple[float, dict[str, Any]]:
        """Tokens per second of a window with one update; and the update's report."""
        from forge_async.policy import SamplingConfig

        requests, ids = workload(self.batch), set()

        async def produce() -> None:
            while True:
                prompt, count, seed = next(requests)
                name = f"{number}-{seed}"
                ids.add(name)
                await self.service.call("generate", prompt, SamplingConfig(max_tokens=count, ignore_eos=True), name)
                ids.discard(name)

        producers = [asyncio.create_task(produce()) for _ in range(self.batch)]
        first = await self._warm()
        report = await self.update()
        await asyncio.sleep(max(first[0] + seconds - time.perf_counter(), 0.0))
        last = await self.status()
        await self._end(producers, ids)
        return rate(first, last), report

    async def decoding(self, number: int, seconds: float) -> tuple[float, float]:
        """Tokens per second of requests that only decode: by themselves, and while a version is published and pulled.

        The former before and after the latter, since forward passes get slower as the requests get longer.
        """
        from forge_async.policy import SamplingConfig

        sampling = SamplingConfig(max_tokens=440, ignore_eos=True)
        ids = {f"{number}-long-{index}" for index in range(self.batch)}
        prompts = (prompt for prompt, _, _ in workload(self.batch))
        producers = [
            asyncio.create_task(self.service.call("generate", prompt, sampling, name))
            for prompt, name in zip(prompts, ids, strict=False)
        ]
        first = await self._warm()
        await asyncio.sleep(seconds)
        told = await self.status()
        await self.update()
        live = await self.status()
        await asyncio.sleep(seconds)
        last = await self.status()
        await self._end(producers, ids)
        return (rate(first, told) + rate(live, last)) / 2, rate(told, live)

    async def _warm(self) -> tuple[float, int, int]:
        before = status = await self.status()
        while status[1] < before[1] + WARM_UP_TOKENS * self.batch:
            await asyncio.sleep(0.05)
            status = await self.status()
        return status

    async def update(self) -> dict[str, Any]:
        began = time.perf_counter()
        _, (report,) = await asyncio.gather(self.publish(), self.service.fan_out("sync", self.version + 1))
        if isinstance(report, Exception):
            raise report
        return report | {"took_s": time.perf_counter() - began}

    async def _end(self, producers: list[asyncio.Task[Any]], ids: set[str]) -> None:
        for producer in producers:
            producer.cancel()
        await asyncio.gather(*producers, return_exceptions=True)
        await asyncio.gather(*(self.service.call("abort", name) for name in list(ids)))


def rate(first: tuple[float, int, int], last: tuple[float, int, int]) -> float:
    """Tokens per second between two readings of the status."""
    return (last[1] - first[1]) / (last[0] - first[0])


def load(folder: str, dtype: str) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file

    files = sorted(Path(folder).glob("*.safetensors"))
    return {name: t.to(getattr(torch, dtype)) for path in files for name, t in load_file(path).items()}


async def measure(
    options: argparse.Namespace, tensors: dict[str, Any], connection: Connection, core: int, other: int
) -> dict[str, Any]:
    from forge_async.mesh import MeshRuntime
    from forge_async.policy import PolicyConfig, UpdateConfig
    from forge_async.policy.actor import PolicyActor
    from forge_async.store import WeightStore

    settings: dict[str, Any] = dict(setting.split("=") for setting in options.update)
    settings.update({key: int(value) for key, value in settings.items() if value.isdigit()})
    update = UpdateConfig(**settings)
    config = PolicyConfig(
        dtype=options.dtype, max_model_len=512, max_num_seqs=options.batch, kv_cache_gib=1.0, update=update
    )
    async with MeshRuntime():
        store = await WeightStore.create(cores=[other])
        service = await PolicyActor.options(cores=[core], num_replicas=1).as_service(config, options.model, store=store)
        (seconds,) = await service.fan_out("setup")
        if isinstance(seconds, Exception):
            raise seconds
        loaded = ServiceUnderLoad(service, store, tensors, options.batch)
        for _ in range(WARM_UP_VERSIONS):
            await loaded.update()
        rates: dict[str, list[float]] = {"bare": [], "service": [], "decoding": [], "pulling": []}
        for number in range(options.windows):
            connection.send(options.seconds)
            rates["bare"].append(await asyncio.to_thread(connection.recv))
            whole, report = await loaded.window(number, options.seconds)
            decoding, pulling = await loaded.decoding(number, options.seconds / 4)
            for name, value in (("service", whole), ("decoding", decoding), ("pulling", pulling)):
                rates[name].append(value)
            print(
                f"window {number}: bare {rates['bare'][-1]:.1f} tok/s, service {whole:.1f}; only decoding "
                f"{decoding:.1f}, while pulling {pulling:.1f}; {report['swap']}, {report['layers']}, pause "
                f"{report['pause_ms']:.1f} ms, update in {report['took_s']:.2f} s",
                flush=True,
            )
    return {
        "model": Path(options.model).name,
        "dtype": options.dtype,
        "batch": options.batch,
        "windows": options.windows,
        "update_every_s": options.seconds,
        "service_over_bare": ratio(rates["service"], rates["bare"]),
        "pulling_over_decoding": ratio(rates["pulling"], rates["decoding"]),
        "limits": {"service_over_bare": 0.95, "pulling_over_decoding": 0.9},
        "tokens_per_s": {name: [round(rate, 1) for rate in values] for name, values in rates.items()},
    }


def ratio(one: list[float], other: list[float]) -> float:
    """Median of the windows' ratios."""
    return round(statistics.median(a / b for a, b in zip(one, other, strict=True)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("update", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args()
    other, core = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, {other})
    os.environ["OMP_NUM_THREADS"] = "1"
    tensors = load(options.model, options.dtype)
    connection, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=bare, args=(theirs, options.model, options.dtype, options.batch, core), daemon=True
    )
    process.start()
    try:
        assert connection.recv() == "ready"
        result = asyncio.run(measure(options, tensors, connection, core, other))
        connection.send(None)
        process.join(30)
    finally:
        process.kill()
        process.join()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
