"""Supervised fine-tuning on a dataset's own answers: training sequences, and how often the model would be right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from forge_async.buffer import PromptTooLong
from forge_async.errors import DataError
from forge_async.rollout.datasets import PromptSource
from forge_async.types import Prompt, TrainingSequence


def answer_sequence(prompt: Prompt, tokenizer: Any) -> TrainingSequence:
    """The prompt followed by its reference answer and the end token; the answer is what is trained.

    Raises:
        DataError: the prompt has no answer.
    """
    if prompt.answer is None or str(prompt.answer) == "":
        raise DataError(f"prompt {prompt.prompt_id} has no answer to train on (dataset.answer_column)")
    answer = tokenizer(str(prompt.answer), add_special_tokens=False)["input_ids"]
    token_ids = np.concatenate([prompt.token_ids, [*answer, tokenizer.eos_token_id]]).astype(np.int32)
    mask = np.arange(len(token_ids)) >= len(prompt.token_ids)
    return TrainingSequence(
        sequence_id=prompt.prompt_id,
        token_ids=token_ids,
        loss_mask=mask,
        logprobs=np.zeros(len(token_ids), dtype=np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=np.zeros(len(token_ids), dtype=np.float32),
    )


def answer_sequences(source: PromptSource, tokenizer: Any) -> Iterator[TrainingSequence]:
    """One sequence per prompt; prompts that are too long are left out.

    Raises:
        DataError: as :func:`answer_sequence`, or every prompt of the dataset is too long.
    """
    skipped = 0
    while skipped < len(source):
        try:
            prompt = next(source)
        except PromptTooLong:
            skipped += 1
            continue
        except StopIteration:
            return
        skipped = 0
        yield answer_sequence(prompt, tokenizer)
    raise DataError(f"none of the {len(source)} prompts fits dataset.max_prompt_tokens ({source.max_prompt_tokens})")


def expected_accuracy(sequences: list[TrainingSequence], logprobs: list[np.ndarray]) -> float:
    """How often a completion sampled at temperature 1 would be exactly the reference answer: its mean probability.

    What sampling measures, without its noise and without a generator.
    """
    right = [np.exp(values[sequence.loss_mask].sum()) for sequence, values in zip(sequences, logprobs, strict=True)]
    return float(np.mean(right))
