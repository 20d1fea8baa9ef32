"""The staleness gate: which tokens of a finished group may be trained now, and which never again. Pure functions.

With S = ``max_staleness``, H = S + ``window`` and the trainer at version u, the staleness of a token of version v is
u - v. An episode is *too old* when the token that ``staleness_of`` names (or the mean over its tokens) is staler than
S, or any token is staler than H. ``stale: drop`` removes such an episode, and so does ``resume``, after which the
buffer may have it generated anew; ``mask`` leaves its tokens staler than S out of the loss. So of what is trained:

=================  ================================================================  ==================
``staleness_of``   per episode                                                       every token at most
=================  ================================================================  ==================
``oldest``         no token is staler than S                                         S
``mean``           the mean over the trained tokens is at most S                     H
``newest``         the newest trained token is at most S                             H
=================  ================================================================  ==================

Staleness only grows: what is too old stays so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from forge_async.buffer.config import BufferConfig
from forge_async.errors import DataError
from forge_async.types import Episode, Group


@dataclass(frozen=True)
class Versions:
    """What the gate needs to know of the policy versions of an episode's sampled tokens."""

    oldest: int
    newest: int
    total: int
    """Their sum: the mean is compared in whole numbers."""
    count: int

    @classmethod
    def of(cls, episode: Episode) -> Versions:
        if not any(len(turn.completion.token_ids) for turn in episode.turns):
            raise DataError(f"episode {episode.episode_id}: it has no sampled token, so nothing of it can be trained.")
        versions = episode.policy_versions
        return cls(int(versions.min()), int(versions.max()), int(versions.sum()), len(versions))


@dataclass(frozen=True)
class Gated:
    """A group as it may be trained, and what the gate took from it."""

    group: Group | None
    """None when it cannot be trained any more."""
    dropped_episodes: int = 0
    masked_episodes: int = 0
    fresh: tuple[Episode, ...] = ()
    """What was not dropped, where something was; too few to be trained alone when ``group`` is None."""


def too_old(versions: Versions, version: int, config: BufferConfig) -> bool:
    """Whether an episode is too old at the trainer's ``version``."""
    bound = config.max_staleness
    if version - versions.oldest > config.horizon:
        return True
    if config.staleness_of == "mean":
        return version * versions.count - versions.total > bound * versions.count
    decisive = versions.oldest if config.staleness_of == "oldest" else versions.newest
    return version - decisive > bound


def gate(group: Group, versions: Sequence[Versions], version: int, config: BufferConfig) -> Gated:
    """``group`` without what is too old at the trainer's ``version``.

    Args:
        versions: of each episode, in the group's order.

    Returns:
        No group when fewer than ``min_group_size`` episodes are left, or no token.
    """
    old = [too_old(ages, version, config) for ages in versions]
    count = sum(old)
    if not count:
        return Gated(group)
    since = version - config.max_staleness
    if config.stale == "mask":
        if all(too and ages.newest < since for too, ages in zip(old, versions, strict=True)):
            return Gated(None, masked_episodes=count)
        episodes = tuple(
            replace(episode, trained_since=since) if too else episode
            for episode, too in zip(group.episodes, old, strict=True)
        )
        return Gated(replace(group, episodes=episodes), masked_episodes=count)
    episodes = tuple(episode for episode, too in zip(group.episodes, old, strict=True) if not too)
    enough = len(episodes) >= config.min_group_size
    return Gated(replace(group, episodes=episodes) if enough else None, dropped_episodes=count, fresh=episodes)
