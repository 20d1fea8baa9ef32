"""Training sequences for the trainer's tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from forge_async.trainer.engine import TrainerEngine
from forge_async.types import SamplingMask, TrainingSequence


def sequence(
    name: str,
    prompt: list[int],
    completion: list[int],
    *,
    logprobs: list[float] | None = None,
    advantage: float = 1.0,
    temperature: float = 1.0,
) -> TrainingSequence:
    """A prompt and the tokens sampled after it; behaviour log-probs default to -3."""
    length, start = len(prompt) + len(completion), len(prompt)
    mask = np.arange(length) >= start
    behaviour = np.zeros(length, dtype=np.float32)
    behaviour[start:] = -3.0 if logprobs is None else logprobs
    return TrainingSequence(
        sequence_id=name,
        token_ids=np.asarray(prompt + completion, dtype=np.int32),
        loss_mask=mask,
        logprobs=behaviour,
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=np.where(mask, advantage, 0.0).astype(np.float32),
        temperature=temperature,
    )


def groups(
    count: int = 3, size: int = 3, prompt: int = 12, completion: int = 5, vocabulary: int = 260, seed: int = 0
) -> list[TrainingSequence]:
    """``count`` prompts with ``size`` completions each; lengths and advantages vary."""
    random = np.random.default_rng(seed)
    made = []
    for group in range(count):
        shared = random.integers(4, vocabulary, prompt + group).tolist()
        for index in range(size):
            own = random.integers(4, vocabulary, completion + 2 * index).tolist()
            made.append(sequence(f"{group}.{index}", shared, own, advantage=float(index - 1) + 0.25 * group))
    return made


def forked(vocabulary: int = 260, seed: int = 0) -> list[TrainingSequence]:
    """Prefixes shared at several levels: two episodes that fork after their first and second turn, whose shared turns
    are trained in each fork; two completions that begin alike; one that is another's beginning; and one on its own."""
    random = np.random.default_rng(seed)

    def draw(count: int) -> list[int]:
        return random.integers(4, vocabulary, count).tolist()

    prompt, made = draw(13), []
    for episode in range(2):
        turn, reply, second = draw(9), draw(4), draw(10)
        for index, tail in enumerate(([*second, *draw(5)], [*second, *draw(3)], draw(6))):
            whole = sequence(f"{episode}/{index}", prompt, [*turn, *reply, *tail], advantage=1.5 - 2.0 * episode)
            replied = slice(len(prompt) + len(turn), len(prompt) + len(turn) + len(reply))
            for values in (whole.loss_mask, whole.logprobs, whole.advantages):
                values[replied] = 0
            noise = random.normal(0, 0.3, len(whole.token_ids)).astype(np.float32)
            logprobs = np.where(whole.loss_mask, whole.logprobs + noise, 0).astype(np.float32)
            made.append(replace(whole, logprobs=logprobs, episode_id=f"e{episode}"))
    alike = draw(11)
    made.append(sequence("alike/0", prompt, [*alike, *draw(4)], advantage=0.5))
    made.append(sequence("alike/1", prompt, [*alike, *draw(2)], advantage=-1.0, temperature=0.7))
    made.append(sequence("beginning", prompt, alike, advantage=2.0))
    made.append(sequence("alone", draw(20), draw(7), advantage=-0.5))
    return made


def masked(sequences: list[TrainingSequence], kept: int = 6, vocabulary: int = 260) -> list[TrainingSequence]:
    """The same, as if the sampler had kept 1 to ``kept`` ids at each sampled token; but for every fourth sequence."""
    random = np.random.default_rng(5)
    made = []
    for index, given in enumerate(sequences):
        if index % 4 == 3:
            made.append(given)
            continue
        parts = []
        for own, sampled in zip(given.token_ids, given.loss_mask, strict=True):
            others = random.permutation(np.delete(np.arange(vocabulary), own))[: random.integers(0, kept)]
            parts.append(random.permutation([own, *others]) if sampled else [])
        counts = np.array([len(part) for part in parts], dtype=np.int32)
        made.append(replace(given, sampling_mask=SamplingMask(np.concatenate(parts).astype(np.int32), counts)))
    return made


class DoubleTrainer(TrainerEngine):
    """Computes in float64, so that what is left of a difference is no rounding."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for model in (self.model, self.reference):
            if model is not None:
                model.double()
