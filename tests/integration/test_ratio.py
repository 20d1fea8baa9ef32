"""With unchanged weights the importance ratio of every fresh token is 1, for both shipped models."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

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
MODELS = {"tiny": "configs/grpo_tiny.yaml", "smollm2": "configs/grpo_smollm2.yaml"}


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 where it was prepared, else prepared here."""
    prepared = ROOT / "models" / "smollm2"
    return prepared if is_complete(prepared) else prepare("smollm2", tmp_path_factory.mktemp("models") / "smollm2")


@torch.no_grad()
def test_smollm2_answers(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    answer = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    assert model.config.model_type == "llama" and model.config.tie_word_embeddings


@pytest.mark.parametrize("name", MODELS)
async def test_ratios_of_fresh_samples_are_one_at_any_sampling_settings(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    # The tiny one is random here, with a visible spread of log-probs.
    tiny = name == "tiny"
    model = prepare("tiny", tmp_path / "tiny", initializer_range=0.1) if tiny else request.getfixturevalue("smollm2")
    config = load_config(ROOT / MODELS[name], [f"model.path={model}", "model.prepare=", "model.warmup_config="])
    prompts = fresh_prompts(config, AutoTokenizer.from_pretrained(model), load_rows(config.dataset), 512)
    async with MeshRuntime():
        policy = await PolicyActor.options(cores=[1], num_replicas=1).as_service(config.policy, str(model))
        trainer = await TrainerActor.options(cores=[0]).spawn(config.trainer, str(model))
        await asyncio.gather(policy.fan_out("setup"), trainer.call("setup"))
        report = await check_ratios(at(config, 0.7), policy, trainer, prompts)
        assert report["tokens"] >= len(prompts) and report["max_error"] < 1e-4

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

        if name == "smollm2":
            with pytest.raises(Exception, match=r"sampling\.top_k.*above 0 \(with top_p 0\.9 and a vocabulary"):
                await check_ratios(at(config, 0.6, top_p=0.9), policy, trainer, prompts)
            return  # what follows is of the check, whatever the model
        off = at(config, 0.6, top_k=20, top_p=0.9, sampling_mask=False)
        assert "top_p=0.9, top_k=20" in (sampling_bias(off) or "")
        assert (await check_ratios(off, policy, trainer, prompts))["max_error"] < 1e-4, "of unrestricted samples"

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
