"""Checks of running meshes: one small step, and everything it hands on compared with what it should be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from forge_async.checks import check_ratios
from forge_async.config import Config
from forge_async.doctor.finding import Finding
from forge_async.errors import ForgeError, RunFailed
from forge_async.mesh import ActorHandle, Service
from forge_async.rollout.reward_worker import Scorer
from forge_async.rollout.rewards import RewardFailure
from forge_async.steps import batch_sequences
from forge_async.store import WeightStore
from forge_async.types import Completion, Episode, Group, Prompt, Turn

SLOW_REWARD_S = 1.0
"""Seconds for one episode from which on the report advises more reward workers."""


async def check_rewards(config: Config, rewards: Scorer, prompts: Sequence[Prompt]) -> Finding:
    """That every reward function gives a finite number for a right, a wrong and an empty answer, in time."""
    check = "reward functions"
    slowest = 0.0
    for prompt in prompts[:2]:
        for text in (str(prompt.answer), "no idea", ""):
            began = time.perf_counter()
            (score,) = await rewards.score(prompt, [text])
            slowest = max(slowest, time.perf_counter() - began)
            if isinstance(score, RewardFailure):
                return Finding(
                    check,
                    False,
                    f"{score.reason} for the answer {text!r} to prompt {prompt.prompt_id}: {score.message}",
                    "Such an episode is lost. Make the function answer, or raise reward.timeout_s.",
                )
    remedy = "Scoring is slow: raise reward.num_workers." if slowest > SLOW_REWARD_S else ""
    figure = f"{len(config.reward.functions)} functions, at most {slowest * 1e3:.0f} ms an episode"
    return Finding(check, True, figure, remedy)


async def check_sampling(
    check: str, config: Config, policy: Service, trainer: ActorHandle, prompts: Sequence[Prompt]
) -> Finding:
    """That the importance ratios of fresh samples are 1, at the config's own sampling settings."""
    limit = config.ratio_tolerance
    try:
        report = await check_ratios(config, policy, trainer, prompts)
    except RunFailed as error:
        return Finding(
            check, False, str(error), "Compare both sides' temperature, sampling mask, dtype and prefix caches."
        )
    return Finding(
        check, True, f"|ratio - 1| at most {report['max_error']:.1e} of {limit:g}, {report['tokens']} tokens"
    )


async def sample_groups(config: Config, policy: Service, prompts: Sequence[Prompt], size: int = 3) -> list[Group]:
    """Fresh groups of ``size`` episodes. Rewards are made up, so that each group's are its own: 100 g + 0, 1, 4 ..."""

    async def episode(group: int, prompt: Prompt, index: int) -> Episode:
        completion: Completion = await policy.call("generate", prompt.token_ids, config.policy.sampling)
        name = f"{prompt.prompt_id}.{index}"
        return Episode(name, prompt.prompt_id, (Turn(completion),), reward=100.0 * group + index * index)

    groups = [
        asyncio.gather(*(episode(group, prompt, index) for index in range(size)))
        for group, prompt in enumerate(prompts)
    ]
    return [Group(prompt, tuple(await made)) for prompt, made in zip(prompts, groups, strict=True)]


def check_groups(config: Config, groups: Sequence[Group]) -> Finding:
    """That each trained sequence is its own episode's, and its advantage grows with its reward within its group."""
    check = "groups and advantages"
    loss = replace(config.trainer.loss, overlong_penalty=0.0)  # it may turn the order of rewards around
    rollout = replace(config.rollout, truncated="keep")
    settings = replace(config, rollout=rollout, trainer=replace(config.trainer, loss=loss))
    try:
        sequences = {sequence.sequence_id: sequence for sequence in batch_sequences(settings, groups)}
    except (ForgeError, ValueError) as error:
        return Finding(check, False, str(error), "Look at the environment and the advantages.")
    remedy = "Episodes or advantages of different groups are mixed up."
    baseline = config.trainer.loss.resolved().baseline
    for group in groups:
        found = []
        for episode in group.episodes:
            sequence, (turn,) = sequences.get(episode.episode_id), episode.turns
            ids = np.concatenate([group.prompt.token_ids, turn.completion.token_ids])
            if sequence is None or sequence.token_ids.tolist() != ids.tolist():
                return Finding(check, False, f"episode {episode.episode_id} is trained on other tokens", remedy)
            if sequence.loss_mask.tolist() != (np.arange(len(ids)) >= len(group.prompt.token_ids)).tolist():
                return Finding(
                    check,
                    False,
                    f"episode {episode.episode_id}: {int(sequence.loss_mask.sum())} tokens are trained, "
                    f"{len(turn.completion.token_ids)} were sampled",
                    "Exactly the sampled tokens are to be trained, the end token included.",
                )
            found.append(float(sequence.advantages[sequence.loss_mask][0]))
        rewards = [episode.reward for episode in group.episodes]
        ordered = all(np.diff(np.asarray(found)[np.argsort(rewards)]) > 0)
        centred = baseline not in ("group_mean", "leave_one_out") or abs(sum(found)) < 1e-4 * max(map(abs, found))
        if not (ordered and centred):
            return Finding(check, False, f"prompt {group.prompt.prompt_id}: rewards {rewards} give {found}", remedy)
    trained = sum(int(sequence.loss_mask.sum()) for sequence in sequences.values())
    return Finding(
        check, True, f"{len(groups)} groups, {len(sequences)} sequences, {trained} sampled tokens, all trained"
    )


def check_endings(config: Config, groups: Sequence[Group]) -> Finding:
    """How many completions end by themselves."""
    completions = [episode.turns[0].completion for group in groups for episode in group.episodes]
    cut = sum(completion.finish_reason == "length" for completion in completions) / len(completions)
    figure = f"{cut:.0%} of {len(completions)} completions end at policy.sampling.max_tokens"
    passed = cut <= config.rollout.truncation_warning
    remedy = (
        "" if passed else "Raise policy.sampling.max_tokens, or rollout.truncation_warning if the model is to learn it."
    )
    return Finding("completions that end", passed, figure, remedy)


async def check_update(
    config: Config,
    policy: Service,
    trainer: ActorHandle,
    store: WeightStore,
    groups: Sequence[Group],
    prompts: Sequence[Prompt],
) -> AsyncIterator[Finding]:
    """One optimizer step on ``groups``: every tensor is published anew, arrives bit by bit, and serves new requests."""
    check = "attestation of one published version"
    before = await published_digests(store)
    stats = (await trainer.call("step", batch_sequences(config, groups)))[0]
    if stats.skipped:
        yield Finding(check, False, "the step was skipped: no token has a loss", "See rollout.truncated and rewards.")
        return
    version = (await trainer.call("publish"))[0]
    published = (await trainer.call("published", version))[0]
    reports = await policy.fan_out("sync", version)
    failed = [report for report in reports if isinstance(report, BaseException)]
    if failed or any(report["digest"] != published["digest"] for report in reports):
        yield Finding(check, False, str(failed[0]) if failed else "digests differ", "Training on would be biased.")
        return
    after = await published_digests(store)
    unchanged = without_idle_experts(sorted(name for name in after if after[name] == before[name]), set(after))
    if config.policy.dtype != "float32":  # a step is less than the last bit of most vectors
        unchanged = [name for name in unchanged if "norm" not in name and "bias" not in name]
    figure = f"version {version}, {published['bytes'] / 1e6:.1f} MB, {len(after)} tensors, all changed by the step"
    remedy = "What the trainer updates must reach the generator, tied and output matrices included."
    if unchanged:
        figure = f"{len(unchanged)} of {len(after)} tensors did not change, first {unchanged[0]}"
    yield Finding(check, not unchanged, figure, remedy if unchanged else "")
    yield await check_sampling("ratios after the update, same prompts", config, policy, trainer, prompts)


def without_idle_experts(unchanged: list[str], names: set[str]) -> list[str]:
    """Without the experts that no token was sent to; but where a layer's are all unchanged, they are left in."""

    def layer(name: str) -> str:
        return name.partition(".experts.")[0]

    live = {layer(name) for name in names.difference(unchanged) if ".experts." in name}
    return [name for name in unchanged if ".experts." not in name or layer(name) not in live]


async def published_digests(store: WeightStore) -> dict[str, str]:
    """Of each tensor of the newest version, by HF name."""
    async with await store.acquire() as pulled:
        return pulled.manifest.digests


def long_prompt(config: Config, prompts: Sequence[Prompt]) -> Prompt:
    """A prompt of whole prefix-cache blocks, where there is room for one: short ones never meet the cache."""
    room = config.policy.max_model_len - config.policy.sampling.max_tokens
    wanted = min(2 * config.policy.block_size + 1, room)
    ids = np.concatenate([prompt.token_ids for prompt in prompts])
    return replace(prompts[0], prompt_id="long", token_ids=np.resize(ids, wanted).astype(np.int32))


async def check_running(run: Any, prompts: Sequence[Prompt]) -> AsyncIterator[Finding]:
    """All of the above on the meshes of ``run``, which nothing else uses."""
    config: Config = run.config
    engines = run.engines
    policy, trainer = engines.policy, engines.trainer
    yield await check_rewards(config, engines.rewards, prompts)
    asked = [*prompts, long_prompt(config, prompts)]
    yield await check_sampling("ratios of fresh samples", config, policy, trainer, asked)
    groups = await sample_groups(config, policy, prompts)
    yield check_endings(config, groups)
    yield check_groups(config, groups)
    async for finding in check_update(config, policy, trainer, engines.store, groups, asked):
        yield finding
