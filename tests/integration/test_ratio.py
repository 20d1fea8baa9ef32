"""With unchanged weights the importance ratio of every fresh token is 1, for both shipped models."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from forge_async.checks import check_ratios, fresh_prompts, sampling_bias
from forge_async.config import Config, load_config
from forge_async.errors import RunFailed
from forge_async.mesh import MeshRuntime
from forge_async.model_zoo import is_complete, prepare
from forge_async.policy.actor import PolicyActor
from forge_async.rollout.datasets import load_rows
from forge_async.trainer.actor import TrainerActor

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
MODELS = {"tiny": ("configs/grpo_tiny.yaml", "tiny"), "smollm2": ("configs/grpo_smollm2.yaml", "smollm2")}


@pytest.fixture
def model_folder(tmp_path: Path):
    """A random tiny model of a visible spread of log-probs; SmolLM2 where it was prepared, else prepared here."""

    def folder(recipe: str) -> Path:
        if recipe == "smollm2":
            prepared = ROOT / "models" / recipe
            return prepared if is_complete(prepared) else prepare(recipe, tmp_path / recipe)
        return prepare(recipe, tmp_path / recipe, initializer_range=0.1)

    return folder


@pytest.mark.parametrize("name", MODELS)
async def test_ratios_of_fresh_samples_are_one_at_any_sampling_settings(name: str, model_folder) -> None:
    file, recipe = MODELS[name]
    model = model_folder(recipe)
    config = load_config(ROOT / file, [f"model.path={model}", "model.prepare=", "model.warmup_config="])
    prompts = fresh_prompts(config, AutoTokenizer.from_pretrained(model), load_rows(config.dataset), 512)
    async with MeshRuntime():
        policy = await PolicyActor.options(cores=[1], num_replicas=1).as_service(config.policy, str(model))
        trainer = await TrainerActor.options(cores=[0]).spawn(config.trainer, str(model))
        await asyncio.gather(policy.fan_out("setup"), trainer.call("setup"))
        for temperature in (0.7, 1.0):
            report = await check_ratios(at(config, temperature), policy, trainer, prompts)
            assert report["tokens"] >= len(prompts)
            assert report["max_error"] < 1e-4

        restricted = at(config, 0.6, top_k=20, top_p=0.9)
        assert sampling_bias(restricted) is None
        report = await check_ratios(restricted, policy, trainer, prompts)
        assert report["tokens"] >= len(prompts) and report["max_error"] < 1e-4
        differences: list[np.ndarray] = []

        class Maskless:
            """The same samples without their masks: the trainer's softmax runs over all tokens."""

            async def call(self, endpoint, *request, session):
                completion = await policy.call(endpoint, *request, session=session)
                assert completion.sampling_mask.counts.max() <= 20
                return dataclasses.replace(completion, sampling_mask=None)

        class Scoring:
            async def call(self, endpoint, sequences):
                scored = await trainer.call(endpoint, sequences)
                differences.extend(
                    values[one.loss_mask] - one.logprobs[one.loss_mask]
                    for one, values in zip(sequences, scored[0], strict=True)
                )
                return scored

        with pytest.raises(RunFailed, match="disagree on unchanged weights"):
            await check_ratios(restricted, Maskless(), Scoring(), prompts)  # type: ignore[arg-type]
        bias = float(np.concatenate(differences).mean())
        print(f"{name}: max |ratio - 1| with masks {report['max_error']:.1e}, without {bias:.3f} nats per token")
        assert -0.5 < bias < -0.01

        off = at(config, 0.6, top_k=20, top_p=0.9, sampling_mask=False)
        assert "top_p=0.9, top_k=20" in (sampling_bias(off) or "")
        assert (await check_ratios(off, policy, trainer, prompts))["max_error"] < 1e-4, "of unrestricted samples"
        if name == "smollm2":
            with pytest.raises(Exception, match=r"sampling\.top_k.*above 0 \(with top_p 0\.9 and a vocabulary"):
                await check_ratios(at(config, 0.6, top_p=0.9), policy, trainer, prompts)

        class Shifted:
            """A policy whose log-probs are those of another temperature: the fault the check exists for."""

            async def call(self, endpoint, token_ids, sampling, *rest, session):
                other = dataclasses.replace(sampling, temperature=1.0)
                completion = await policy.call(endpoint, token_ids, other, *rest, session=session)
                return dataclasses.replace(completion, logprobs=completion.logprobs.astype(np.float32))

        with pytest.raises(RunFailed, match=r"disagree on unchanged weights.*checks\.ratio_tolerance"):
            await check_ratios(at(config, 0.7), Shifted(), trainer, prompts)  # type: ignore[arg-type]


def at(config: Config, temperature: float, **settings: Any) -> Config:
    sampling = dataclasses.replace(config.policy.sampling, temperature=temperature, **settings)
    return dataclasses.replace(config, policy=dataclasses.replace(config.policy, sampling=sampling))
