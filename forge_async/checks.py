"""What is verified before the first step: that trainer and policy agree on the log-probs of fresh samples."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from forge_async.buffer import PromptTooLong
from forge_async.config import Config
from forge_async.errors import RunFailed
from forge_async.journal import request_seed
from forge_async.mesh import ActorHandle, Service
from forge_async.rollout.datasets import PromptSource, Row
from forge_async.rollout.sequences import sampling_mask
from forge_async.types import Completion, Prompt, TrainingSequence


def sampling_bias(config: Config) -> str | None:
    """What is wrong with training on these sampling settings; None where nothing is."""
    sampling = config.policy.sampling
    if sampling.records_mask or not sampling.restricting:
        return None
    return (
        "policy.sampling.sampling_mask is off with "
        + ", ".join(f"{name}={value:g}" for name, value in sampling.restricting.items())
        + ": the sampler renormalises over the tokens it keeps, the trainer over all of them. Every importance ratio "
        "is biased below 1 (by the log of the kept probability, typically 0.1 nats per token), also on-policy."
    )


def fresh_prompts(config: Config, tokenizer: Any, rows: Sequence[Row], max_prompt_tokens: int) -> list[Prompt]:
    """The first ``checks.ratio_samples`` prompts that fit, drawn apart from the run's own order."""
    source = PromptSource(config.dataset, tokenizer, config.seed, max_prompt_tokens, rows)
    prompts: list[Prompt] = []
    for _ in range(10 * config.checks.ratio_samples):
        if len(prompts) == config.checks.ratio_samples:
            break
        try:
            prompts.append(next(source))
        except PromptTooLong:
            continue  # the run itself drops it with its reason
        except StopIteration:
            break
    return prompts


async def check_ratios(
    config: Config, policy: Service, trainer: ActorHandle, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Sample with the policy, score with the trainer, and compare: with unchanged weights every importance ratio is 1.

    Sampled as the run does; but where it records no mask of restricted sampling (see :func:`sampling_bias`), with every
    token kept, so that weights and temperature are compared at least.

    Returns:
        ``tokens`` compared, ``max_error`` = max |ratio - 1|, ``mean_error``.
    Raises:
        RunFailed: some token's ratio is off by more than ``checks.ratio_tolerance``; the message shows the first ones.
    """
    sampling = config.policy.sampling
    if not sampling.records_mask:
        sampling = sampling.unrestricted()
    completions: list[Completion] = await asyncio.gather(
        *(
            policy.call("generate", prompt.token_ids, sampling, name, request_seed(config.seed, name), session=name)
            for name, prompt in ((f"check-{index}", prompt) for index, prompt in enumerate(prompts))
        )
    )
    sequences = [
        completion_sequence(p.prompt_id, c, sampling.temperature) for p, c in zip(prompts, completions, strict=True)
    ]
    scored: list[np.ndarray] = (await trainer.call("logprobs", sequences))[0]
    worst: list[tuple[float, str]] = []
    errors = []
    for sequence, trainer_logprobs in zip(sequences, scored, strict=True):
        mask = sequence.loss_mask
        error = np.abs(np.expm1(trainer_logprobs[mask] - sequence.logprobs[mask]))
        errors.append(error)
        at = int(error.argmax())
        where = int(np.flatnonzero(mask)[at])
        worst.append(
            (
                float(error[at]),
                f"prompt {sequence.sequence_id}, token {where} (id {sequence.token_ids[where]}): policy "
                f"{sequence.logprobs[where]:.5f}, trainer {trainer_logprobs[where]:.5f}",
            )
        )
    every = np.concatenate(errors)
    report = {"tokens": len(every), "max_error": float(every.max()), "mean_error": float(every.mean())}
    if not every.max() <= config.ratio_tolerance:  # also when NaN
        shown = "; ".join(text for _, text in sorted(worst, reverse=True)[:3])
        raise RunFailed(
            f"trainer and policy disagree on unchanged weights: |ratio - 1| is up to {every.max():.2e} (mean "
            f"{every.mean():.1e}) over {len(every)} tokens, checks.ratio_tolerance is "
            f"{config.ratio_tolerance:g}. {shown}. Training would be biased, so the run stops; compare the two "
            "sides' dtype and sampling settings."
        )
    return report


def completion_sequence(name: str, completion: Completion, temperature: float) -> TrainingSequence:
    """What the trainer scores to compare log-probs: a completion after its prompt, without an advantage."""
    before, after = len(completion.prompt_token_ids), len(completion.token_ids)
    return TrainingSequence(
        sequence_id=name,
        token_ids=np.concatenate([completion.prompt_token_ids, completion.token_ids]).astype(np.int32),
        loss_mask=np.arange(before + after) >= before,
        logprobs=np.concatenate([np.zeros(before, np.float32), completion.logprobs]).astype(np.float32),
        policy_versions=np.concatenate([np.full(before, -1, np.int32), completion.policy_versions]).astype(np.int32),
        advantages=np.zeros(before + after, np.float32),
        temperature=temperature,
        sampling_mask=sampling_mask([completion]),
    )
