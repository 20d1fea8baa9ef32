"""What one engine does, recorded in a process of its own, since an engine takes its process for itself.

``record(...)`` puts one engine through every situation that the tests of ``test_engine.py`` look at, and writes what
came back to a pickle file. The judging is done elsewhere, with HF transformers.
"""

from __future__ import annotations

import importlib
import multiprocessing
import pickle
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from forge_async.policy import PolicyConfig, SamplingConfig, UpdateConfig
from forge_async.policy.attestation import attest
from forge_async.policy.engine import PolicyEngine
from forge_async.store import tensor_digest

CONFIG = PolicyConfig(
    max_model_len=256,
    max_num_seqs=12,
    max_num_batched_tokens=512,
    kv_cache_gib=0.05,
    sampling=SamplingConfig(max_tokens=40),
    update=UpdateConfig(swap="flip", layers="packed"),
)
LONG_PROMPT = [7 + i % 50 for i in range(70)]
"""Spans two whole KV-cache blocks, so that the prefix cache is hit when the same version sees it again."""
WAYS = [("copy", "live"), ("flip", "live"), ("flip", "packed"), ("copy", "packed")]
"""After packed layers, so that each form of the layers follows the other one and itself."""
FREE = SamplingConfig(max_tokens=40, ignore_eos=True)


def prompts(count: int) -> list[list[int]]:
    return [[10 + i] * 5 + list(range(20, 40 + i)) for i in range(count)]


def raised(call: Callable[[], Any]) -> tuple[str, str]:
    """(class name, message) of the exception that ``call`` raises; ("", "") when it raises none."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def across_swap(engine: PolicyEngine, version: int, tensors: Any) -> dict[str, Any]:
    """Eight requests, and a swap once the shorter ninth one has ended."""
    pacer = engine.submit(LONG_PROMPT, SamplingConfig(max_tokens=10, ignore_eos=True))
    running = [engine.submit(prompt, FREE) for prompt in prompts(8)]
    pacer.result()
    report = engine.swap(version, tensors).result()
    return {"completions": [future.result() for future in running], "report": report}


def by_another_way(engine: PolicyEngine, swap: str, layers: str, new: dict[int, Any]) -> dict[str, Any]:
    """One swap, whatever way the one before took."""
    weights = engine.weights
    weights.flips, weights.config = swap == "flip", UpdateConfig(swap=swap, layers=layers)
    number = 1 + engine.version % 2
    running = [engine.submit(prompt, FREE) for prompt in prompts(2)]
    prepared = engine.prepare(new[number])
    before = dict(weights.tensors(prepared)) if weights.flips else None
    engine.swap(engine.version + 1, prepared).result()
    if weights.flips:
        weights.check_live(prepared)
    weights.discard()
    return {
        "weights": number,
        "prepared_equal": before is None or all(torch.equal(before[name], new[number][name]) for name in before),
        "live": {name: tensor.clone() for name, tensor in weights.tensors()},
        "packs": weights.packs,
        "packed": sum(layer.packed(weights.plan.parameters[name]).numel() for name, layer in weights.layers.items())
        if weights.packs
        else 0,
        "crossing": [future.result() for future in running],
        "completions": [engine.submit(prompt, FREE, seed=3).result() for prompt in prompts(3)],  # no ties of experts
    }


def with_a_wrong_mapping(engine: PolicyEngine, new: dict[int, Any]) -> dict[str, Any]:
    """A flip whose gate and up projections are written in each other's place, attested before it is made."""
    weights, greedy = engine.weights, SamplingConfig(max_tokens=30, temperature=0, ignore_eos=True)
    weights.flips, weights.config = True, CONFIG.update
    published = new[1 + engine.version % 2]
    digests = {name: tensor_digest(tensor) for name, tensor in published.items()}
    before = engine.submit(LONG_PROMPT, greedy).result()
    fused = next(name for name in weights.plan.writes if "layers.1" in name and len(weights.plan.writes[name]) % 2 == 0)
    (first, one), (second, other), *rest = weights.plan.writes[fused]

    def map_as(*writes: Any) -> None:
        weights.plan.writes[fused] = list(writes)
        for places in (weights._places, weights._spare, weights._workbench):  # they were made by the former mapping
            places.clear()

    map_as((second, one), (first, other), *rest)
    prepared = engine.prepare(published)
    error = raised(lambda: attest(9, digests, published, weights.digests(prepared), weights.plan.aliases))
    map_as((first, one), (second, other), *rest)
    after = engine.submit(LONG_PROMPT, greedy).result()
    attest(9, digests, published, weights.digests(engine.prepare(published)), weights.plan.aliases)
    return {"error": error, "names": (first, second), "before": before, "after": after}


def serve(connection: Connection) -> None:
    """Run each job received, (function, *arguments), in a fork of this process and answer with its exit code.

    Ends by a job of None.

    Importing vLLM takes most of an engine's start, so it is done once, before the forks.
    """
    for module in (
        "vllm.v1.engine.llm_engine",
        "vllm.v1.worker.cpu_model_runner",
        "vllm.model_executor.models.qwen3_moe",
    ):
        importlib.import_module(module)
    fork = multiprocessing.get_context("fork")
    for job in iter(connection.recv, None):
        child = fork.Process(target=job[0], args=job[1:])
        child.start()
        child.join(270)
        child.kill()
        child.join()
        connection.send(child.exitcode)


def record(model: str, versions: list[str], output: str) -> None:
    """Args: the HF folder of version 0, safetensors files of versions 1 and 2, and the pickle file to write."""
    engine = PolicyEngine(CONFIG, model, seed=1)
    seen: dict[str, Any] = {"seconds": engine.start()}
    new = {i + 1: load_file(path) for i, path in enumerate(versions)}

    first = SamplingConfig(max_tokens=40, temperature=0.7, top_k=20, ignore_eos=True)
    nucleus = SamplingConfig(max_tokens=40, temperature=1.3, top_p=0.8, ignore_eos=True)
    shapes = (first, nucleus, replace(first, top_p=0.9, temperature=0.6), replace(nucleus, top_p=1.0, min_p=0.2))
    plain = [engine.submit(prompt, FREE) for prompt in (*prompts(3), LONG_PROMPT, LONG_PROMPT)]
    shaped = [engine.submit(prompt, sampling, seed=5) for prompt in prompts(2) for sampling in shapes]
    unrecorded = engine.submit(prompts(1)[0], replace(nucleus, sampling_mask=False), seed=5)
    seen["plain"] = [future.result() for future in plain]
    seen["shaped"] = [(future.result(), sampling) for future, sampling in zip(shaped, shapes * 2, strict=True)]
    seen["unrecorded"] = unrecorded.result()

    broken = dict(new[1])
    name = "model.layers.0.self_attn.k_proj.weight"
    seen["wrong_shape"] = raised(lambda: engine.swap(1, broken | {name: broken[name][:-1]}))
    seen["missing"] = raised(lambda: engine.swap(1, {k: v for k, v in broken.items() if k != name}))
    seen["unknown"] = raised(lambda: engine.swap(1, broken | {"model.layers.9.x": broken[name]}))
    seen["unchanged"] = {name: tensor.clone() for name, tensor in engine.weights.tensors()}

    seen["kept"] = across_swap(engine, 1, new[1])
    seen["live"] = {name: tensor.clone() for name, tensor in engine.weights.tensors()}
    seen["alias"] = engine.weights.read("lm_head.weight").clone()
    seen["after"] = [engine.submit(prompt, FREE).result() for prompt in (LONG_PROMPT, prompts(1)[0])]
    seen["older"] = raised(lambda: engine.swap(0, new[1]))

    engine.set_mode("never_stop", "recompute").result()
    seen["recomputed"] = across_swap(engine, 2, new[2])

    crowd = [
        engine.submit(prompt, SamplingConfig(max_tokens=8, ignore_eos=True))
        for prompt in prompts(2 * CONFIG.max_num_seqs)
    ]
    seen["crowd"] = [future.result() for future in crowd]
    greedy = SamplingConfig(max_tokens=30, temperature=0, ignore_eos=True)
    line = engine.submit(LONG_PROMPT, greedy).result()
    seen["greedy"] = line
    stopping = int(line.token_ids[4])
    seen["stopped"] = engine.submit(LONG_PROMPT, replace(greedy, stop_token_ids=[stopping])).result()

    engine.set_mode(CONFIG.update.mode, CONFIG.update.kv).result()
    seen["ways"] = {(swap, layers): by_another_way(engine, swap, layers, new) for swap, layers in WAYS}
    seen["wrong_mapping"] = with_a_wrong_mapping(engine, new)

    seen["too_long"] = raised(lambda: engine.submit([5] * CONFIG.max_model_len))
    seen["longest"] = engine.submit([5] * (CONFIG.max_model_len - 1), FREE).result()
    seen["empty"] = raised(lambda: engine.submit([]))
    seen["outside"] = raised(lambda: engine.submit([1, 100_000]))
    endless = SamplingConfig(max_tokens=200, ignore_eos=True)
    busy = [
        engine.submit(prompt, endless, request_id=f"busy-{i}") for i, prompt in enumerate(prompts(CONFIG.max_num_seqs))
    ]
    queued = engine.submit(LONG_PROMPT, endless, request_id="queued")
    seen["twice"] = raised(lambda: engine.submit(LONG_PROMPT, endless, request_id="queued").result())
    engine.abort("queued")
    engine.abort("nobody")
    engine.abort("busy-0")
    seen["aborted"] = [queued.result(), busy[0].result()]
    seen["status"] = engine.status()

    engine._engine.step = lambda: 1 / 0
    seen["died"] = [raised(future.result) for future in busy[1:]]
    seen["dead"] = raised(lambda: engine.submit(LONG_PROMPT))
    engine.stop()
    Path(output).write_bytes(pickle.dumps(seen))
