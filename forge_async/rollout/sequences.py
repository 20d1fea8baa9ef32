"""Scored groups to training sequences: the trained ids are the sampled ids, never a re-encoding of their text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from forge_async.errors import DataError
from forge_async.rollout.rollout import check_completion
from forge_async.types import Completion, Episode, Group, SamplingMask, TrainingSequence


def training_sequences(group: Group, advantages: Sequence[float], truncated: str = "keep") -> list[TrainingSequence]:
    """One sequence per episode; more where a later turn's prompt does not continue the earlier tokens (a fork), or was
    answered at another temperature.

    Tokens older than their episode's ``trained_since`` have no loss.

    Args:
        advantages: one number per episode of the group, given to each of its sampled tokens.
        truncated: ``mask`` leaves episodes that ended by their token limit out (they have no trained token); other
            values keep them.

    Raises:
        DataError: an episode has no turn, no sampled token, or lacks a per-token record; the message names it.
    """
    if len(advantages) != len(group.episodes):
        raise DataError(
            f"prompt {group.prompt.prompt_id}: {len(advantages)} advantages for {len(group.episodes)} episodes."
        )
    sequences: list[TrainingSequence] = []
    for episode, advantage in zip(group.episodes, advantages, strict=True):
        if not np.isfinite(advantage):
            raise DataError(f"episode {episode.episode_id}: its advantage is {advantage}.")
        if not episode.turns:
            raise DataError(f"episode {episode.episode_id}: it has no turn, so nothing of it can be trained.")
        if truncated == "mask" and episode.truncated:
            continue
        made = _episode_sequences(episode, float(advantage))
        sequences.extend(_since(made, episode.trained_since) if episode.trained_since else made)
    return sequences


def _since(sequences: Sequence[TrainingSequence], version: int) -> Iterator[TrainingSequence]:
    """Leave tokens older than ``version`` out of the loss; a sequence with no other token is left out itself."""
    for sequence in sequences:
        mask = sequence.loss_mask & (sequence.policy_versions >= version)
        if mask.any():
            yield replace(sequence, loss_mask=mask)


def _episode_sequences(episode: Episode, advantage: float) -> list[TrainingSequence]:
    chains: list[list[Completion]] = []
    tokens: list[int] = []
    for turn in episode.turns:
        completion = turn.completion
        check_completion(completion, episode.episode_id)
        prompt = completion.prompt_token_ids.tolist()
        continues = bool(chains) and chains[-1][-1].temperature == completion.temperature
        if continues and prompt[: len(tokens)] == tokens:
            chains[-1].append(completion)
        else:
            chains.append([completion])
        tokens = prompt + completion.token_ids.tolist()
    return [
        replace(
            _join(chain, episode.episode_id + (f"/{index}" if index else ""), advantage),
            episode_id=episode.episode_id,
        )
        for index, chain in enumerate(chains)
    ]


def _join(chain: Sequence[Completion], sequence_id: str, advantage: float) -> TrainingSequence:
    """One sequence of completions of one temperature, each of whose prompts begins with everything before it."""
    last = chain[-1]
    token_ids = np.concatenate([last.prompt_token_ids, last.token_ids]).astype(np.int32)
    length = len(token_ids)
    loss_mask = np.zeros(length, dtype=bool)
    logprobs = np.zeros(length, dtype=np.float32)
    versions = np.full(length, -1, dtype=np.int32)
    advantages = np.zeros(length, dtype=np.float32)
    for completion in chain:
        start = len(completion.prompt_token_ids)
        sampled = slice(start, start + len(completion.token_ids))
        loss_mask[sampled] = True
        logprobs[sampled] = completion.logprobs
        versions[sampled] = completion.policy_versions
        advantages[sampled] = advantage
    return TrainingSequence(
        sequence_id, token_ids, loss_mask, logprobs, versions, advantages, last.temperature, sampling_mask(chain)
    )


def sampling_mask(chain: Sequence[Completion]) -> SamplingMask | None:
    """Kept ids of every token of a sequence that ends with the last completion; None where none has any recorded.

    Tokens of prompts, replies and unrecorded completions have the whole vocabulary.
    """
    if all(completion.sampling_mask is None for completion in chain):
        return None
    parts, done = [], 0
    for completion in chain:
        start, count = len(completion.prompt_token_ids), len(completion.token_ids)
        parts += [SamplingMask.whole(start - done), completion.sampling_mask or SamplingMask.whole(count)]
        done = start + count
    return SamplingMask.join(parts)
