"""Sampled episodes, token by token, so that a person can read what the model does and what became of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forge_async.observability.jsonl import JsonLines
from forge_async.observability.pieces import Decoder, Pieces
from forge_async.types import Episode, FloatArray, Group, TrainingSequence, Turn

LOGPROB_DIGITS = 5


class EpisodeRecorder:
    """Writes ``episodes.jsonl``: up to ``episodes_per_step`` episodes of every step.

    Which ones is drawn from ``seed`` and the step, so that two runs of one config record the same places.

    Args:
        warn: as for ``JsonLines``.
    """

    def __init__(
        self,
        path: Path,
        episodes_per_step: int = 4,
        seed: int = 0,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._lines = JsonLines(path, warn) if episodes_per_step else None
        self._per_step, self._seed = episodes_per_step, seed
        self._pieces: Pieces | None = None

    def sample(self, step: int, groups: Sequence[Group]) -> list[tuple[Group, Episode]]:
        """The episodes of a step that are recorded."""
        pairs = [(group, episode) for group in groups for episode in group.episodes]
        count = min(self._per_step, len(pairs))
        return [pairs[i] for i in sorted(random.Random(f"{self._seed}/{step}").sample(range(len(pairs)), count))]

    def record(
        self,
        step: int,
        groups: Group | Sequence[Group],
        tokenizer: Decoder,
        sequences: Sequence[TrainingSequence] = (),
        trainer_logprobs: Mapping[str, FloatArray] | None = None,
        dropped: str = "",
    ) -> int:
        """Record a sample of the step's episodes; returns how many.

        Args:
            sequences: what was trained of the groups.
            dropped: why the step trained none of them, as the ledger has it; "": it did.
            trainer_logprobs: float32 [T] by sequence id: log-probs under the weights before the step, NaN where the
                trainer made none.
        """
        if self._lines is None:
            return 0
        self._pieces = self._pieces or Pieces(tokenizer)
        chosen = self.sample(step, [groups] if isinstance(groups, Group) else groups)
        for group, episode in chosen:
            own = [sequence for sequence in sequences if sequence.episode_id == episode.episode_id]
            record = describe(group, episode, tokenizer, self._pieces, own, trainer_logprobs)
            fate = {"fate": f"dropped: {dropped}"} if dropped else {}
            self._lines.write({"step": step, **record, **fate})
        return len(chosen)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def describe(
    group: Group,
    episode: Episode,
    tokenizer: Decoder,
    pieces: Pieces | None = None,
    sequences: Sequence[TrainingSequence] = (),
    trainer_logprobs: Mapping[str, FloatArray] | None = None,
) -> dict[str, Any]:
    """One episode as a plain record. What a list of episodes shows comes first, so that it is found without parsing.

    Args:
        pieces: cuts the texts of tokens; None makes one.
        sequences: what was trained of the episode.
        trainer_logprobs: as for :meth:`EpisodeRecorder.record`.
    """
    pieces = pieces or Pieces(tokenizer)
    rewards = [other.reward for other in group.episodes]
    versions = episode.policy_versions
    return {
        "episode_id": episode.episode_id,
        "reward": episode.reward,
        "tokens": len(versions),
        "oldest": int(versions.min()) if len(versions) else 0,
        "newest": int(versions.max()) if len(versions) else 0,
        "prompt_id": group.prompt.prompt_id,
        "reward_parts": episode.reward_parts,
        "group_reward_mean": sum(rewards) / len(rewards),
        "group_rewards": rewards,
        "failed": group.failed,
        "task": group.prompt.task,
        "prompt": [dict(message) for message in (*group.prompt.messages, *episode.opening)],
        "answer": group.prompt.answer,
        "turns": [
            describe_turn(turn, tokenizer, pieces, *_trained(turn, sequences, trainer_logprobs or {}))
            for turn in episode.turns
        ],
        "cut": episode.cut,
        "metadata": episode.metadata,
    }


def describe_turn(
    turn: Turn, tokenizer: Decoder, pieces: Pieces, mask: np.ndarray | None, trainer: FloatArray | None
) -> dict[str, Any]:
    """One turn with its tokens. Special tokens stay visible in the text: they are what was sampled.

    Args:
        mask: bool [R]: which tokens were trained; None: not known.
        trainer: float32 [R]: their log-probs in the trainer; None: not known.
    """
    completion = turn.completion
    token_ids = completion.token_ids.tolist()
    text = tokenizer.decode(token_ids)
    logprobs = completion.logprobs.tolist()
    return {
        "completion": text,
        "tokens": len(token_ids),
        "finish_reason": completion.finish_reason,
        "versions": spans(completion.policy_versions),
        "kv_versions": spans(completion.kv_versions),
        "mean_logprob": sum(logprobs) / len(logprobs) if logprobs else None,
        "trained": None if mask is None else spans(mask.astype(np.int32)),
        "pieces": pieces.of(token_ids, text),
        "logprobs": _rounded(logprobs),
        "trainer_logprobs": None if trainer is None else _rounded(trainer.tolist()),
        "reply": [dict(message) for message in turn.reply],
    }


def _trained(
    turn: Turn, sequences: Sequence[TrainingSequence], trainer_logprobs: Mapping[str, FloatArray]
) -> tuple[np.ndarray | None, FloatArray | None]:
    """(mask, trainer's log-probs) of a turn's tokens, out of the sequence that it is part of."""
    start = len(turn.completion.prompt_token_ids)
    whole = np.concatenate([turn.completion.prompt_token_ids, turn.completion.token_ids])
    for sequence in sequences:
        if np.array_equal(sequence.token_ids[: len(whole)], whole):
            logprobs = trainer_logprobs.get(sequence.sequence_id)
            return sequence.loss_mask[start : len(whole)], None if logprobs is None else logprobs[start : len(whole)]
    return None, None


def _rounded(values: list[float]) -> list[float | None]:
    return [round(value, LOGPROB_DIGITS) if math.isfinite(value) else None for value in values]


def spans(versions: np.ndarray) -> list[list[int]]:
    """Run lengths of policy versions: ``[3, 3, 4]`` becomes ``[[3, 2], [4, 1]]`` (version, number of tokens)."""
    result: list[list[int]] = []
    for version in versions.tolist():
        if result and result[-1][0] == version:
            result[-1][1] += 1
        else:
            result.append([version, 1])
    return result
