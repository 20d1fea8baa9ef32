"""Sampled episodes as text, so that a person can read what the model does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from forge_async.observability.jsonl import JsonLines
from forge_async.types import Episode, Group


class Decoder(Protocol):
    """The part of a tokenizer that is used here."""

    def decode(self, token_ids: Sequence[int]) -> str: ...


class EpisodeRecorder:
    """Writes ``episodes.jsonl``: up to ``episodes_per_step`` episodes of every step.

    Which ones is drawn from ``seed`` and the step, so that two runs of one config record the same places.
    """

    def __init__(self, path: Path, episodes_per_step: int = 4, seed: int = 0) -> None:
        self._lines = JsonLines(path) if episodes_per_step else None
        self._per_step, self._seed = episodes_per_step, seed

    def record(self, step: int, groups: Group | Sequence[Group], tokenizer: Decoder) -> int:
        """Record a sample of the step's episodes; returns how many."""
        if self._lines is None:
            return 0
        groups = [groups] if isinstance(groups, Group) else groups
        pairs = [(group, episode) for group in groups for episode in group.episodes]
        chosen = sorted(
            random.Random(f"{self._seed}/{step}").sample(range(len(pairs)), min(self._per_step, len(pairs)))
        )
        for index in chosen:
            self._lines.write({"step": step, **describe(*pairs[index], tokenizer)})
        return len(chosen)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def describe(group: Group, episode: Episode, tokenizer: Decoder) -> dict[str, Any]:
    """One episode as a plain record. Special tokens stay visible in the text: they are what was sampled."""
    rewards = [other.reward for other in group.episodes]
    return {
        "prompt_id": group.prompt.prompt_id,
        "episode_id": episode.episode_id,
        "reward": episode.reward,
        "reward_parts": episode.reward_parts,
        "group_reward_mean": float(np.mean(rewards)),
        "prompt": [dict(message) for message in group.prompt.messages],
        "answer": group.prompt.answer,
        "turns": [
            {
                "completion": tokenizer.decode(turn.completion.token_ids.tolist()),
                "tokens": len(turn.completion.token_ids),
                "finish_reason": turn.completion.finish_reason,
                "versions": spans(turn.completion.policy_versions),
                "mean_logprob": float(np.mean(turn.completion.logprobs)) if len(turn.completion.logprobs) else None,
                "reply": [dict(message) for message in turn.reply],
            }
            for turn in episode.turns
        ],
        "metadata": episode.metadata,
    }


def spans(versions: np.ndarray) -> list[list[int]]:
    """Run lengths of policy versions: ``[3, 3, 4]`` becomes ``[[3, 2], [4, 1]]`` (version, number of tokens)."""
    result: list[list[int]] = []
    for version in versions.tolist():
        if result and result[-1][0] == version:
            result[-1][1] += 1
        else:
            result.append([version, 1])
    return result
