"""Exactness over layouts: whatever trains and whatever generates, log-probs after a swap are the trained weights'.

Every trainer takes real optimizer steps and publishes through the store; every generator swaps to each version; the
log-probs of what it samples are held against Hugging Face transformers on the trainer's own export.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from monarch.actor import concurrent_endpoint
from safetensors.torch import load_file, save_file

from forge_async.errors import ConfigError, ForgeError
from forge_async.mesh import ActorHandle, MeshRuntime, ReplicaDied, Service
from forge_async.policy import PolicyConfig, SamplingConfig
from forge_async.policy.actor import PolicyActor
from forge_async.policy.attestation import DigestMismatchError
from forge_async.policy.engine import PolicyEngine
from forge_async.policy.life_cycle import spans_of
from forge_async.store import TensorShard, WeightStore
from forge_async.testing.models import ModelFactory
from forge_async.trainer.actor import TrainerActor
from forge_async.trainer.config import OptimizerConfig, ParallelismConfig, TrainerConfig
from forge_async.types import Completion, TrainingSequence

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test modules

TOLERANCE = 1e-4
CONFIG = PolicyConfig(max_model_len=512, max_num_seqs=8, kv_cache_gib=0.05)
LONG = SamplingConfig(max_tokens=400, ignore_eos=True)
SHORT = SamplingConfig(max_tokens=32, ignore_eos=True)
PROMPTS = [[10 + i] * 5 + list(range(20, 40 + 7 * i)) for i in range(3)]
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"family": "llama", "tied": True, "num_attention_heads": 4, "head_dim": 32},
    "experts": {"family": "qwen3_moe", "tied": False},
}
TRAINERS = {
    "dense": {"one": (1, {}), "fsdp": (2, {}), "tp": (2, {"tp": 2})},
    "experts": {"ep": (2, {"ep": 2})},
}


class Faulty(PolicyActor):
    """A policy whose rank 1 can be told to leave one tensor as it was."""

    @concurrent_endpoint
    async def leave_out(self, name: str) -> None:
        if self._rank == 1:
            assert self._engine is not None
            writes = self._engine.weights.plan.writes
            for parameter, pieces in writes.items():
                writes[parameter] = [(source, piece) for source, piece in pieces if source != name]
            weights = self._engine.weights
            for places in (weights._places, weights._spare, weights._workbench):
                places.clear()  # they were made by the former mapping

    @concurrent_endpoint
    async def cpu_seconds(self) -> float:
        return time.process_time()


class Generators:
    """One model's store, two replicas of one process, and one replica of two processes."""

    def __init__(self, kind: str, model: Path, store: WeightStore, pair: Service, split: Service) -> None:
        self.kind, self.model, self.store, self.pair, self.split = kind, model, store, pair, split
        self.references: dict[int, Path] = {0: model}
        """The HF folder of each version published so far."""

    def handles(self) -> list[ActorHandle]:
        handles = [replica.handle for service in (self.pair, self.split) for replica in service.replicas]
        return [handle for handle in handles if handle is not None]


@pytest.fixture(scope="module", params=MODELS)
async def generators(request: pytest.FixtureRequest, tiny_model: ModelFactory) -> AsyncIterator[Generators]:
    model = tiny_model(**MODELS[request.param])
    split = PolicyConfig(**(vars(CONFIG) | {"tensor_parallel_size": 2}))
    cores = sorted(os.sched_getaffinity(0))
    async with MeshRuntime():
        store = await WeightStore.create()
        services = await asyncio.gather(
            PolicyActor.options(cores=[[cores[0]], [cores[-1]]], num_replicas=2).as_service(CONFIG, str(model), store),
            Faulty.options(procs=2, cores=[cores]).as_service(split, str(model), store, on_respawn=set_up),
        )
        for reports in await asyncio.gather(*(service.fan_out("setup") for service in services)):
            assert all(isinstance(report, dict) for report in reports), reports
        yield Generators(request.param, model, store, *services)
        await store.close()


async def set_up(handle: ActorHandle) -> None:
    await handle.call("setup")


def reference_logprobs(folder: Path, completions: list[Completion]) -> list[np.ndarray]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    result = []
    for completion in completions:
        ids = torch.tensor(np.concatenate([completion.prompt_token_ids, completion.token_ids]), dtype=torch.long)
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        result.append(logprobs[len(completion.prompt_token_ids) - 1 :].numpy())
    return result


def furthest(folder: Path, completions: list[Completion]) -> float:
    wanted = reference_logprobs(folder, completions)
    return max(float(np.abs(c.logprobs - w).max()) for c, w in zip(completions, wanted, strict=True))


def sequences(seed: int) -> list[TrainingSequence]:
    """Three groups of three; lengths and advantages vary."""
    random = np.random.default_rng(seed)
    made = []
    for index in range(9):
        prompt, total = 12 + index // 3, 20 + index
        tokens = random.integers(4, 260, total).astype(np.int32)
        mask = np.arange(total) >= prompt
        made.append(
            TrainingSequence(
                sequence_id=str(index),
                token_ids=tokens,
                loss_mask=mask,
                logprobs=np.where(mask, -3.0, 0.0).astype(np.float32),
                policy_versions=np.where(mask, 0, -1).astype(np.int32),
                advantages=np.where(mask, float(index % 3 - 1) + 0.25, 0.0).astype(np.float32),
            )
        )
    return made


async def publish(generators: Generators, layout: str, folder: Path) -> int:
    """Train as many steps as versions there are, so that the version is a new one; publish and export it."""
    procs, parallelism = TRAINERS[generators.kind][layout]
    config = TrainerConfig(
        procs=procs,
        parallelism=ParallelismConfig(**parallelism),
        max_sequence_tokens=64,
        micro_batch_tokens=48,
        optimizer=OptimizerConfig(lr=5e-3),
    )
    cores = sorted(os.sched_getaffinity(0))
    trainer = await TrainerActor.options(procs=procs, cores=cores).spawn(config, generators.model, generators.store)
    await trainer.call("setup")
    steps = len(generators.references)
    for step in range(steps):
        await trainer.call("step", sequences(step))
    assert await trainer.call("publish") == [steps] * procs
    await trainer.call("published", steps)
    await trainer.call("export_hf", str(folder))
    await trainer.stop()
    generators.references[steps] = folder
    return steps


async def publish_other(generators: Generators, folder: Path) -> int:
    """Publish weights that no trainer made, as the next version."""
    version = len(generators.references)
    shutil.copytree(generators.references[version - 1], folder)
    generator = torch.Generator().manual_seed(version)
    weights = load_file(folder / "model.safetensors")
    changed = {
        name: tensor + 0.2 * tensor.std(correction=0) * torch.randn(tensor.shape, generator=generator)
        for name, tensor in weights.items()
    }
    changed["model.norm.weight"] = weights["model.norm.weight"] + 0.1
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    shards = [TensorShard.whole(name, tensor) for name, tensor in changed.items()]
    await generators.store.publish(version, 0, 1, shards)
    generators.references[version] = folder
    return version


@pytest.mark.parametrize("layout", ["one", "fsdp", "tp", "ep"])
async def test_every_generator_computes_what_every_trainer_trained(
    generators: Generators, layout: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if layout not in TRAINERS[generators.kind]:
        pytest.skip("of the other model")
    version = await publish(generators, layout, tmp_path_factory.mktemp(layout) / "export")
    for number, handle in enumerate(generators.handles()):
        before = (await handle.call_one("status"))["version"]
        assert before < version  # replicas swap one by one: this one has not yet
        report = (await handle.call("sync", version, timeout=60))[0]
        assert report["version"] == version
        completions = await asyncio.gather(*(handle.call_one("generate", prompt, SHORT) for prompt in PROMPTS))
        assert all(set(c.policy_versions) == {version} for c in completions)
        error = furthest(generators.references[version], completions)
        print(f"{generators.kind}: trainer {layout}, generator {number}: {error:.1e}")
        assert error < TOLERANCE
        assert furthest(generators.references[before], completions) > 100 * TOLERANCE


async def test_a_split_replica_swaps_under_running_requests(generators: Generators, tmp_path: Path) -> None:
    version = await publish_other(generators, tmp_path / "other")
    split = generators.split
    running = [asyncio.ensure_future(split.call("generate", prompt * 2, LONG)) for prompt in PROMPTS]
    doomed = asyncio.ensure_future(split.call("generate", [7] * 9, LONG, request_id="doomed"))
    while (await split.call("status"))["generated_tokens"] < 400:
        pass
    await split.fan_out("abort", "doomed")
    assert (await doomed).finish_reason == "abort"
    (report,) = await split.fan_out("sync", version, timeout=60)
    assert (report["version"], report["in_flight"]) == (version, 3)
    completions = await asyncio.gather(*running)
    for completion in completions:
        assert [span[0] for span in spans_of(completion.policy_versions)] == [version - 1, version]
        assert completion.finish_reason == "length" and len(completion.token_ids) == 400
    # Up to the swap the log-probs are the older weights', and the token it fell on is exact.
    wanted = reference_logprobs(generators.references[version - 1], completions)
    for completion, logprobs in zip(completions, wanted, strict=True):
        end = spans_of(completion.policy_versions)[0][2]
        assert np.abs(completion.logprobs[:end] - logprobs[:end]).max() < TOLERANCE
        assert np.abs(completion.logprobs[end] - logprobs[end]) > TOLERANCE


async def test_a_split_replica_keeps_what_each_mode_promises(generators: Generators, tmp_path: Path) -> None:
    if generators.kind != "dense":
        pytest.skip("once is enough")
    (handle,) = [replica.handle for replica in generators.split.replicas]
    assert handle is not None
    for mode in ("abort_resume", "abort_retry", "drain", "blocking", "never_stop"):
        await handle.call("set_mode", mode, "keep")
        version = await publish_other(generators, tmp_path / mode)
        before = (await handle.call_one("status"))["generated_tokens"]
        medium = replace(LONG, max_tokens=100)
        running = [asyncio.ensure_future(generators.split.call("generate", prompt, medium)) for prompt in PROMPTS]
        while (await handle.call_one("status"))["generated_tokens"] < before + 100:
            pass
        if mode == "blocking":
            await generators.split.fan_out("hold", version - 1, timeout=60)
            running.append(asyncio.ensure_future(generators.split.call("generate", PROMPTS[0], SHORT)))
        (report,) = await generators.split.fan_out("sync", version, timeout=60)
        assert report["version"] == version, mode
        completions = await asyncio.gather(*running)
        old, new = (reference_logprobs(generators.references[wanted], completions) for wanted in (version - 1, version))
        seen = [[span[0] for span in spans_of(completion.policy_versions)] for completion in completions]
        one = {"abort_retry": version, "drain": version - 1, "blocking": version - 1}.get(mode)
        assert seen[:3] == [[version - 1, version] if one is None else [one]] * 3, mode
        assert seen[3:] == [[version]] * len(seen[3:]), mode  # what was held back started with the new weights
        if mode == "never_stop":
            continue  # on the old keys and values; the test above looks at those
        for completion, older, newer in zip(completions, old, new, strict=True):
            wanted = np.where(completion.policy_versions == version, newer, older)
            assert np.abs(completion.logprobs - wanted).max() < TOLERANCE, mode


async def test_a_split_replica_is_addressed_by_rank_0_and_sleeps_when_idle(generators: Generators) -> None:
    (handle,) = [replica.handle for replica in generators.split.replicas]
    assert handle is not None
    with pytest.raises(ForgeError, match="called on rank 1 of a replica"):
        await handle.call("generate", PROMPTS[0], SHORT)
    with pytest.raises(ForgeError, match="parts of tensors only"):
        await handle.call("weights")
    before = await handle.call("cpu_seconds")
    await asyncio.sleep(2)
    after = await handle.call("cpu_seconds")
    assert max(b - a for a, b in zip(before, after, strict=True)) < 0.5


async def test_a_mismatch_on_one_rank_is_an_error_of_the_replica(generators: Generators, tmp_path: Path) -> None:
    (handle,) = [replica.handle for replica in generators.split.replicas]
    assert handle is not None
    version = await publish_other(generators, tmp_path / "other")
    await handle.call("leave_out", "model.norm.weight")
    with pytest.raises(DigestMismatchError, match=rf"version {version}: rank 1 holds model\.norm\.weight with other"):
        await handle.call("sync", version, timeout=60)


async def test_when_a_rank_dies_the_replica_is_replaced(generators: Generators) -> None:
    """Last: the new replica has the newest version when it takes requests, and none of the old one's faults."""
    if generators.kind != "dense":
        pytest.skip("once is enough")
    split, version = generators.split, max(generators.references)
    old = list(split.replicas[0].pids)
    running = asyncio.ensure_future(split.call("generate", PROMPTS[0], LONG))
    while (await split.call("status"))["running"] == 0:
        pass
    os.kill(old[1], signal.SIGKILL)
    with pytest.raises(ReplicaDied):
        await running
    completion = await split.call("generate", PROMPTS[0], SHORT, timeout=120)
    assert not [
        name for name in os.listdir("/dev/shm") if "cpushm" in name
    ]  # which a kill would leave, and the next replica stumble over
    assert not set(old) & set(split.replicas[0].pids)
    assert set(completion.policy_versions) == {version}
    assert furthest(generators.references[version], [completion]) < TOLERANCE


def test_heads_that_cannot_be_split_are_named(tiny_llama: Path) -> None:
    engine = PolicyEngine(PolicyConfig(**(vars(CONFIG) | {"tensor_parallel_size": 3})), tiny_llama)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size = 3.*a divisor of num_attention_heads \(2\)"):
        engine.start()
