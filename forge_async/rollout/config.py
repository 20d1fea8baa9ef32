"""Settings of datasets, rollouts and rewards."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from forge_async.errors import require

DATASET_KINDS = ("reasoning_gym", "jsonl", "hf", "environment")
OVERLONG = ("drop", "error")
TRUNCATED = ("keep", "mask", "penalise")


@dataclass(frozen=True)
class Example:
    """A worked example, shown as a user and an assistant message before the prompt."""

    prompt: str = ""
    answer: str = ""

    def __post_init__(self) -> None:
        require(bool(self.prompt), "prompt", self.prompt, "the example's user message, not empty")
        require(bool(self.answer), "answer", self.answer, "the example's assistant message, not empty")


@dataclass(frozen=True)
class DatasetConfig:
    """Where prompts come from and how they are rendered."""

    kind: str = "reasoning_gym"
    """``reasoning_gym`` (procedural tasks), ``jsonl`` (a file with one JSON object per line), ``hf`` (Hugging Face
    datasets) or ``environment`` (the prompts that come with ``rollout.environment``)."""
    name: str = "chain_sum"
    """The reasoning-gym task, or the Hugging Face dataset (with ``path``: the format of the file, such as
    ``parquet``)."""
    path: str = ""
    """The JSONL file; for ``hf`` a folder written by ``save_to_disk``, or a data file."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    subset: str = ""
    """Configuration of a Hugging Face dataset that has several, such as ``main`` of ``openai/gsm8k``."""
    prompt_column: str = "question"
    """Column of the prompt: text, or a list of chat messages with ``role`` and ``content``. In this name and the next
    two, a dot leads into a column that is a mapping: ``reward_model.ground_truth``."""
    answer_column: str = "answer"
    """Column that reward functions compare with; "" when there is none."""
    task_column: str = ""
    """Column that says to which task a row belongs, for figures by task; "": ``task``, where there is one."""
    prompt_template: str = ""
    """Text of the user message with columns in braces, such as ``"{expression} ="``; "" takes ``prompt_column`` as it
    is. For reasoning-gym the task's metadata are columns, too."""
    system_prompt: str | None = None
    """The first message. null: none, so that a chat template with a default of its own adds it (SmolLM2: 20 tokens);
    "": an empty system message, which replaces that default."""
    examples: list[Example] = field(default_factory=list)
    """Worked examples, after the system message."""
    params: dict[str, Any] = field(default_factory=dict)
    """Parameters of the reasoning-gym task, such as ``min_terms: 2``."""
    size: int = 1000
    """Rows of a procedural task; of other datasets the first ``size`` rows, 0 for all."""
    seed: int = 0
    """Seeds the rows of a procedural task. The order of rows is seeded by the run."""
    shuffle: bool = True
    """Each epoch goes through the rows in another order; false keeps the file's order."""
    epochs: int = 0
    """Passes through the rows; 0 goes on for as long as the run wants prompts."""
    max_prompt_tokens: int = 512
    """Longest rendered prompt, generation prompt included, in tokens."""
    overlong_prompts: str = "drop"
    """A longer prompt is dropped (its fate is ``prompt_too_long``), or ends the run with an ``error``."""

    def __post_init__(self) -> None:
        require(self.kind in DATASET_KINDS, "kind", self.kind, "one of " + ", ".join(DATASET_KINDS))
        require(self.kind != "jsonl" or bool(self.path), "path", self.path, "a JSONL file when kind is jsonl")
        require(bool(self.name) or self.kind == "jsonl", "name", self.name, "the name of a task or dataset")
        require(
            bool(self.prompt_column or self.prompt_template), "prompt_column", self.prompt_column, "a column's name"
        )
        require(self.size >= 0, "size", self.size, "0 (all rows) or more")
        require(self.kind != "reasoning_gym" or self.size >= 1, "size", self.size, "at least 1 for a procedural task")
        require(self.epochs >= 0, "epochs", self.epochs, "0 (endless) or more")
        require(self.max_prompt_tokens >= 1, "max_prompt_tokens", self.max_prompt_tokens, "at least 1")
        own = self.kind != "environment" or not self.task_column
        require(own, "task_column", self.task_column, '"" when kind is environment, whose rows name their tasks')
        require(self.overlong_prompts in OVERLONG, "overlong_prompts", self.overlong_prompts, "drop or error")


@dataclass(frozen=True)
class RolloutConfig:
    """How the episodes of a prompt are made."""

    environment: str = ""
    """What answers completions: "" (nothing: one completion is the episode), ``module:Class`` (an ``Environment`` of
    your own, importable from the working directory or the environment), ``openenv:<url>`` of an OpenEnv server, or
    ``verifiers:<environment id>``."""
    environment_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment by name: see docs/rollout.md."""
    max_turns: int = 16
    """Most completions of an episode. One that is cut off there counts as truncated."""

    group_size: int = 8
    """Episodes per prompt: the group over which advantages are computed."""
    timeout_s: float = 120.0
    """Longest time from the start of an episode to its last token, its environment's included, seconds; then it has
    failed and its request is aborted. Reward functions have their own limit, ``reward.timeout_s``."""
    truncated: str = "keep"
    """Episodes that end by a limit (of a completion, of turns, of the context): ``keep`` trains them as they are,
    ``mask`` leaves their tokens out of the loss (they still count in the baseline), ``penalise`` sets their reward to
    0."""
    truncation_warning: float = 0.5
    """The run warns when more than this share of its first episodes is truncated."""

    def __post_init__(self) -> None:
        require(self.group_size >= 1, "group_size", self.group_size, "at least 1")
        require(self.max_turns >= 1, "max_turns", self.max_turns, "at least 1")
        kind, _, name = self.environment.partition(":")
        form = '"", module:Class, openenv:<url> or verifiers:<environment id>'
        require(not self.environment or bool(kind and name), "environment", self.environment, form)
        require(self.timeout_s > 0, "timeout_s", self.timeout_s, "more than 0 seconds")
        require(self.truncated in TRUNCATED, "truncated", self.truncated, "one of " + ", ".join(TRUNCATED))
        require(0 < self.truncation_warning <= 1, "truncation_warning", self.truncation_warning, "in (0, 1]")


@dataclass(frozen=True)
class RewardSpec:
    """One reward function with its weight."""

    function: str
    """``module:function``."""
    weight: float
    name: str
    """Under which its values are logged."""


@dataclass(frozen=True)
class RewardConfig:
    """Which reward functions score an episode, and the workers that run them."""

    functions: list[str] = field(default_factory=lambda: ["forge_async.rollout.rewards:reasoning_gym_score"])
    """Python functions as ``module:function``, importable from the working directory or the environment. Each is called
    as ``function(prompt, completion_text)`` and returns a finite number; one with a parameter ``messages`` is given the
    conversation by that name. Empty where ``rollout.environment`` gives rewards of its own."""
    weights: list[float] = field(default_factory=list)
    """The reward is the sum of weight times value; one weight per function, or none for 1 each."""
    environment_weight: float = 1.0
    """Weight of the sum of the rewards that the environment itself gives, beside the functions'."""
    timeout_s: float = 30.0
    """Longest time to score one episode, seconds; then it has failed and its worker is replaced."""
    num_workers: int = 1
    """Processes that run reward functions, one episode at a time each."""
    max_initial_failures: int = 16
    """The run fails when this many episodes could not be scored and none could."""

    def __post_init__(self) -> None:
        for index, function in enumerate(self.functions):
            module, colon, name = function.partition(":")
            well_formed = colon and name.isidentifier() and all(part.isidentifier() for part in module.split("."))
            require(bool(well_formed), f"functions[{index}]", function, "of the form module:function")
        require(
            len(self.weights) in (0, len(self.functions)),
            "weights",
            self.weights,
            f"one number per function ({len(self.functions)}), or empty for 1 each",
        )
        finite = all(math.isfinite(weight) for weight in self.weights)
        require(finite, "weights", self.weights, "finite numbers")
        require(
            math.isfinite(self.environment_weight), "environment_weight", self.environment_weight, "a finite number"
        )
        require(self.timeout_s > 0, "timeout_s", self.timeout_s, "more than 0 seconds")
        require(self.num_workers >= 1, "num_workers", self.num_workers, "at least 1")
        require(self.max_initial_failures >= 1, "max_initial_failures", self.max_initial_failures, "at least 1")

    @property
    def specs(self) -> tuple[RewardSpec, ...]:
        """The functions with weights and names; a name is the function's own, or all of it where two would be alike."""
        short = [function.partition(":")[2] for function in self.functions]
        names = [name if short.count(name) == 1 else full for name, full in zip(short, self.functions, strict=True)]
        weights = self.weights or [1.0] * len(names)
        return tuple(RewardSpec(*spec) for spec in zip(self.functions, weights, names, strict=True))
