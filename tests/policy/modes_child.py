"""What one engine does in each update mode, recorded for ``test_update_modes.py`` in a process of its own."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from forge_async.policy import PolicyConfig, SamplingConfig
from forge_async.policy.engine import PolicyEngine
from forge_async.policy.request import Request, sampling_params
from forge_async.policy.updates import RULES
from tests.policy.engine_child import LONG_PROMPT, prompts, raised

BLOCK_BYTES = 32 * 1024
"""Of the tiny llama's KV cache: 1024 bytes per token."""
CONFIG = PolicyConfig(
    max_model_len=256,
    max_num_seqs=9,
    max_num_batched_tokens=64,  # so that LONG_PROMPT's prefill takes two steps
    kv_cache_gib=64 * BLOCK_BYTES / 2**30,
    sampling=SamplingConfig(max_tokens=80),
)
FREE = SamplingConfig(max_tokens=80, ignore_eos=True)
STOPPING = SamplingConfig(max_tokens=80, min_tokens=60, stop_token_ids=list(range(4, 160)), ignore_eos=True)
"""Half of all tokens end it, from the 61st on."""


class Driver:
    """Swaps versions in turns; version v has the weights ``weights[v % len(weights)]``."""

    def __init__(self, engine: PolicyEngine, weights: list[dict[str, torch.Tensor]]) -> None:
        self.engine, self.weights, self.named = engine, weights, 0

    def use(self, mode: str, kv: str = "keep") -> None:
        """Take another mode, as a run's user does by hand."""
        self.engine.set_mode(mode, kv).result()

    def swap(self) -> Future[Any]:
        """The next version; asked for when the last one is live, as a replica's follower does."""
        self.named += 1
        return self.engine.swap(self.named, self.weights[self.named % len(self.weights)])

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The engine's first status for which ``condition`` holds."""
        deadline = time.monotonic() + 30
        while not condition(status := self.engine.status()):
            assert time.monotonic() < deadline, status
            time.sleep(0.0005)
        return status

    def after(self, tokens: int) -> dict[str, Any]:
        """Wait until that many more tokens were generated, or nothing is left to generate."""
        start = self.engine.status()["generated_tokens"]
        return self.until(
            lambda status: status["generated_tokens"] >= start + tokens or not (status["running"] or status["waiting"])
        )


def across_one(driver: Driver) -> dict[str, Any]:
    """Eight requests and one with a minimum and stop tokens run while a new version comes."""
    engine, before = driver.engine, driver.engine.status()
    lines = [LONG_PROMPT, *prompts(7)]
    running = [engine.submit(p, FREE, seed=i if i % 2 else None) for i, p in enumerate(lines)]
    stopping = engine.submit([9] * 40, STOPPING, seed=3)
    driver.after(9 * 20)
    swap = driver.swap()
    after = SamplingConfig(max_tokens=20, ignore_eos=True)
    waiting = engine.submit(LONG_PROMPT, after)  # asked for after the swap, and with a prefix of the old version's
    return {
        "report": swap.result(),
        "completions": [future.result() for future in running],
        "stopping": stopping.result(),
        "waiting": waiting.result(),
        "before": before,
        "after": engine.status(),
    }


def across_three(driver: Driver) -> dict[str, Any]:
    """Three versions come while one long request runs, and one which ends at ``max_model_len``."""
    long = driver.engine.submit(LONG_PROMPT, SamplingConfig(max_tokens=150, ignore_eos=True))
    longest = driver.engine.submit([8] * 100, SamplingConfig(max_tokens=200, ignore_eos=True))
    reports = []
    for _ in range(3):
        driver.after(70)
        reports.append(driver.swap().result())
    return {"completions": [long.result(), longest.result()], "reports": reports}


def preempted(driver: Driver) -> list[Any]:
    """More running tokens than the cache holds, so that vLLM preempts requests, and two versions meanwhile."""
    running = [driver.engine.submit(prompt, SamplingConfig(max_tokens=215, ignore_eos=True)) for prompt in prompts(9)]
    for tokens in (1100, 500):
        driver.after(tokens)
        driver.swap().result()
    return [future.result() for future in running]


def abort_while_draining(driver: Driver) -> dict[str, Any]:
    engine = driver.engine
    endless = SamplingConfig(max_tokens=150, ignore_eos=True)
    running = {name: engine.submit(LONG_PROMPT, endless, request_id=name) for name in ("first", "second", "third")}
    driver.after(30)
    swap = driver.swap()
    waiting = {name: engine.submit(LONG_PROMPT, FREE, request_id=name) for name in ("given up", "patient")}
    driver.until(lambda status: status["draining"])
    for name in ("first", "second", "given up"):
        engine.abort(name)
    aborted = {name: (running | waiting)[name].result() for name in ("first", "second", "given up")}
    still = engine.status()
    return {
        "aborted": aborted,
        "still": still,
        "third": running["third"].result(),
        "report": swap.result(),
        "patient": waiting["patient"].result(),
    }


def held(driver: Driver) -> Iterator[tuple[str, Any]]:
    """A hold, its end by a swap and by a release, and two that are void."""
    engine = driver.engine
    running = [engine.submit(prompt, FREE) for prompt in prompts(4)]
    driver.after(40)
    hold = engine.hold(driver.named)
    waiting = engine.submit(LONG_PROMPT, FREE)
    driver.until(lambda status: status["held"])
    yield "open", (hold.done(), engine.status()["running"])
    hold.result()
    yield "ran", [future.result() for future in running]
    yield "held", engine.status()
    time.sleep(0.3)
    yield "later", engine.status()
    driver.swap().result()
    yield "swapped", waiting.result()
    yield "freed", engine.status()
    engine.hold(driver.named - 1).result()
    yield "void", engine.submit(LONG_PROMPT, FREE).result()
    hold = engine.hold(driver.named)
    waiting = engine.submit(LONG_PROMPT, FREE, request_id="waiting")
    hold.result()
    engine.hold(driver.named).result()
    engine.abort("waiting")
    yield "aborted", waiting.result()
    waiting = engine.submit(LONG_PROMPT, FREE)
    engine.release()
    yield "released", waiting.result()


def remaining() -> list[tuple[int, int, int, list[int], Any]]:
    """What is left of one request's parameters after some tokens: (tokens, max, min, stop ids, seed)."""
    sampling = SamplingConfig(max_tokens=30, min_tokens=10, stop_token_ids=[5])
    rows = []
    for seed, done in ((None, 4), (7, 0), (7, 4), (7, 12), (8, 12)):
        request = Request("r", np.arange(3), sampling_params(sampling, seed, 320), Future(), token_ids=[1] * done)
        params = request.remaining_params()
        rows.append((done, params.max_tokens, params.min_tokens, params.stop_token_ids, params.seed))
        assert (request.params.max_tokens, request.params.min_tokens, request.params.seed) == (30, 10, seed)
    return rows


def record_modes(model: str, versions: list[str], output: str) -> None:
    """Args: the HF folder of version 0, safetensors files of the other weights, and the pickle file to write."""
    engine = PolicyEngine(CONFIG, model, seed=1)
    engine.start()
    driver = Driver(engine, [load_file(path) for path in versions])
    seen: dict[str, Any] = {"one": {}, "three": {}, "preempted": {}, "remaining": remaining()}
    # The second one finds its prompt in the prefix cache.
    seen["seeded"] = [engine.submit(LONG_PROMPT, FREE, seed=seed).result() for seed in (4, 4, 5)]
    for mode, kv in RULES:
        driver.use(mode, kv)
        seen["one"][mode, kv] = across_one(driver)
        seen["three"][mode, kv] = across_three(driver)
        if mode in ("never_stop", "abort_resume", "drain"):
            seen["preempted"][mode, kv] = preempted(driver)
    driver.use("drain")
    seen["abort_while_draining"] = abort_while_draining(driver)
    driver.use("blocking")
    seen["held"] = dict(held(driver))

    driver.use("drain")
    ending: list[Future[Any]] = [engine.submit(LONG_PROMPT, SamplingConfig(max_tokens=180, ignore_eos=True))]
    driver.after(10)
    ending.append(engine.hold(driver.named))
    driver.until(lambda status: status["held"])
    ending += [driver.swap(), engine.submit(LONG_PROMPT, FREE)]
    stopper = threading.Thread(target=engine.stop)
    stopper.start()
    seen["stopped"] = [raised(lambda future=future: future.result(20)) for future in ending]  # type: ignore[misc]
    stopper.join(20)
    seen["ended"] = not stopper.is_alive()
    Path(output).write_bytes(pickle.dumps(seen))
