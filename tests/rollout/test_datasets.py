from __future__ import annotations

import dataclasses
import json
from itertools import islice
from typing import Any

import pytest

from forge_async.buffer import BufferConfig, Ledger, PromptTooLong, RolloutBuffer
from forge_async.errors import ConfigError, DataError
from forge_async.model_zoo import byte_tokenizer
from forge_async.rollout.config import DatasetConfig, Example
from forge_async.rollout.datasets import PromptSource, load_rows
from forge_async.rollout.rewards import reasoning_gym_score

CHAIN_SUM = dict(name="chain_sum", params=dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1))


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def write_rows(path, rows) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def numbered(tmp_path, count: int, **config) -> DatasetConfig:
    rows = [{"question": f"{index}?", "answer": str(index)} for index in range(count)]
    return DatasetConfig(kind="jsonl", path=write_rows(tmp_path / "rows.jsonl", rows), size=0, **config)


# --- kinds


def test_reasoning_gym_rows_are_rendered_and_scorable(tokenizer):
    source = PromptSource(DatasetConfig(size=5, prompt_template="{expression} =", **CHAIN_SUM), tokenizer)
    prompt = next(source)
    expression, equals = prompt.messages[0]["content"].rsplit(" ", 1)
    assert equals == "=" and eval(expression) == int(prompt.answer)
    assert prompt.metadata["task"] == "chain_sum" and prompt.metadata["entry"]["answer"] == prompt.answer
    assert tokenizer.decode(prompt.token_ids).endswith("<|im_start|>assistant\n")
    whole = next(PromptSource(DatasetConfig(size=5, **CHAIN_SUM), tokenizer))
    assert whole.messages[0]["content"] == f"State the final answer to the following arithmetic problem: {expression} ="


def test_reasoning_gym_mistakes_name_what_exists():
    with pytest.raises(ConfigError, match=r"name = 'chain_summ'.*Did you mean chain_sum"):
        load_rows(DatasetConfig(name="chain_summ"))
    with pytest.raises(ConfigError, match=r"params = .*min_term.*It has: .*min_terms"):
        load_rows(DatasetConfig(name="chain_sum", params={"min_term": 2}))
    with pytest.raises(ConfigError, match="min_terms must be positive"):
        load_rows(DatasetConfig(name="chain_sum", params={"min_terms": -1}))


def test_jsonl_keeps_columns_and_skips_blank_lines(tmp_path, tokenizer):
    chat = [{"role": "user", "content": "hi {x}"}]
    path = write_rows(
        tmp_path / "d.jsonl", [{"q": "a {b} c", "a": 1, "level": 3}, "", {"q": chat, "a": None, "level": 4}]
    )
    config = DatasetConfig(kind="jsonl", path=path, prompt_column="q", answer_column="a", shuffle=False, epochs=1)
    first, second = PromptSource(config, tokenizer)
    assert first.messages == ({"role": "user", "content": "a {b} c"},)
    assert (first.answer, first.metadata) == (1, {"level": 3})
    assert second.messages == tuple(chat) and second.answer is None
    template = DatasetConfig(
        kind="jsonl", path=path, prompt_template="{{{level}}} {q}", answer_column="", epochs=1, shuffle=False
    )
    filled = next(PromptSource(template, tokenizer))
    assert filled.messages[0]["content"] == "{3} a {b} c" and filled.answer is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "a", "answer": 1}, "{oops"], r"d\.jsonl:2: not valid JSON: .* column 2"),
        (["", "[1, 2]"], r"d\.jsonl:2: a JSON object is needed, this is a list"),
        (
            [{"question": "a", "answer": 1}, {"Question": "a", "answer": 1}],
            r"d\.jsonl:2: no column 'question' .*Columns: Question, answer",
        ),
        ([{"question": "a"}], r"d\.jsonl:1: no column 'answer'"),
        ([{"question": 5, "answer": 1}], r"d\.jsonl:1: the prompt is int"),
        ([{"question": "", "answer": 1}], r"d\.jsonl:1: the prompt is empty"),
        ([{"question": "half \ud800", "answer": 1}], r"d\.jsonl:1: the prompt has half a surrogate pair"),
        ([{"question": [{"role": "user", "content": "\udc00"}], "answer": 1}], r"d\.jsonl:1: .*half a surrogate"),
        (['{"question": "a", "answer": ' + "9" * 5000 + "}"], r"d\.jsonl:1: this JSON cannot be read: .*4300 digits"),
        (["[" * 100_000], r"d\.jsonl:1: this JSON cannot be read: maximum recursion depth"),
        ([{"question": [{"content": "x"}], "answer": 1}], r"d\.jsonl:1: a message of the prompt lacks role or content"),
        ([{"question": [{"role": "user", "content": None}], "answer": 1}], r"d\.jsonl:1: role and content .* text"),
        ([], r"d\.jsonl has no rows"),
    ],
)
def test_jsonl_errors_name_file_and_line(tmp_path, tokenizer, rows, message):
    config = DatasetConfig(kind="jsonl", path=write_rows(tmp_path / "d.jsonl", rows))
    with pytest.raises(DataError, match=message):
        PromptSource(config, tokenizer)


def test_a_template_that_does_not_fit_a_value_names_file_and_line(tmp_path, tokenizer):
    path = write_rows(tmp_path / "d.jsonl", [{"level": 3, "answer": 1}, {"level": "high", "answer": 1}])
    with pytest.raises(DataError, match=r"d\.jsonl:2: dataset\.prompt_template = '\{level:d\}' cannot be filled"):
        load_rows(DatasetConfig(kind="jsonl", path=path, prompt_template="{level:d}"))


def test_unreadable_files_are_data_errors(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl"):
        load_rows(DatasetConfig(kind="jsonl", path=str(tmp_path / "none.jsonl")))
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xe9"}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl.*utf-8"):
        load_rows(DatasetConfig(kind="jsonl", path=str(tmp_path / "latin.jsonl")))


def test_hugging_face_folders_and_files(tmp_path, tokenizer, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    saved = datasets.Dataset.from_dict({"question": ["a", "b", "c"], "answer": ["1", "2", "3"]})
    datasets.DatasetDict({"test": saved}).save_to_disk(tmp_path / "saved")
    config = DatasetConfig(
        kind="hf", name="saved", path=str(tmp_path / "saved"), split="test", size=2, shuffle=False, epochs=1
    )
    assert [prompt.answer for prompt in PromptSource(config, tokenizer)] == ["1", "2"]
    with pytest.raises(ConfigError, match="split = 'train': must be one of test"):
        load_rows(DatasetConfig(kind="hf", name="saved", path=str(tmp_path / "saved")))
    saved.to_parquet(tmp_path / "d.parquet")
    config = DatasetConfig(kind="hf", name="parquet", path=str(tmp_path / "d.parquet"), size=0)
    assert [row.answer for row in load_rows(config)] == ["1", "2", "3"]
    with pytest.raises(DataError, match="cannot load the Hugging Face dataset"):
        load_rows(DatasetConfig(kind="hf", name="parquet", path=str(tmp_path / "none.parquet")))


def test_hugging_face_columns_are_mapped(tmp_path, tokenizer, monkeypatch):
    """A table as other trainers publish them: messages, the answer within a column, tasks; fields a message lacks are
    None there."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    messages = [{"role": "system", "content": "Add.", "name": None}, {"role": "user", "content": "1+1", "name": "x"}]
    rows = [
        {
            "prompt": messages,
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "data_source": "sums",
        }
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "d.parquet")
    mapped = dict(prompt_column="prompt", answer_column="reward_model.ground_truth", task_column="data_source")
    config = DatasetConfig(kind="hf", name="parquet", path=str(tmp_path / "d.parquet"), **mapped)
    prompt = next(PromptSource(config, tokenizer))
    assert prompt.messages == ({"role": "system", "content": "Add."}, {"role": "user", "content": "1+1", "name": "x"})
    assert (prompt.answer, prompt.task) == ("2", "sums")
    assert prompt.metadata["reward_model"]["style"] == "rule"
    for key, value in (("answer_column", "reward_model.truth"), ("task_column", "source"), ("prompt_column", "a.b")):
        with pytest.raises(DataError, match=f"no column '{value}' .dataset.{key}"):
            load_rows(dataclasses.replace(config, **{key: value}))


def test_a_subset_of_a_hugging_face_dataset_is_asked_for(monkeypatch):
    import datasets

    asked: list[tuple[Any, ...]] = []

    def load_dataset(*names: Any, split: str) -> Any:
        asked.append((*names, split))
        return datasets.Dataset.from_dict({"question": ["q"], "answer": ["a"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    load_rows(DatasetConfig(kind="hf", name="openai/gsm8k", subset="main", size=0))
    load_rows(DatasetConfig(kind="hf", name="plain", size=0))
    assert asked == [("openai/gsm8k", "main", "train"), ("plain", None, "train")]


# --- order


def test_every_epoch_is_another_permutation_of_all_rows(tmp_path, tokenizer):
    source = PromptSource(numbered(tmp_path, 20), tokenizer, seed=3)
    epochs = [[prompt.answer for prompt in islice(source, 20)] for _ in range(3)]
    assert [sorted(map(int, epoch)) for epoch in epochs] == [list(range(20))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = PromptSource(numbered(tmp_path, 20), tokenizer, seed=3)
    assert [prompt.answer for prompt in islice(again, 60)] == [answer for epoch in epochs for answer in epoch]
    other = PromptSource(numbered(tmp_path, 20), tokenizer, seed=4)
    assert [prompt.answer for prompt in islice(other, 20)] != epochs[0]


def test_ids_are_unique_and_the_end_says_why(tmp_path, tokenizer):
    source = PromptSource(numbered(tmp_path, 3, epochs=2, shuffle=False), tokenizer)
    ids = []
    with pytest.raises(StopIteration) as end:
        while True:
            ids.append(next(source).prompt_id)
    assert ids == ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2"]
    assert str(end.value).startswith("2 epochs of 3 rows (")


def test_a_preview_does_not_issue_prompts(tmp_path, tokenizer):
    source = PromptSource(numbered(tmp_path, 5), tokenizer, seed=1)
    preview = [prompt.prompt_id for prompt in source.preview(3)]
    assert preview == [next(source).prompt_id for _ in range(3)]
    assert len(source.preview(9)) == 5


@pytest.mark.parametrize("cut", [0, 1, 5, 7, 10, 13])
def test_a_resumed_source_goes_on_exactly(tmp_path, tokenizer, cut):
    config = numbered(tmp_path, 5)
    source = PromptSource(config, tokenizer, seed=9)
    uninterrupted = [prompt.prompt_id for prompt in islice(source, 20)]
    first = PromptSource(config, tokenizer, seed=9)
    issued = [prompt.prompt_id for prompt in islice(first, cut)]
    unfinished = issued[::3]
    resumed = PromptSource(config, tokenizer, seed=9)
    resumed.restore(json.loads(json.dumps(first.state())), unfinished)
    assert [prompt.prompt_id for prompt in islice(resumed, len(unfinished) + 20 - cut)] == unfinished + uninterrupted[
        cut:
    ]


def test_a_resume_on_other_data_is_refused(tmp_path, tokenizer):
    state = PromptSource(numbered(tmp_path, 5), tokenizer, seed=1).state()
    with pytest.raises(DataError, match="seed of the order was 1 and is 2"):
        PromptSource(numbered(tmp_path, 5), tokenizer, seed=2).restore(state)
    with pytest.raises(DataError, match="number of rows was 5 and is 6"):
        PromptSource(numbered(tmp_path, 6), tokenizer, seed=1).restore(state)
    changed = numbered(tmp_path, 5, examples=[Example("q", "a")])
    with pytest.raises(DataError, match="content of the rows"):
        PromptSource(changed, tokenizer, seed=1).restore(state)


async def test_kill_and_resume_train_each_prompt_exactly_once(tmp_path, tokenizer):
    """A checkpoint with prompts trained, dropped and open; the resumed run issues the open ones first and no other
    twice."""
    config = numbered(tmp_path, 6, epochs=2)
    source, ledger = PromptSource(config, tokenizer, seed=5), Ledger()
    buffer = RolloutBuffer(BufferConfig(max_staleness=4, groups_per_step=2), ledger)
    ids = [(await buffer.admit(source)).prompt_id for _ in range(5)]
    buffer.drop(ids[1], "failed")
    ledger.train(ids[3])
    saved = json.loads(json.dumps({"source": source.state(), "ledger": ledger.state()}))
    await buffer.admit(source)  # lost with the crash

    ledger = Ledger()
    source = PromptSource(config, tokenizer, seed=5)
    source.restore(saved["source"], ledger.restore(saved["ledger"]))
    buffer = RolloutBuffer(BufferConfig(max_staleness=4, groups_per_step=4, retries=0), ledger)
    resumed = []
    while (prompt := await buffer.admit(source)) is not None:
        resumed.append(prompt.prompt_id)
    uninterrupted = [prompt.prompt_id for prompt in PromptSource(config, tokenizer, seed=5)]
    assert ids == uninterrupted[:5]
    assert resumed == [ids[0], ids[2], ids[4], *uninterrupted[5:]]
    assert ledger.admitted == 12 and ledger.balanced


def test_a_second_resume_before_all_open_prompts_were_issued_again_forgets_none(tmp_path, tokenizer):
    config = numbered(tmp_path, 6, epochs=1)
    source = PromptSource(config, tokenizer, seed=5)
    ids = [next(source).prompt_id for _ in range(4)]
    resumed = PromptSource(config, tokenizer, seed=5)
    resumed.restore(json.loads(json.dumps(source.state())), ids[1:])
    assert next(resumed).prompt_id == ids[1]  # then it is killed, with this one open
    again = PromptSource(config, tokenizer, seed=5)
    again.restore(json.loads(json.dumps(resumed.state())), ids[1:2])
    rest = [prompt.prompt_id for prompt in PromptSource(config, tokenizer, seed=5)][4:]
    assert [prompt.prompt_id for prompt in again] == [*ids[1:], *rest]


# --- prompts that do not fit


def test_overlong_prompts_are_dropped_or_end_the_run(tmp_path, tokenizer):
    rows = [{"question": "x" * 100, "answer": 1}, {"question": "y", "answer": 2}]
    path = write_rows(tmp_path / "d.jsonl", rows)
    config = dict(kind="jsonl", path=path, max_prompt_tokens=60, shuffle=False, epochs=1)
    source = PromptSource(DatasetConfig(**config), tokenizer)
    with pytest.raises(PromptTooLong, match=r"prompt 0-0 .* has 119 tokens, more than the limit of 60") as error:
        next(source)
    assert error.value.prompt_id == "0-0"
    assert next(source).answer == 2
    with pytest.raises(DataError, match=r"overlong_prompts=drop"):
        next(PromptSource(DatasetConfig(overlong_prompts="error", **config), tokenizer))
    roomy = PromptSource(DatasetConfig(**{**config, "max_prompt_tokens": 500}), tokenizer, max_prompt_tokens=60)
    assert [prompt.answer for prompt in roomy.preview(2)] == [2]


def test_a_procedural_tasks_rows_may_say_what_they_belong_to() -> None:
    config = DatasetConfig(size=4, params={"min_terms": 2, "max_terms": 3}, task_column="num_terms")
    rows = load_rows(config)
    assert [row.metadata["task"] for row in rows] == [
        str(row.metadata["entry"]["metadata"]["num_terms"]) for row in rows
    ]
    assert {row.metadata["task"] for row in load_rows(DatasetConfig(size=2))} == {"chain_sum"}
    prompt = next(PromptSource(config, byte_tokenizer()))
    assert reasoning_gym_score(prompt, str(prompt.answer)) == 1, "the task that made it scores it all the same"
    with pytest.raises(ConfigError, match="task_column = 'x': must be \"\" when kind is environment"):
        DatasetConfig(kind="environment", task_column="x")
