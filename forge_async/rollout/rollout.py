"""From a prompt to a scored group of episodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from forge_async.errors import DataError, ForgeError, RunFailed
from forge_async.rollout.conversation import Conversation, check_messages
from forge_async.rollout.environment import Environment, Session
from forge_async.rollout.reward_worker import Scorer
from forge_async.rollout.rewards import RewardFailure, total_reward, with_own_parts
from forge_async.types import Completion, Episode, Group, IdArray, Message, Prompt, Turn

logger = logging.getLogger(__name__)

CLOSE_S = 10.0
"""Longest time for a session to close, seconds."""


class Generate(Protocol):
    """The policy as a rollout sees it. When it is cancelled, it aborts its request."""

    async def __call__(self, prompt_token_ids: IdArray, sampling: Any, session: str, episode_id: str) -> Completion: ...


OnFailure = Callable[[str, str, str], None]
"""``on_failure(episode_id, reason, message)``; reasons: ``timeout``, ``error``, ``reward_<reason>``."""


@dataclass(frozen=True)
class Limits:
    """What ends an episode while its environment has more to say."""

    turns: int | None = None
    """Most completions; None: any number."""
    tokens: int | None = None
    """Most tokens of prompt and completion together: a prompt that leaves no room for one more is not sent."""


@dataclass(frozen=True)
class Talk:
    """What became of a conversation with an environment, not yet scored."""

    turns: tuple[Turn, ...]
    text: str
    """The last completion, as the environment decodes it."""
    messages: tuple[Message, ...]
    """All of it, the prompt's messages first."""
    opening: tuple[Message, ...]
    cut: str
    """As in :class:`Episode`."""
    rewards: dict[str, float]
    """The environment's own."""


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
    limits: Limits = Limits(),
    environment_weight: float = 1.0,
) -> Group:
    """``n`` episodes of one prompt, at once. An episode that raises or takes too long is counted as failed, never
    scored.

    Args:
        generate: called with the prompt's ids, ``sampling``, the prompt's id as session (the episodes of a prompt share
            its prefix) and the episode's.
        timeout_s: longest time of one episode, its environment's included, seconds.
        truncated: with ``penalise``, an episode that ended by a limit gets reward 0.
        kept: episodes of the group that are there already, from an earlier attempt; only the others are generated.
        environment_weight: of the sum of what the environment itself gives.

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
            async with asyncio.timeout(timeout_s) as limit:
                talk = await _converse(prompt, generate, environment, sampling, episode_id, limits)
        except RunFailed:
            raise
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return fail(episode_id, "error", "its environment was cancelled, but not by this run")
        except Exception as error:  # an environment is user code; its faults are this episode's
            if limit.expired():
                return fail(episode_id, "timeout", f"not finished within {timeout_s:g} s (rollout.timeout_s)")
            message = str(error) if isinstance(error, ForgeError) else f"{type(error).__name__}: {error}"
            return fail(episode_id, "error", message)
        values = (await rewards.score(prompt, [talk.text], [talk.messages]))[0]
        if not isinstance(values, RewardFailure):
            values = with_own_parts(rewards.specs, values, talk.rewards, environment_weight, prompt)
        if isinstance(values, RewardFailure):
            return fail(episode_id, f"reward_{values.reason}", values.message)
        reward = total_reward(rewards.specs, values, environment_weight)
        episode = Episode(
            episode_id,
            prompt.prompt_id,
            talk.turns,
            reward,
            values,
            {"text": talk.text},
            opening=talk.opening,
            cut=talk.cut,
        )
        return replace(episode, reward=0.0) if truncated == "penalise" and episode.truncated else episode

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
    prompt: Prompt, generate: Generate, environment: Environment, sampling: Any, episode_id: str, limits: Limits
) -> Talk:
    """Completion and reply in turn, until the environment says nothing more or a limit is reached; the session is
    closed on every way out."""
    session = environment.session(prompt, episode_id)
    try:
        opening = check_messages(await session.start(), episode_id)
        conversation = Conversation(environment.tokenizer, prompt, opening, session.tools)
        turns: list[Turn] = []
        text, cut = "", ""
        if _full(conversation, limits):
            raise DataError(
                f"episode {episode_id}: its first prompt has {len(conversation.prompt_ids)} tokens with what the "
                f"environment adds to it; {limits.tokens} (policy.max_model_len) have to hold the completions, too."
            )
        while not cut:
            completion = await generate(
                conversation.prompt_ids, sampling, session=prompt.prompt_id, episode_id=episode_id
            )
            check_completion(completion, episode_id)
            text = environment.decode(completion.token_ids)
            reply = check_messages(await session.reply(text, completion), episode_id)
            turns.append(Turn(completion, reply))
            ended = not reply or completion.finish_reason == "length"
            cut = "turns" if not ended and len(turns) == limits.turns else ""
            conversation.completed(completion, reply, last=ended or bool(cut))
            if ended or cut:
                break
            cut = "context" if _full(conversation, limits) else ""
        rewards = await session.rewards()
        if not isinstance(rewards, dict):
            raise DataError(
                f"episode {episode_id}: the environment's rewards are {rewards!r:.200}, not a dict of parts."
            )
        return Talk(tuple(turns), text, tuple(conversation.messages), opening, cut, rewards)
    finally:
        await _close(session, episode_id)


def _full(conversation: Conversation, limits: Limits) -> bool:
    """Whether the next prompt leaves no room for a completion."""
    return limits.tokens is not None and len(conversation.prompt_ids) >= limits.tokens


async def _close(session: Session, episode_id: str) -> None:
    """Close a session within ``CLOSE_S``; a cancellation that comes meanwhile waits for it."""
    closing = asyncio.ensure_future(asyncio.wait_for(session.close(), CLOSE_S))
    cancelled: asyncio.CancelledError | None = None
    while not closing.done():
        try:
            await asyncio.wait({closing})
        except asyncio.CancelledError as error:
            cancelled = error
    if not closing.cancelled() and (failure := closing.exception()) is not None:
        logger.warning("episode %s: its environment's session did not close: %r", episode_id, failure)
    if cancelled is not None:
        raise cancelled


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
