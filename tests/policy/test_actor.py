"""The policy actor over a weight store: follow, sync, attestation, and what happens when an update is unusable."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
from monarch.actor import concurrent_endpoint
from safetensors.torch import load_file

from forge_async.errors import DataError, ForgeError, ModelNotFoundError
from forge_async.mesh import ActorDied, ActorHandle, MeshRuntime
from forge_async.mesh.processes import process_alive
from forge_async.policy import PolicyConfig, SamplingConfig, UpdateConfig
from forge_async.policy.actor import PolicyActor
from forge_async.policy.attestation import DigestMismatchError
from forge_async.policy.weight_plan import WeightMismatchError
from forge_async.store import Pulled, TensorShard, WeightStore, tensor_digest, version_digest
from forge_async.store.part_plan import plan_part

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test modules

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

CONFIG = PolicyConfig(max_model_len=512, max_num_seqs=8, kv_cache_gib=0.05)
LONG = SamplingConfig(max_tokens=400, ignore_eos=True)


class Breakable(PolicyActor):
    @concurrent_endpoint
    async def break_engine(self) -> None:
        """The next forward pass raises in the engine's thread."""
        self._ready()._engine.step = lambda: 1 / 0

    @concurrent_endpoint
    async def break_mapping(self) -> tuple[str, str]:
        """The plan writes two projections in each other's place."""
        writes = self._ready().weights.plan.writes
        (first, one), (second, other) = writes["model.layers.1.mlp.gate_up_proj.weight"]
        writes["model.layers.1.mlp.gate_up_proj.weight"] = [(second, one), (first, other)]
        self._ready().weights._places.clear()  # they were made by the former mapping
        return first, second

    @concurrent_endpoint
    async def lose_next_lease(self, torn: bool) -> None:
        """The next lease has expired, as that of a paused process; with ``torn`` other values are read by it."""
        store = self._following().store
        acquire_next = store.acquire_next

        async def expired(version: int) -> Pulled:
            store.acquire_next = acquire_next  # type: ignore[method-assign]
            lease = await acquire_next(version)
            await store.request("release", lease._lease_id)
            if torn:
                lease._views, lease.buckets = {}, {bucket: 0 * memory for bucket, memory in lease.buckets.items()}
            return lease

        store.acquire_next = expired  # type: ignore[method-assign]


async def publish(store: WeightStore, version: int, tensors: dict[str, torch.Tensor]) -> str:
    """Commit a version as a trainer of one rank does; returns its digest."""
    shards = [TensorShard.whole(name, tensor) for name, tensor in tensors.items()]
    return (await store.publish(version, 0, 1, shards)).digest


@pytest.fixture(scope="module")
async def policy(tiny_llama: Path) -> AsyncIterator[tuple[ActorHandle, WeightStore, dict[str, torch.Tensor]]]:
    weights = load_file(tiny_llama / "model.safetensors")
    async with MeshRuntime():
        store = await WeightStore.create()
        actor = await Breakable.spawn(CONFIG, str(tiny_llama), store=store, seed=3)
        seconds = await actor.call_one("setup", timeout=240)
        assert {"build_s", "plan_s", "warm_up_s"} <= seconds.keys()
        yield actor, store, weights


async def test_the_folders_own_version_is_attested(policy) -> None:
    actor, store, weights = policy
    digest = await publish(store, 0, weights)
    report = await actor.call_one("sync", 0, timeout=30)
    assert (report["version"], report["digest"]) == (0, digest)


async def test_running_requests_go_on_while_versions_arrive(policy) -> None:
    actor, store, weights = policy
    running = [asyncio.ensure_future(actor.call_one("generate", [5 + i] * 20, LONG)) for i in range(8)]
    while (await actor.call_one("status"))["generated_tokens"] < 100:
        pass
    reports = []
    for version in (1, 2):
        digest = await publish(store, version, {name: tensor * (1 + 0.1 * version) for name, tensor in weights.items()})
        await actor.call_one("follow", version)
        reports.append(await actor.call_one("sync", version, timeout=60))
        assert (reports[-1]["version"], reports[-1]["digest"]) == (version, digest)
        assert reports[-1]["in_flight"] == 8
    for completion in await asyncio.gather(*running):
        assert len(completion.token_ids) == 400 and completion.finish_reason == "length"
        assert set(completion.policy_versions) == {0, 1, 2} and (np.diff(completion.policy_versions) >= 0).all()
    status = await actor.call_one("status")
    assert (status["aborted"], status["digest_mismatches"], status["update_failed"]) == (0, 0, None)
    assert status["swaps_in_flight"] == 2 and status["digest"] == reports[-1]["digest"]


async def test_weights_are_read_back_from_the_live_parameters(policy) -> None:
    actor, _, weights = policy
    version, digests = await actor.call_one("weights")
    assert version == 2
    assert digests == {name: tensor_digest(tensor * 1.2) for name, tensor in weights.items()}
    assert version_digest(digests) == (await actor.call_one("status"))["digest"]


async def test_weights_published_in_another_dtype_are_converted_and_attested(policy) -> None:
    actor, store, weights = policy
    halves = {name: tensor.bfloat16() for name, tensor in weights.items()}
    digest = await publish(store, 3, halves)
    assert (await actor.call_one("sync", 3, timeout=30))["digest"] == digest
    _, digests = await actor.call_one("weights")
    assert digests == {name: tensor_digest(tensor.float()) for name, tensor in halves.items()}


@pytest.mark.parametrize("torn", [False, True])
async def test_a_replica_whose_lease_has_expired_goes_on(policy, torn: bool) -> None:
    """What was torn is pulled anew, and what is attested was not."""
    actor, store, weights = policy
    version = await store.latest() + 1
    digest = await publish(store, version, {name: tensor * 1.3 for name, tensor in weights.items()})
    await actor.call_one("lose_next_lease", torn)
    assert (await actor.call_one("sync", version, timeout=30))["digest"] == digest
    status = await actor.call_one("status")
    assert (status["version"], status["digest_mismatches"], status["update_failed"]) == (version, 0, None)


async def test_a_replica_reads_anew_what_the_successor_of_a_dead_trainer_begins_anew(policy) -> None:
    actor, store, weights = policy
    version = await store.latest() + 1
    plan = plan_part(tuple(TensorShard.whole(*item).spec for item in weights.items()), None, 256 << 20)
    await store.request("begin", version, 0, 1, plan, os.getpid())  # and no more comes of that
    syncing = asyncio.ensure_future(actor.call_one("sync", version, timeout=30))
    while (await store.stats())["readers"] != {version: 1}:
        pass
    digest = await publish(store, version, weights)
    assert (await syncing)["digest"] == digest
    assert (await actor.call_one("status"))["update_failed"] is None


async def test_an_overlong_prompt_is_an_error_and_the_engine_lives(policy) -> None:
    actor, _, _ = policy
    with pytest.raises(DataError, match="512 tokens, allowed are 1 to 511"):
        await actor.call_one("generate", [5] * 512)
    assert len((await actor.call_one("generate", np.full(9, 5), SamplingConfig(max_tokens=3))).token_ids) <= 3


async def test_abort_returns_the_tokens_so_far(policy) -> None:
    actor, _, _ = policy
    before = (await actor.call_one("status"))["generated_tokens"]
    running = asyncio.ensure_future(actor.call_one("generate", [9] * 9, LONG, request_id="mine"))
    while (await actor.call_one("status"))["generated_tokens"] < before + 5:
        pass
    await actor.call_one("abort", "mine")
    completion = await running
    assert completion.finish_reason == "abort" and 5 <= len(completion.token_ids) < 400


async def test_an_update_that_does_not_fit_names_the_tensor_and_stays_an_error(policy) -> None:
    """The replica follows no further versions after it."""
    actor, store, weights = policy
    name = "model.norm.weight"
    live = await store.latest()
    await publish(store, live + 1, weights | {name: weights[name][:-1]})
    for endpoint in ("sync", "follow"):
        with pytest.raises(WeightMismatchError, match=name):
            await actor.call_one(endpoint, live + 1, timeout=30)
    status = await actor.call_one("status")
    assert status["version"] == live and name in status["update_failed"]
    assert set((await actor.call_one("generate", [5] * 9)).policy_versions) == {live}


async def test_after_a_copy_that_cannot_be_attested_nothing_is_generated(policy, tiny_llama: Path) -> None:
    """The old weights are gone, so the replica refuses; a flip is refused before (tests/policy/test_engine.py)."""
    _, store, weights = policy
    latest = await store.latest()
    config = replace(CONFIG, update=UpdateConfig(swap="copy", layers="live"))
    actor = await Breakable.spawn(config, str(tiny_llama), store=store, version=0)
    await publish(store, latest + 1, {name: tensor * 1.5 for name, tensor in weights.items()})
    await actor.call_one("setup", timeout=240)
    report = await actor.call_one("sync", latest + 1, timeout=60)
    assert (report["swap"], report["layers"]) == ("copy", "live")
    names = await actor.call_one("break_mapping")
    running = asyncio.ensure_future(actor.call_one("generate", [5] * 20, LONG))
    await publish(store, latest + 2, weights)
    with pytest.raises(DigestMismatchError, match="|".join(map(re.escape, names))):
        await actor.call_one("sync", latest + 2, timeout=60)
    for request in (running, actor.call_one("generate", [5] * 20)):
        with pytest.raises(ForgeError, match="is held with digest"):
            await request
    assert (await actor.call_one("status"))["digest_mismatches"] == 1
    await actor.stop()


async def test_a_replica_whose_engine_dies_ends_its_process(policy) -> None:
    """So that its service notices, gives its requests to others and respawns it. Last of those with this engine."""
    actor, _, _ = policy
    (pid,) = actor.pids()
    await actor.call_one("break_engine")
    with pytest.raises(ActorDied):
        await actor.call_one("generate", [5] * 9, timeout=30)
    assert not actor.healthy
    assert not process_alive(pid)


async def test_without_setup_or_model_the_error_says_so(policy) -> None:
    actor = await PolicyActor.spawn(CONFIG, "/nowhere")
    with pytest.raises(ForgeError, match="call setup first"):
        await actor.call_one("generate", [5])
    with pytest.raises(ModelNotFoundError, match="/nowhere"):
        await actor.call_one("setup")
    await actor.stop()
