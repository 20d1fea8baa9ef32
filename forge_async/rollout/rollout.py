"""From a prompt to a scored group of episodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from forge_async.errors import DataError, ForgeError, RunFailed
from forge_async.rollout.environment import Environment
from forge_async.rollout.reward_worker import Scorer
from forge_async.rollout.rewards import RewardFailure, weighted_sum
from forge_async.types import Completion, Episode, Group, IdArray, Prompt, Turn

logger = logging.getLogger(__name__)


class Generate(Protocol):
    """The policy as a rollout sees it. When it is cancelled, it aborts its request."""

    async def __call__(self, prompt_token_ids: IdArray, sampling: Any, session: str, episode_id: str) -> Completion: ...


OnFailure = Callable[[str, str, str], None]
"""``on_failure(episode_id, reason, message)``; reasons: ``timeout``, ``error``, ``reward_<reason>``."""


async def rollout_group(
    prompt: Prompt,
    generate: Generate,
    environment: Environment,
    rewards: Scorer,
    n: int,
    sampling: Any,
    timeout_s: float,
    truncated: str = "keep",
    on_failure: OnFailure | None = None,
    kept: Sequence[Episode] = (),
) -> Group:
    """``n`` episodes of one prompt, at once. An episode that raises or takes too long is counted as failed, never
    scored.

    Args:
        generate: called with the prompt's ids, ``sampling``, the prompt's id as session (the episodes of a prompt share
            its prefix) and the episode's.
        timeout_s: longest generation of one episode, seconds.
        truncated: with ``penalise``, an episode that ended by its token limit gets reward 0.
        kept: episodes of the group that are there already, from an earlier attempt; only the others are generated.

    Raises:
        RunFailed: from ``generate`` or ``rewards``: going on is pointless. Other errors are the episodes' fates.
    """

    def fail(episode_id: str, reason: str, message: str) -> None:
        logger.debug("episode %s failed (%s): %s", episode_id, reason, message)
        if on_failure is not None:
            on_failure(episode_id, reason, message)

    there = {episode.episode_id: episode for episode in kept}

    async def attempt(index: int) -> Episode | None:
        episode_id = f"{prompt.prompt_id}.{index}"
        if episode_id in there:
            return there[episode_id]
        try:
            async with asyncio.timeout(timeout_s):
                turns, text = await _converse(prompt, generate, environment, sampling, episode_id)
        except RunFailed:
            raise
        except TimeoutError:
            return fail(episode_id, "timeout", f"not finished within {timeout_s:g} s (rollout.timeout_s)")
        except Exception as error:  # an environment is user code; its faults are this episode's
            message = str(error) if isinstance(error, ForgeError) else f"{type(error).__name__}: {error}"
            return fail(episode_id, "error", message)
        values = (await rewards.score(prompt, [text]))[0]
        if isinstance(values, RewardFailure):
            return fail(episode_id, f"reward_{values.reason}", values.message)
        reward = weighted_sum(rewards.specs, values)
        if truncated == "penalise" and turns[-1].completion.finish_reason == "length":
            reward = 0.0
        return Episode(episode_id, prompt.prompt_id, turns, reward, values, {"text": text})

    tasks = [asyncio.ensure_future(attempt(index)) for index in range(n)]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    episodes = tuple(episode for episode in results if episode is not None)
    return Group(prompt, episodes, failed=n - len(episodes))


async def _converse(
    prompt: Prompt, generate: Generate, environment: Environment, sampling: Any, episode_id: str
) -> tuple[tuple[Turn, ...], str]:
    completion = await generate(prompt.token_ids, sampling, session=prompt.prompt_id, episode_id=episode_id)
    check_completion(completion, episode_id)
    text = environment.decode(completion.token_ids)
    reply = await environment.reply(prompt, (), text)
    if reply:
        raise DataError(f"episode {episode_id}: the environment replied; only single-turn environments are supported.")
    return (Turn(completion),), text


def check_completion(completion: Completion, episode_id: str) -> None:
    """Refuse a completion that cannot be trained.

    Raises:
        DataError: it was aborted, is empty, a per-token record is missing or of another length, or the sampling mask
            lacks a sampled token.
    """
    count = len(completion.token_ids)
    if completion.finish_reason == "abort":
        raise DataError(f"episode {episode_id}: its request was aborted after {count} tokens.")
    if count == 0:
        raise DataError(f"episode {episode_id}: no token was sampled.")
    for name in ("logprobs", "policy_versions", "kv_versions"):
        entries = getattr(completion, name)
        if entries is None or len(entries) != count:
            have = "none" if entries is None else len(entries)
            raise DataError(f"episode {episode_id}: {name} has {have} entries for {count} sampled tokens.")
    mask = completion.sampling_mask
    if mask is None:
        return
    if len(mask) != count:
        raise DataError(f"episode {episode_id}: sampling_mask has {len(mask)} entries for {count} sampled tokens.")
    kept = mask.has(completion.token_ids)
    if not kept.all():
        at = int(kept.argmin())
        raise DataError(
            f"episode {episode_id}: sampled token {at} (id {completion.token_ids[at]}) is not in its own sampling mask."
        )
