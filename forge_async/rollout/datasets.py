"""Rows of a dataset, and the source that turns them into prompts in a deterministic, resumable order."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forge_async.buffer.buffer import PromptTooLong
from forge_async.errors import ConfigError, DataError
from forge_async.rollout.config import DatasetConfig
from forge_async.rollout.rendering import build_messages, render_prompt
from forge_async.types import Prompt


@dataclass(frozen=True)
class Row:
    """One row of a dataset, not yet rendered."""

    content: str | list[dict[str, str]]
    """The user message, or a conversation."""
    answer: Any
    metadata: dict[str, Any] = field(default_factory=dict)
    """Handed to reward functions as ``prompt.metadata``: the row's other columns."""


class PromptSource(Iterator[Prompt]):
    """Prompts of a dataset, epoch after epoch; the order depends on the seed alone.

    A prompt's id is ``<epoch>-<row>``: unique per occurrence. ``StopIteration`` carries the reason in words.

    Args:
        config: the dataset and its rendering.
        tokenizer: a Hugging Face tokenizer with a chat template.
        seed: seeds the order of rows.
        max_prompt_tokens: another limit beside the config's, such as what the policy's context leaves room for.
        rows: instead of loading what ``config`` names.

    Raises:
        ConfigError, DataError: the dataset cannot be loaded, or a row is unusable.
    """

    def __init__(
        self,
        config: DatasetConfig,
        tokenizer: Any,
        seed: int = 0,
        max_prompt_tokens: int | None = None,
        rows: Sequence[Row] | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.seed = seed
        self.max_prompt_tokens = min(config.max_prompt_tokens, max_prompt_tokens or config.max_prompt_tokens)
        self.rows = load_rows(config) if rows is None else rows
        if not self.rows:
            raise DataError(f"the dataset {_title(config)} has no rows.")
        self._next = 0  # occurrences issued so far, over all epochs
        self._again: list[int] = []  # occurrences to issue first after a resume, next one last
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        """Rows in one epoch."""
        return len(self.rows)

    def __next__(self) -> Prompt:
        if self._again:
            return self._prompt(self._again.pop())
        if self.config.epochs and self._next >= self.config.epochs * len(self.rows):
            plural = "s" if self.config.epochs > 1 else ""
            raise StopIteration(f"{self.config.epochs} epoch{plural} of {len(self.rows)} rows ({_title(self.config)})")
        self._next += 1
        return self._prompt(self._next - 1)

    def preview(self, count: int) -> list[Prompt]:
        """The first ``count`` prompts of the order that fit (fewer when an epoch has fewer), without issuing them."""
        prompts: list[Prompt] = []
        for occurrence in range(len(self.rows)):
            if len(prompts) == count:
                break
            with contextlib.suppress(PromptTooLong):
                prompts.append(self._prompt(occurrence))
        return prompts

    def state(self) -> dict[str, Any]:
        """Where it stands, as plain JSON data: ``again`` are occurrences to issue first, left over from a resume.
        Prompts that were issued and whose fate is open are the ledger's to remember."""
        again = self._again[::-1]
        return {"next": self._next, "again": again, "seed": self.seed, "rows": len(self.rows), "digest": self._digest()}

    def restore(self, state: dict[str, Any], unfinished: Iterable[str] = ()) -> None:
        """Go on where ``state`` was taken; the prompts ``unfinished`` (ids) are issued again first, in that order, then
        those which an earlier resume had still to issue.

        Raises:
            DataError: the dataset or its order is not the one of ``state``.
        """
        here = self.state()
        for key, what in (("seed", "seed of the order"), ("rows", "number of rows"), ("digest", "content of the rows")):
            if state[key] != here[key]:
                raise DataError(
                    f"cannot resume on the dataset {_title(self.config)}: the {what} was {state[key]} and is "
                    f"{here[key]}. Restore the dataset's settings and files, or start a new run."
                )
        self._next = int(state["next"])
        again = [*(self._occurrence(prompt_id) for prompt_id in unfinished), *map(int, state["again"])]
        self._again = again[::-1]

    def _digest(self) -> str:
        """Over at most 64 rows spread over the dataset, and the settings which give a row its place and its wording."""
        step = max(1, len(self.rows) // 64)
        sample = [asdict(self.rows[index]) for index in range(0, len(self.rows), step)]
        settings = {
            key: value for key, value in asdict(self.config).items() if key in ("shuffle", "system_prompt", "examples")
        }
        return hashlib.sha256(json.dumps([sample, settings], sort_keys=True, default=str).encode()).hexdigest()[:16]

    def _occurrence(self, prompt_id: str) -> int:
        epoch, _, row = prompt_id.partition("-")
        position = np.flatnonzero(self._permutation(int(epoch)) == int(row))
        return int(epoch) * len(self.rows) + int(position[0])

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            count = len(self.rows)
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._order = (epoch, generator.permutation(count) if self.config.shuffle else np.arange(count))
        return self._order[1]

    def _prompt(self, occurrence: int) -> Prompt:
        epoch, position = divmod(occurrence, len(self.rows))
        index = int(self._permutation(epoch)[position])
        row = self.rows[index]
        prompt_id = f"{epoch}-{index}"
        messages = build_messages(row.content, self.config.system_prompt, self.config.examples)
        token_ids = render_prompt(self.tokenizer, messages)
        if len(token_ids) > self.max_prompt_tokens:
            message = (
                f"prompt {prompt_id} of {_title(self.config)} has {len(token_ids)} tokens, more than the limit of "
                f"{self.max_prompt_tokens} (dataset.max_prompt_tokens, or what the policy's context leaves)."
            )
            if self.config.overlong_prompts == "error":
                raise DataError(message + " dataset.overlong_prompts=drop leaves such prompts out.")
            raise PromptTooLong(prompt_id, message, str(row.metadata.get("task", "")), len(token_ids))
        return Prompt(prompt_id, messages, token_ids, row.answer, row.metadata)


# --- loading


def load_rows(config: DatasetConfig) -> Sequence[Row]:
    """The dataset's rows in its own order."""
    if config.kind == "reasoning_gym":
        return _reasoning_gym_rows(config)
    if config.kind == "jsonl":
        return _jsonl_rows(config)
    if config.kind == "hf":
        return _hf_rows(config)
    raise ConfigError("kind", config.kind, "reasoning_gym, jsonl or hf here", "No environment is made here.")


def _title(config: DatasetConfig) -> str:
    if config.kind == "environment":
        return "of the environment"
    return config.path if config.kind == "jsonl" else " ".join(filter(None, (config.kind, config.name, config.path)))


def _row(columns: dict[str, Any], config: DatasetConfig, where: str) -> Row:
    """Check one row's columns; ``where`` begins the messages of errors."""
    if config.prompt_template:
        content: Any = _fill(config.prompt_template, columns, where)
    else:
        missing = f"{where}: no column {config.prompt_column!r} (dataset.prompt_column)."
        content = _column(columns, config.prompt_column, missing)
    if isinstance(content, list):
        # A table gives every message every field: those which it does not have are None there.
        content = [_without_none(message) for message in content]
        for message in content:
            if not (isinstance(message, dict) and {"role", "content"} <= set(message)):
                raise DataError(f"{where}: a message of the prompt lacks role or content: {message!r}.")
            if not (isinstance(message["role"], str) and isinstance(message["content"], str)):
                raise DataError(f"{where}: role and content of a message must be text: {message!r}.")
    elif not isinstance(content, str):
        raise DataError(f"{where}: the prompt is {type(content).__name__}, not text or a list of messages.")
    if not content:
        raise DataError(f"{where}: the prompt is empty.")
    for text in [content] if isinstance(content, str) else [message["content"] for message in content]:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise DataError(f"{where}: the prompt has half a surrogate pair, which is no text: {ascii(text)[:80]}.")
    used = {config.prompt_column, config.answer_column}
    metadata = {key: value for key, value in columns.items() if key not in used}
    answer = None
    if config.answer_column:
        missing = f'{where}: no column {config.answer_column!r} (dataset.answer_column; "" for none).'
        answer = _column(columns, config.answer_column, missing)
    if config.task_column:
        missing = f"{where}: no column {config.task_column!r} (dataset.task_column)."
        metadata["task"] = str(_column(columns, config.task_column, missing))
    return Row(content, answer, metadata)


def _column(columns: dict[str, Any], name: str, missing: str) -> Any:
    """The value of a column, or of one within a column; ``missing`` begins the error."""
    found: Any = columns
    for part in [name] if name in columns else name.split("."):
        if not isinstance(found, dict) or part not in found:
            raise DataError(f"{missing} {_columns(columns)}")
        found = found[part]
    return found


def _without_none(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    return {key: value for key, value in message.items() if value is not None or key in ("role", "content")}


def _columns(columns: dict[str, Any]) -> str:
    return "Columns: " + ", ".join(map(str, columns)) + "."


def _fill(template: str, columns: dict[str, Any], where: str) -> str:
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError("prompt_template", template, "text with columns in braces", str(error)) from error
    for name in fields:
        if name not in columns:
            raise DataError(f"{where}: no column {name!r} (dataset.prompt_template). {_columns(columns)}")
    try:
        return template.format_map(columns)
    except Exception as error:  # a format that does not fit the column's value
        raise DataError(f"{where}: dataset.prompt_template = {template!r} cannot be filled: {error}.") from error


def _reasoning_gym_rows(config: DatasetConfig) -> list[Row]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if config.name not in DATASETS:
        near = difflib.get_close_matches(config.name, DATASETS, n=3, cutoff=0.5)
        raise ConfigError(
            "name",
            config.name,
            f"one of reasoning-gym's {len(DATASETS)} tasks",
            f"Did you mean {', '.join(near)}?" if near else "",
        )
    try:
        dataset = reasoning_gym.create_dataset(config.name, size=config.size, seed=config.seed, **config.params)
    except (TypeError, AssertionError, ValueError) as error:
        known = ", ".join(sorted(set(DATASETS[config.name][1].__dataclass_fields__) - {"seed", "size"}))
        raise ConfigError(
            "params", dict(config.params), f"parameters of {config.name}", f"It says: {error}. It has: {known}."
        ) from error
    rows = []
    for index in range(config.size):
        entry = dataset[index]
        columns = {**entry["metadata"], "question": entry["question"], "answer": entry["answer"]}
        row = _row(columns, config, f"{config.name} row {index}")
        task = row.metadata["task"] if config.task_column else config.name
        rows.append(Row(row.content, row.answer, {"task": task, "dataset": config.name, "entry": entry}))
    return rows


def _jsonl_rows(config: DatasetConfig) -> list[Row]:
    rows: list[Row] = []
    try:
        with open(config.path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if config.size and len(rows) >= config.size:
                    break
                if not line.strip():
                    continue
                where = f"{config.path}:{number}"
                try:
                    columns = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(f"{where}: not valid JSON: {error.msg} at column {error.colno}.") from error
                except (ValueError, RecursionError) as error:  # a number of thousands of digits, nested without end
                    raise DataError(f"{where}: this JSON cannot be read: {error}.") from error
                if not isinstance(columns, dict):
                    raise DataError(f"{where}: a JSON object is needed, this is a {type(columns).__name__}.")
                rows.append(_row(columns, config, where))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the dataset {config.path}: {error}.") from error
    return rows


def _hf_rows(config: DatasetConfig) -> list[Row]:
    import datasets

    try:
        if config.path and Path(config.path).is_dir():
            loaded = datasets.load_from_disk(config.path)
            if isinstance(loaded, datasets.DatasetDict):
                if config.split not in loaded:
                    raise ConfigError("split", config.split, "one of " + ", ".join(loaded))
                loaded = loaded[config.split]
        elif config.path:
            loaded = datasets.load_dataset(config.name, data_files=config.path, split=config.split)
        else:
            loaded = datasets.load_dataset(config.name, config.subset or None, split=config.split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"cannot load the Hugging Face dataset {_title(config)}: {error}") from error
    count = min(config.size or len(loaded), len(loaded))
    return [_row(dict(loaded[index]), config, f"{_title(config)} row {index}") for index in range(count)]
