"""What is too old, and what becomes of it: worked by hand. Bound 2, window 1, trainer at version 10."""

from __future__ import annotations

import numpy as np
import pytest

from forge_async.buffer import BufferConfig
from forge_async.buffer.ages import ages, kv_versions
from forge_async.buffer.gate import Gated, Versions, gate
from forge_async.errors import ConfigError, DataError
from forge_async.rollout.sequences import training_sequences
from forge_async.types import Completion, Episode, Group, Prompt, Turn

FRESH, MIXED, OLD, ANCIENT = [9, 10], [7, 9, 10], [7, 7, 7], [6, 10, 10, 10, 10]
"""Staleness: 1, 0; 3, 1, 0 (mean 1.3); 3, 3, 3; 4, 0, 0, 0, 0 (mean 0.8, beyond the window)."""


def group(*versions: list[int]) -> Group:
    episodes = []
    for index, row in enumerate(versions):
        made = np.array(row, np.int32)
        completion = Completion(np.array([5], np.int32), made, np.zeros(len(row), np.float32), made, made - 1, "stop")
        episodes.append(Episode(f"p.{index}", "p", (Turn(completion),), float(index)))
    return Group(Prompt("p", (), np.array([5], np.int32)), tuple(episodes))


def passed(made: Group, **config: object) -> Gated:
    settings = BufferConfig(**{"max_staleness": 2, "window": 1, **config})
    return gate(made, [Versions.of(episode) for episode in made.episodes], 10, settings)


@pytest.mark.parametrize(
    ("staleness_of", "kept"),
    [("oldest", ["p.0"]), ("mean", ["p.0", "p.1"]), ("newest", ["p.0", "p.1"])],
)
def test_an_episode_that_is_too_old_is_dropped_from_its_group(staleness_of: str, kept: list[str]) -> None:
    gated = passed(group(FRESH, MIXED, OLD, ANCIENT), staleness_of=staleness_of, min_group_size=1)
    assert gated.group is not None
    assert [episode.episode_id for episode in gated.group.episodes] == kept
    assert gated.dropped_episodes == 4 - len(kept)
    left = passed(group(FRESH, MIXED, OLD, ANCIENT), staleness_of=staleness_of, min_group_size=len(kept) + 1)
    assert left.group is None, "too few are left"


@pytest.mark.parametrize(
    ("staleness_of", "trained"),
    [
        ("oldest", {"p.0": [9, 10], "p.1": [9, 10], "p.3": [10, 10, 10, 10]}),
        ("mean", {"p.0": [9, 10], "p.1": [7, 9, 10], "p.3": [10, 10, 10, 10]}),
        ("newest", {"p.0": [9, 10], "p.1": [7, 9, 10], "p.3": [10, 10, 10, 10]}),
    ],
)
def test_stale_tokens_are_masked_and_their_episode_stays_in_the_baseline(staleness_of: str, trained: dict) -> None:
    gated = passed(group(FRESH, MIXED, OLD, ANCIENT), staleness_of=staleness_of, stale="mask")
    assert gated.group is not None and len(gated.group.episodes) == 4
    sequences = training_sequences(gated.group, [1.0, 2.0, 3.0, 4.0])
    assert {s.sequence_id: s.policy_versions[s.loss_mask].tolist() for s in sequences} == trained
    assert {s.sequence_id: s.advantages[-1] for s in sequences} == {"p.0": 1.0, "p.1": 2.0, "p.3": 4.0}
    assert [a.tolist() for a in kv_versions([gated.group], "keep") if len(a)] == [
        [version - 1 for version in versions] for versions in trained.values()
    ], "kv staleness is that of the same tokens"


def test_a_group_without_a_fresh_token_cannot_be_masked_into_one() -> None:
    assert passed(group(OLD, OLD), stale="mask").group is None
    assert passed(group([8, 10], [8])).group is not None, "two versions are not too old"


def test_an_episode_without_a_token_is_named() -> None:
    with pytest.raises(DataError, match=r"episode p\.1: it has no sampled token"):
        passed(group(FRESH, []))


def test_staleness_is_counted_by_token_in_versions() -> None:
    made = ages(10, [np.array([10, 9, 9], np.int32), np.array([7], np.int32)])
    assert (made.tokens, made.mean, made.max, made.histogram) == (4, 1.25, 3, (1, 2, 0, 1))
    assert ages(10, []).histogram == ()


def test_the_bound_a_config_promises() -> None:
    assert BufferConfig(max_staleness=2, window=3).token_bound == 2
    assert BufferConfig(max_staleness=2, window=3, staleness_of="newest").token_bound == 5
    with pytest.raises(ConfigError, match="staleness_of = 'mean': must be 'oldest' while window is 0"):
        BufferConfig(staleness_of="mean")
    with pytest.raises(ConfigError, match="stale = 'keep': must be one of drop, mask, resume"):
        BufferConfig(stale="keep")
    with pytest.raises(ConfigError, match="window = -1"):
        BufferConfig(window=-1)
