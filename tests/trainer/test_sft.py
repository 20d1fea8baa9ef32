from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from trainer_samples import sequence
from transformers import AutoTokenizer

from forge_async.errors import DataError
from forge_async.rollout.config import DatasetConfig
from forge_async.rollout.datasets import PromptSource, Row
from forge_async.trainer.sft import answer_sequence, answer_sequences, expected_accuracy
from forge_async.types import Prompt


def test_the_answer_and_the_end_token_are_trained(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    prompt = Prompt("0-1", (), np.asarray([5, 6], dtype=np.int32), answer=12)
    made = answer_sequence(prompt, tokenizer)
    assert tokenizer.decode(made.token_ids[2:-1]) == "12"
    assert made.token_ids[-1] == tokenizer.eos_token_id
    assert made.loss_mask.tolist() == [False, False, True, True, True]
    with pytest.raises(DataError, match="0-2 has no answer"):
        answer_sequence(Prompt("0-2", (), prompt.token_ids), tokenizer)


def test_prompts_that_are_too_long_are_left_out(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    rows = [Row(text, "7") for text in ("a", "b" * 60, "c")]
    config = DatasetConfig(kind="jsonl", path="-", shuffle=False, epochs=1, max_prompt_tokens=60)
    made = list(answer_sequences(PromptSource(config, tokenizer, rows=rows), tokenizer))
    assert [one.sequence_id for one in made] == ["0-0", "0-2"]
    endless = DatasetConfig(kind="jsonl", path="-", max_prompt_tokens=10)
    with pytest.raises(DataError, match="none of the 3 prompts fits"):
        list(answer_sequences(PromptSource(endless, tokenizer, rows=rows), tokenizer))


def test_expected_accuracy_is_the_mean_probability_of_the_answers() -> None:
    sequences = [sequence("a", [5], [6, 7]), sequence("b", [5, 5], [6])]
    logprobs = [np.log([1.0, 0.5, 0.5]), np.log([1.0, 0.1, 0.75])]
    assert expected_accuracy(sequences, logprobs) == pytest.approx((0.25 + 0.75) / 2)
