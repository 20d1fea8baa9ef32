"""The doctor passes a sound config, and finds each fault that is planted in its meshes, its data or its settings."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from monarch.actor import concurrent_endpoint
from transformers import AutoTokenizer

from forge_async import steps
from forge_async.checks import fresh_prompts
from forge_async.config import Config, load_config
from forge_async.doctor import Finding, report
from forge_async.doctor.at_rest import (
    check_completion_limit,
    check_mask,
    check_memory,
    check_staleness,
    check_template,
)
from forge_async.doctor.running import (
    check_groups,
    check_rewards,
    check_sampling,
    check_update,
    long_prompt,
    sample_groups,
    without_idle_experts,
)
from forge_async.policy.actor import PolicyActor
from forge_async.rollout.config import RewardConfig
from forge_async.rollout.datasets import load_rows
from forge_async.rollout.reward_worker import RewardPool
from forge_async.run import engines, launch
from forge_async.testing.models import ModelFactory
from forge_async.trainer import gradient_check
from forge_async.trainer.actor import TrainerActor
from forge_async.trainer.engine import TrainerEngine
from forge_async.types import Prompt
from tests.trainer.faulty_trainers import NextLabels, PerRankDenominator

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test modules

pytestmark = [pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]


class CarelessPolicy(PolicyActor):
    """A replica that can be made to use keys and values of older weights."""

    @concurrent_endpoint
    async def forget_salts(self) -> None:
        from vllm.v1.engine.llm_engine import LLMEngine

        add_request = LLMEngine.add_request

        def unsalted(self: Any, request_id: str, prompt: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            return add_request(self, request_id, prompt | {"cache_salt": "one for all"}, *args, **kwargs)

        LLMEngine.add_request = unsalted


class CarelessTrainer(TrainerActor):
    """A trainer that can be made to publish a tensor's first values for ever."""

    @concurrent_endpoint
    async def keep_back(self, name: str, back: bool) -> None:
        engine = self._ready()
        if not back:
            del engine.hf_shards  # type: ignore[misc]
            return
        old = {shard.name: shard.tensor.clone() for shard in engine.hf_shards()}
        shards_of = engine.hf_shards

        def stale() -> list[Any]:
            return [dataclasses.replace(s, tensor=old[name]) if s.name == name else s for s in shards_of()]

        engine.hf_shards = stale  # type: ignore[method-assign]


@pytest.fixture
def config(tiny_model: ModelFactory, tmp_path: Path) -> Config:
    model = tiny_model("llama", tied=False)
    settings = [f"model.path={model}", "model.prepare=", "model.warmup_config=", f"output_dir={tmp_path}"]
    settings += ["policy.max_model_len=256", "trainer.max_sequence_tokens=256", "policy.sampling.max_tokens=24"]
    settings += ["metrics.console=false", "metrics.tensorboard=false", "checks.ratio_samples=0"]
    return load_config(ROOT / "configs/grpo_tiny.yaml", [*settings, "trainer.optimizer.lr=3e-3"])


@pytest.fixture
def prompts(config: Config) -> list[Prompt]:
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    many = dataclasses.replace(config, checks=dataclasses.replace(config.checks, ratio_samples=4))
    return fresh_prompts(many, tokenizer, load_rows(config.dataset), 200)


@contextlib.asynccontextmanager
async def started(run: Any, config: Config) -> AsyncIterator[Any]:
    """In the place of ``launch``: a run that is up already."""
    assert config.checks.ratio_samples == 0 and not config.resume
    yield run


@pytest.mark.engine
async def test_faults_in_running_meshes_are_found(
    config: Config, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engines, "PolicyActor", CarelessPolicy)
    monkeypatch.setattr(engines, "TrainerActor", CarelessTrainer)
    async with launch(config) as live:
        policy, trainer = live.engines.policy, live.engines.trainer
        asked = [*prompts, long_prompt(config, prompts)]
        monkeypatch.setattr(report, "launch", lambda quiet: started(live, quiet))
        found = [finding async for finding in report.examine(config)]
        failed = [finding for finding in found if not finding.passed]
        # A random model does not end by itself: that is the one thing to find.
        assert [finding.check for finding in failed] == ["completions that end"], failed
        assert [finding.check.partition(":")[0] for finding in found] == [
            *("chat template", "completion limit", "sampling mask", "staleness bound", "memory", "gradient"),
            *("reward functions", "ratios of fresh samples", "completions that end", "groups and advantages"),
            *("attestation of one published version", "ratios after the update, same prompts"),
        ]
        assert "no trained token is older than 2 steps; at most 40 prompts are open" in found[3].figure

        class Hot:
            """Wrong temperature: tokens are sampled by another one than the config's."""

            async def call(self, endpoint: str, token_ids: Any, sampling: Any, *rest: Any, session: str) -> Any:
                hot = dataclasses.replace(sampling, temperature=0.7)
                return await policy.call(endpoint, token_ids, hot, *rest, session=session)

        finding = await check_sampling("hot", config, Hot(), trainer, prompts)  # type: ignore[arg-type]
        assert not finding.passed and "disagree on unchanged weights" in finding.figure

        groups = await sample_groups(config, policy, prompts)
        with monkeypatch.context() as patch:
            advantages = steps.batch_advantages
            patch.setattr(steps, "batch_advantages", lambda *args: [row[::-1] for row in advantages(*args)])
            assert "rewards" in check_groups(config, groups).figure
            swapped = [dataclasses.replace(groups[0], prompt=groups[1].prompt), *groups[1:]]
            assert "other tokens" in check_groups(config, swapped).figure

        async def update() -> list[Finding]:
            return [
                finding async for finding in check_update(config, policy, trainer, live.engines.store, groups, asked)
            ]

        await trainer.call("keep_back", "lm_head.weight", True)
        attested, sampled = await update()
        assert not attested.passed and "lm_head.weight" in attested.figure
        assert not sampled.passed, "the trainer computes with the matrix it has kept back"
        await trainer.call("keep_back", "lm_head.weight", False)
        assert all(finding.passed for finding in await update())

        await policy.call("forget_salts")
        assert (await check_sampling("fills the cache", config, policy, trainer, asked)).passed
        attested, sampled = await update()
        assert attested.passed and not sampled.passed
        assert "prompt long" in sampled.figure, "the only one of whole prefix-cache blocks"

        (tmp_path / "stuck.py").write_text("import time\n\ndef blocks(prompt, text):\n    time.sleep(60)\n")
        monkeypatch.chdir(tmp_path)
        pool = await RewardPool.create(RewardConfig(functions=["stuck:blocks"], timeout_s=0.5))
        finding = await check_rewards(config, pool, prompts)
        assert not finding.passed and "timeout" in finding.figure
        await pool.stop()


def test_faults_in_settings_and_data_are_found(config: Config, prompts: list[Prompt]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    assert check_template(tokenizer, prompts).passed and check_staleness(config).passed
    assert check_completion_limit(config, tokenizer, prompts).passed and check_memory(config).passed
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(int(prompts[0].token_ids[0]))
    doubled = dataclasses.replace(prompts[0], token_ids=prompts[0].token_ids.repeat(2))
    finding = check_template(tokenizer, [doubled])
    assert not finding.passed and "2 BOS tokens" in finding.figure
    sampling = dataclasses.replace(config.policy.sampling, max_tokens=1)
    short = dataclasses.replace(config, policy=dataclasses.replace(config.policy, sampling=sampling))
    finding = check_completion_limit(short, tokenizer, prompts)
    assert not finding.passed and "max_tokens is 1" in finding.figure
    unmasked = dataclasses.replace(config.policy.sampling, top_k=20, top_p=0.9, sampling_mask=False)
    masked = dataclasses.replace(unmasked, sampling_mask=True)
    for sampling in (config.policy.sampling, masked, unmasked):
        policy = dataclasses.replace(config.policy, sampling=sampling)
        finding = check_mask(dataclasses.replace(config, policy=policy))
        assert finding.passed == (sampling is not unmasked)
    assert "top_p=0.9" in finding.figure and "biased" in finding.figure
    experts = {f"layers.{layer}.mlp.experts.{expert}.w" for layer in (0, 1) for expert in (0, 1)}
    idle = ["layers.0.mlp.experts.1.w", "layers.1.mlp.experts.0.w", "layers.1.mlp.experts.1.w", "norm"]
    assert without_idle_experts(idle, experts | {"norm"}) == idle[1:], "a layer whose experts all stay is suspicious"
    greedy = dataclasses.replace(config.policy, kv_cache_gib=1e6)
    assert not check_memory(dataclasses.replace(config, policy=greedy)).passed


@pytest.mark.parametrize(("engine", "found"), [(PerRankDenominator, "processes"), (NextLabels, "one_by_one")])
async def test_a_trainer_with_a_wrong_gradient_is_found(
    config: Config, monkeypatch: pytest.MonkeyPatch, engine: type[TrainerEngine], found: str
) -> None:
    """Its ranks divide by their own tokens; its labels are shifted by one."""
    monkeypatch.setattr(gradient_check, "gradient_check", partial(gradient_check.gradient_check, engine=engine))
    finding = await report.check_gradient(config)
    assert not finding.passed and f"({found})" in finding.figure and f"depends on {found}" in finding.remedy


async def test_the_exit_code_tells(config: Config, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def saying(*findings: Finding) -> Any:
        async def examine(_: Config) -> AsyncIterator[Finding]:
            for finding in findings:
                yield finding

        return examine

    monkeypatch.setattr(
        report, "examine", saying(Finding("one", True, "1 [/INST]"), Finding("two", False, "2", "Turn [a] off."))
    )
    assert not await report.diagnose(config)
    output = capsys.readouterr().out
    assert (
        "FAILED two" in output and "Turn [a] off." in output and "1 [/INST]" in output and "1 checks failed" in output
    )
    monkeypatch.setattr(report, "examine", saying(Finding("one", True, "1")))
    assert await report.diagnose(config)
