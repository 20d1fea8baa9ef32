"""The actor on real processes: steps, publishing to the store, errors."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from monarch.actor import concurrent_endpoint
from safetensors.torch import load_file
from trainer_samples import groups

from forge_async.errors import DataError, ForgeError
from forge_async.mesh import ActorHandle, MeshRuntime
from forge_async.store import StoreConfig, WeightStore, tensor_digest, version_digest, writer
from forge_async.trainer.actor import TrainerActor
from forge_async.trainer.config import OptimizerConfig, TrainerConfig
from forge_async.trainer.engine import TrainerEngine

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test modules


class Trainer(TrainerActor):
    """A trainer whose copies of weights to the store can be slowed down."""

    @concurrent_endpoint
    async def delay_copies(self, seconds: float) -> None:
        write = writer.write_shards

        def slowly(*args: object) -> bytes:
            time.sleep(seconds)
            return write(*args)  # type: ignore[arg-type]

        writer.write_shards = slowly


pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.parametrize("procs", [1, 2])
async def test_steps_are_published_as_versions(tiny_llama: Path, tmp_path: Path, procs: int) -> None:
    config = TrainerConfig(procs=procs, max_sequence_tokens=64, optimizer=OptimizerConfig(lr=1e-3))
    alone = TrainerEngine(TrainerConfig(optimizer=OptimizerConfig(lr=1e-3)), tiny_llama)
    async with MeshRuntime():
        store = await WeightStore.create()
        trainer = await Trainer.options(procs=procs).spawn(config, tiny_llama, store=store)
        with pytest.raises(ForgeError, match="setup first"):
            await trainer.call("step", groups())
        await trainer.call("setup")
        assert await trainer.call("publish") == [0] * procs
        first = (await trainer.call("published", 0))[0]
        assert first["version"] == 0

        stats = (await trainer.call("step", groups()))[0]
        assert stats.version == 1
        assert stats.loss == pytest.approx(alone.step(groups()).loss, rel=1e-4)
        await trainer.call("publish")
        second = (await trainer.call("published", 1))[0]
        assert (await store.latest(), second["version"]) == (1, 1)
        assert second["digest"] != first["digest"]

        with pytest.raises(DataError, match="at most 64"):
            await trainer.call("step", groups(prompt=80))
        logprobs = (await trainer.call("logprobs", groups()))[0]
        for got, wanted in zip(logprobs, alone.logprobs(groups()), strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-4)

        await trainer.call("export_hf", str(tmp_path / "export"))
        exported = load_file(tmp_path / "export" / "model.safetensors")
        async with await store.acquire(1) as pulled:
            assert pulled.manifest.digest == second["digest"]
            assert pulled.manifest.digests == {name: tensor_digest(value) for name, value in exported.items()}
        status = (await trainer.call("status"))[0]
        assert status["version"] == 1
        assert status["trained_tokens"] == stats.trained_tokens
        assert status["busy_s"] > 0
        await check_publishing_beside_a_step(trainer, store, tmp_path)
        await store.close()


async def check_publishing_beside_a_step(trainer: ActorHandle, store: WeightStore, folder: Path) -> None:
    """What is published is the version that ``publish`` was called at, although a step begins before it is copied."""
    await trainer.call("step", groups(seed=2))
    await trainer.call("export_hf", str(folder / "version2"))
    await trainer.call("delay_copies", 1.0)
    began = time.monotonic()
    blocked = (await trainer.call("status"))[0]["publish_blocked_s"]
    await trainer.call("publish")
    with pytest.raises(ForgeError, match="called before for version 2"):
        await trainer.call("publish")
    handed_over = time.monotonic() - began
    step = (await trainer.call("step", groups(seed=3)))[0]
    assert step.version == 3
    assert time.monotonic() - began > 0.8 > handed_over, "the optimizer waits for the copies, publish does not"
    assert (await trainer.call("status"))[0]["publish_blocked_s"] > blocked
    published = (await trainer.call("published", 2))[0]
    assert published["digest"] == version_digest(load_file(folder / "version2" / "model.safetensors"))
    await trainer.call("publish")
    await trainer.call("export_hf", str(folder / "version3"))
    assert await store.latest() == 3, "an export waits for the version in publication"


async def test_weights_are_cast_once_by_the_trainer(tiny_llama: Path) -> None:
    expected = {name: tensor.bfloat16() for name, tensor in load_file(tiny_llama / "model.safetensors").items()}
    async with MeshRuntime():
        store = await WeightStore.create(StoreConfig(dtype="bfloat16"))
        trainer = await TrainerActor.spawn(TrainerConfig(), tiny_llama, store=store)
        await trainer.call("setup")
        await trainer.call("publish")
        assert (await trainer.call("published", 0))[0]["digest"] == version_digest(expected)
        assert (await store.stats())["segment_bytes"] < 2.2 * sum(tensor.numel() for tensor in expected.values()) + 8192
        await store.close()
