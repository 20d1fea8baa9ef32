"""The actor on real processes: steps, publishing to the store, errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from trainer_samples import groups

from forge_async.errors import DataError, ForgeError
from forge_async.mesh import MeshRuntime
from forge_async.store import WeightStore, tensor_digest
from forge_async.trainer.actor import TrainerActor
from forge_async.trainer.config import OptimizerConfig, TrainerConfig
from forge_async.trainer.engine import TrainerEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.parametrize("procs", [1, 2])
async def test_steps_are_published_as_versions(tiny_llama: Path, tmp_path: Path, procs: int) -> None:
    config = TrainerConfig(procs=procs, max_sequence_tokens=64, optimizer=OptimizerConfig(lr=1e-3))
    alone = TrainerEngine(TrainerConfig(optimizer=OptimizerConfig(lr=1e-3)), tiny_llama)
    async with MeshRuntime():
        store = await WeightStore.create()
        trainer = await TrainerActor.options(procs=procs).spawn(config, tiny_llama, store=store)
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
            assert pulled.manifest.digests() == {name: tensor_digest(value) for name, value in exported.items()}
        status = (await trainer.call("status"))[0]
        assert status["version"] == 1
        assert status["trained_tokens"] == stats.trained_tokens
        assert status["busy_s"] > 0
        await store.close()
