"""The config tree: the root dataclasses, loading from YAML with overrides, and errors that name the nearest valid key.

Each room owns its config dataclass; this module only puts them together. Loading goes through OmegaConf's structured
configs, so that keys and types are checked before anything is spawned.
"""

from __future__ import annotations

import dataclasses
import difflib
import secrets
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from forge_async import model_zoo
from forge_async.buffer.config import BufferConfig
from forge_async.dashboard.config import DashboardConfig
from forge_async.errors import ConfigError, require
from forge_async.mesh.placement import PlacementConfig
from forge_async.observability.config import MetricsConfig
from forge_async.policy.config import PolicyConfig
from forge_async.rollout.config import DatasetConfig, RewardConfig, RolloutConfig
from forge_async.store.config import StoreConfig
from forge_async.trainer.config import TrainerConfig


@dataclass(frozen=True)
class ModelConfig:
    """Which model a run starts from."""

    path: str = "models/tiny_sft"
    """Hugging Face folder: config.json, tokenizer and safetensors."""
    prepare: str = ""
    """How to make the folder when it is missing: "" (it must exist), "sft" (run the warm-up of ``warmup_config``), or
    the name of a recipe in ``forge_async.model_zoo``."""
    warmup_config: str = ""
    """YAML of the supervised warm-up that makes ``path``; only with ``prepare: sft``."""

    def __post_init__(self) -> None:
        require(bool(self.path), "path", self.path, "the path of a Hugging Face model folder")
        choices = ("", "sft", *model_zoo.CATALOGUE)
        require(self.prepare in choices, "prepare", self.prepare, f"one of {', '.join(map(repr, choices))}")
        require(
            (self.prepare == "sft") == bool(self.warmup_config),
            "warmup_config",
            self.warmup_config,
            "a YAML file when model.prepare is 'sft', and empty otherwise",
        )


@dataclass(frozen=True)
class ChecksConfig:
    """What is verified before the first step; a failed check refuses to train."""

    ratio_samples: int = 8
    """Fresh completions whose importance ratios must be 1 while the weights are unchanged; 0 switches the check off."""
    ratio_tolerance: float | None = None
    """Largest allowed |ratio - 1| of any token; null: 1e-4 where policy and trainer compute in float32, else 0.3."""

    def __post_init__(self) -> None:
        require(self.ratio_samples >= 0, "ratio_samples", self.ratio_samples, "0 or more")
        above = self.ratio_tolerance is None or self.ratio_tolerance > 0
        require(above, "ratio_tolerance", self.ratio_tolerance, "greater than 0, or null")


@dataclass(frozen=True)
class CheckpointConfig:
    """When the trainer's state, the data position and the ledger are saved."""

    every_steps: int = 0
    """Steps between checkpoints; 0 saves only at the end."""
    keep: int = 2
    """Newest checkpoints kept; older ones are deleted."""
    export_hf: bool = True
    """Whether the final weights are also written as a Hugging Face folder."""

    def __post_init__(self) -> None:
        require(self.every_steps >= 0, "every_steps", self.every_steps, "0 (only at the end) or more")
        require(self.keep >= 1, "keep", self.keep, "1 or more")


@dataclass(frozen=True)
class Config:
    """A reinforcement-learning run."""

    name: str = "grpo"
    """Names the run folder ``<output_dir>/<name>``; a number is appended when it is taken."""
    output_dir: str = "runs"
    seed: int = 0
    """Seeds data order, sampling and initialisation."""
    steps: int = 60
    """Optimizer steps."""
    resume: str = ""
    """A run folder to go on from: its newest checkpoint is loaded and its folder is used; "" starts afresh."""
    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    dashboard: DashboardConfig = field(default_factory=DashboardConfig)
    checks: ChecksConfig = field(default_factory=ChecksConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __repr__(self) -> str:
        """What is not as by default; :func:`to_yaml` shows everything."""
        settings = {key: new for key, (_, new) in differences(Config(), self).items() if key != "dashboard.token"}
        return f"Config({', '.join(f'{key}={value!r}' for key, value in settings.items())})"

    def __post_init__(self) -> None:
        require(
            bool(self.name) and "/" not in self.name and not self.name.startswith("."),
            "name",
            self.name,
            "a folder name without '/'",
        )
        require(self.steps >= 1, "steps", self.steps, "1 or more")
        require(0 <= self.seed < 2**63, "seed", self.seed, "a whole number from 0 to 2**63 - 1")
        sampling, policy = self.policy.sampling, self.policy
        require(
            sampling.max_tokens < policy.max_model_len,
            "policy.sampling.max_tokens",
            sampling.max_tokens,
            f"less than policy.max_model_len ({policy.max_model_len}), which holds prompt and completion",
        )
        require(
            sampling.temperature > 0,
            "policy.sampling.temperature",
            sampling.temperature,
            "above 0 for training",
            "Greedy samples have no distribution to correct for.",
        )
        if policy.update.rules.drains:
            require(
                policy.update.timeout_s >= self.rollout.timeout_s,
                "policy.update.timeout_s",
                policy.update.timeout_s,
                f"at least rollout.timeout_s ({self.rollout.timeout_s}) with policy.update.mode {policy.update.mode!r}",
                "Running requests end before the swap there, and a replica that waits for them is no hanging one.",
            )
        require(
            self.buffer.min_group_size <= self.rollout.group_size,
            "buffer.min_group_size",
            self.buffer.min_group_size,
            f"at most rollout.group_size ({self.rollout.group_size})",
        )
        loss = self.trainer.loss.resolved()
        by_group = loss.baseline in ("group_mean", "leave_one_out") or loss.scale == "group_std"
        require(
            self.rollout.group_size >= 2 or not by_group,
            "rollout.group_size",
            self.rollout.group_size,
            f"at least 2 with trainer.loss.baseline {loss.baseline!r} and trainer.loss.scale {loss.scale!r}",
            "Every advantage would be 0, and nothing would be learnt.",
        )
        require(
            self.trainer.max_sequence_tokens >= policy.max_model_len,
            "trainer.max_sequence_tokens",
            self.trainer.max_sequence_tokens,
            f"at least policy.max_model_len ({policy.max_model_len})",
            "The trainer must be able to take what the policy generates.",
        )
        require(
            self.metrics.status_every_s > 0 or not self.dashboard.control,
            "metrics.status_every_s",
            self.metrics.status_every_s,
            "above 0 with dashboard.control",
            "The run reads what its page asks for as often as it looks at its actors; or set dashboard.control=false.",
        )
        precision = self.trainer.beside(policy.dtype).precision
        require(
            policy.dtype == precision or self.ratio_tolerance >= 0.01,
            "checks.ratio_tolerance",
            self.checks.ratio_tolerance,
            f"at least 0.01 when policy.dtype ({policy.dtype}) and trainer.dtype ({precision}) differ",
        )

    @property
    def ratio_tolerance(self) -> float:
        """``checks.ratio_tolerance``, with null resolved."""
        if self.checks.ratio_tolerance is not None:
            return self.checks.ratio_tolerance
        precisions = {self.policy.dtype, self.trainer.beside(self.policy.dtype).precision}
        return 1e-4 if precisions == {"float32"} else 0.3


@dataclass(frozen=True)
class SFTConfig:
    """A supervised warm-up: train on the dataset's own answers until the model is right often enough."""

    name: str = "sft"
    output_dir: str = "runs"
    seed: int = 0
    steps: int = 400
    """Most optimizer steps."""
    batch_size: int = 64
    """Prompts with answers per step."""
    eval_every: int = 20
    """Steps between measurements of the accuracy."""
    eval_prompts: int = 256
    """Prompts it is measured on: the mean probability of sampling exactly the reference answer at temperature 1."""
    target_accuracy: float = 0.2
    """Stop once the accuracy reaches this."""
    accuracy_limits: list[float] = field(default_factory=lambda: [0.1, 0.4])
    """A warm-up that ends outside this range is an error: reinforcement learning needs room in both directions."""
    export_path: str = "models/tiny_sft"
    """Hugging Face folder that is written at the end."""
    model: ModelConfig = field(default_factory=lambda: ModelConfig(path="models/tiny", prepare="tiny"))
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**63, "seed", self.seed, "a whole number from 0 to 2**63 - 1")
        for key in ("steps", "batch_size", "eval_every", "eval_prompts"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "1 or more")
        require(0 < self.target_accuracy <= 1, "target_accuracy", self.target_accuracy, "in (0, 1]")
        limits = self.accuracy_limits
        require(
            len(limits) == 2 and 0 <= limits[0] <= self.target_accuracy <= limits[1] <= 1,
            "accuracy_limits",
            limits,
            f"two shares [low, high] with target_accuracy ({self.target_accuracy}) between them",
        )


T = TypeVar("T")

REDACTED = "(redacted:made-anew-when-loaded)"
"""Stands for ``dashboard.token`` in YAML that is written. It is public, so it is never a token itself."""


def load_config(path: str | Path | None, overrides: list[str] | None = None, schema: type[T] = Config) -> T:  # type: ignore[assignment]
    """Read a YAML file, apply ``key=value`` overrides and return the checked config.

    A YAML file may name another one under ``base`` (relative to itself), which is read first. The value of an override
    is YAML, except that text for a string setting is taken as written. List elements are replaced as a whole. A token
    that was not written down (:data:`REDACTED`) is made up anew.

    Raises:
        ConfigError: unknown key (with one that is like it, or its room's), wrong type, or a value that a room refuses.
    """
    tree: DictConfig = OmegaConf.structured(schema)
    _writable(tree)
    keys = _valid_keys(schema)
    if path is not None:
        for layer in _layers(Path(path)):
            for key, value in _leaves(layer, "", keys):
                _set(tree, key, value, keys)
    for override in overrides or []:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(override, "", "an override of the form key=value")
        key = key.strip()
        for name, value in _leaves_of_override(key, text, keys):
            _set(tree, name, value, keys)
    if OmegaConf.select(tree, "dashboard.token") == REDACTED:
        tree.dashboard.token = secrets.token_urlsafe(24)
    return _build(tree, "")


def changed(config: T, settings: Mapping[str, Any]) -> T:
    """``config`` with some settings replaced, by dotted key; checked just as when it was loaded.

    Raises:
        ConfigError: unknown key (with one that is like it, or its room's), wrong type, or a value that a room refuses.
    """
    tree: DictConfig = OmegaConf.structured(type(config))
    _writable(tree)
    keys = _valid_keys(type(config))
    present = _leaves(dataclasses.asdict(config), "", keys)  # type: ignore[call-overload]
    for key, value in [*present, *settings.items()]:
        _set(tree, key, value, keys)
    return _build(tree, "")


def differences(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (old value, new value) of the settings in which two configs of one class differ."""
    keys = _valid_keys(type(old))
    before, after = (dict(_leaves(dataclasses.asdict(each), "", keys)) for each in (old, new))
    return {key: (before.get(key), after.get(key)) for key in before | after if before.get(key) != after.get(key)}


def _writable(node: DictConfig) -> None:
    """Frozen dataclasses make read-only nodes; the tree is filled before the dataclasses are made."""
    OmegaConf.set_readonly(node, False)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            _writable(child)


def to_yaml(config: Any) -> str:
    """The resolved tree as YAML, loadable again; secrets are :data:`REDACTED`, as files are for others, too."""
    tree = dataclasses.asdict(config)
    if tree.get("dashboard", {}).get("token"):
        tree["dashboard"]["token"] = REDACTED
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=None)


def _layers(path: Path, above: tuple[Path, ...] = ()) -> list[dict[str, Any]]:
    """The YAML file's mapping, its bases first. ``above`` are the files that led to it by their ``base``."""
    if path.resolve() in above:
        raise ConfigError("base", str(path), "a file that is not based on itself")
    if not path.is_file():
        folders = [path.parent, Path("configs")]
        near = sorted({str(other) for folder in folders for other in folder.glob("*.y*ml")})
        raise ConfigError("--config", str(path), "an existing YAML file", f"Here are: {', '.join(near) or 'none'}.")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError("--config", str(path), "valid YAML", str(error)) from error
    if not isinstance(tree, dict):
        raise ConfigError("--config", str(path), "a mapping of settings at the top")
    base = tree.pop("base", None)
    if not isinstance(base, str | None):
        raise ConfigError("base", base, f"the path of a YAML file, relative to {path.parent}")
    return [*(_layers(path.parent / base, (*above, path.resolve())) if base else []), tree]


def _valid_keys(schema: type, prefix: str = "") -> dict[str, Any]:
    """Every dotted key of a config dataclass with its type; nested dataclasses are listed themselves, too."""
    keys: dict[str, Any] = {}
    hints = typing.get_type_hints(schema)
    for item in dataclasses.fields(schema):
        kind, name = hints[item.name], f"{prefix}{item.name}"
        keys[name] = kind
        if dataclasses.is_dataclass(kind):
            keys.update(_valid_keys(typing.cast(type, kind), f"{name}."))
    return keys


def _leaves(value: Any, prefix: str, keys: dict[str, Any]) -> list[tuple[str, Any]]:
    """Flatten nested mappings down to the keys that hold values; a dict-typed setting is a value itself."""
    kind = keys.get(prefix)
    if isinstance(value, dict) and (not prefix or dataclasses.is_dataclass(kind)):
        return [leaf for k, v in value.items() for leaf in _leaves(v, f"{prefix}.{k}" if prefix else str(k), keys)]
    return [(prefix, value)]


def _leaves_of_override(key: str, text: str, keys: dict[str, Any]) -> list[tuple[str, Any]]:
    if _is_text(keys.get(key)):
        quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
        none = text in ("null", "None") and keys[key] is not str
        return [(key, None if none else yaml.safe_load(text) if quoted else text)]
    try:
        return _leaves(yaml.safe_load(_float_like_python(text)), key, keys)
    except yaml.YAMLError as error:
        raise ConfigError(key, text, "a YAML value", str(error)) from error


def _float_like_python(text: str) -> str:
    """YAML 1.1 reads ``1e-4`` as text; everybody who writes it means a number."""
    try:
        return repr(float(text)) if "e" in text.lower() and "." not in text else text
    except ValueError:
        return text


def _is_text(kind: Any) -> bool:
    return kind is str or (str in typing.get_args(kind) and typing.get_origin(kind) not in (list, dict, tuple))


def _set(tree: DictConfig, key: str, value: Any, keys: dict[str, Any]) -> None:
    parent = key
    while parent and parent not in keys:
        parent = parent.rpartition(".")[0]
    kind = keys.get(parent)
    if parent != key and typing.get_origin(kind) is not dict:
        nearest = _nearest(key, keys)
        siblings = sorted(k for k in keys if k.rpartition(".")[0] == parent)
        has = f"{parent or 'The top level'} has: {', '.join(siblings)}." if siblings else f"{parent} has none below it."
        raise ConfigError(key, value, "a known setting", f"Did you mean {nearest}? {has}" if nearest else has)
    if dataclasses.is_dataclass(kind):
        raise ConfigError(key, value, f"a mapping with {', '.join(f.name for f in dataclasses.fields(kind))}")
    allowed = _describe(kind)
    if float in (kind, *typing.get_args(kind)):
        value = _as_float(value)
    if typing.get_origin(kind) is list and not isinstance(value, list):
        raise ConfigError(key, value, allowed, f"In brackets: {key}=[{value}].")
    if parent == key and not _takes(kind, value):
        raise ConfigError(key, value, allowed)
    try:
        OmegaConf.update(tree, key, _escape(value), force_add=typing.get_origin(kind) is dict)
    except (OmegaConfBaseException, RecursionError) as error:  # YAML can hold a list that holds itself
        raise ConfigError(key, value, allowed, str(error).splitlines()[0]) from error


def _nearest(key: str, keys: Iterable[str]) -> str | None:
    """What an unknown key probably meant: one whose last part is that of ``key``, or nearly, wherever it lies; else one
    that is like it as a whole. None where nothing is: any other guess would mislead."""
    by_name: dict[str, list[str]] = {}
    for known in keys:
        by_name.setdefault(known.rpartition(".")[2], []).append(known)
    names = difflib.get_close_matches(key.rpartition(".")[2], by_name, n=1, cutoff=0.85)
    candidates, cutoff = (by_name[names[0]], 0.0) if names else (list(keys), 0.75)
    return next(iter(difflib.get_close_matches(key, candidates, n=1, cutoff=cutoff)), None)


def _takes(kind: Any, value: Any) -> bool:
    """Whether a setting of this type takes the value as it is: OmegaConf would turn text and truth into numbers, and
    look at the elements of lists only when they are read. It checks lists of dataclasses by itself."""
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is list:
        checked = dataclasses.is_dataclass(inner[0])
        return isinstance(value, list) and (checked or all(_takes(inner[0], item) for item in value))
    if typing.get_origin(kind) is dict:
        return isinstance(value, dict)
    if inner:
        return any(_takes(each, value) for each in inner)
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, int | float if kind is float else kind)


def _as_float(value: Any) -> Any:
    """Text that is a number as one, also in a list: ``1e-4`` is text in YAML 1.1."""
    if isinstance(value, list):
        return [_as_float(item) for item in value if item is not value]
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _escape(value: Any) -> Any:
    """Values arrive as written: no interpolation of ``${...}``."""
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, dict):
        return {k: _escape(v) for k, v in value.items()}
    return [_escape(v) for v in value] if isinstance(value, list) else value


def _describe(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if kind in names:
        return names[kind]
    if typing.get_origin(kind) is list:
        inner = typing.get_args(kind)[0]
        fields = ", ".join(f.name for f in dataclasses.fields(inner)) if dataclasses.is_dataclass(inner) else ""
        return f"a list, each element {f'a mapping with {fields}' if fields else _describe(inner)}"
    if typing.get_origin(kind) is dict:
        return "a mapping"
    return " or ".join(_describe(k) for k in typing.get_args(kind)) or str(kind)


def _build(node: DictConfig, prefix: str) -> Any:
    """Make the dataclass of a structured node, inner ones first, so that a refused value gets its full name."""
    kind = OmegaConf.get_type(node)
    assert kind is not None
    values: dict[str, Any] = {}
    for item in dataclasses.fields(kind):
        child = node._get_node(item.name)
        name = f"{prefix}.{item.name}" if prefix else item.name
        if (
            isinstance(child, DictConfig)
            and not child._is_none()
            and dataclasses.is_dataclass(OmegaConf.get_type(child))
        ):
            values[item.name] = _build(child, name)
        elif isinstance(child, ListConfig) and not child._is_none():
            elements = [child._get_node(i) for i in range(len(child))]
            values[item.name] = [
                _build(e, f"{name}[{i}]") if dataclasses.is_dataclass(OmegaConf.get_type(e)) else child[i]
                for i, e in enumerate(elements)
            ]
        else:
            value = node[item.name]
            values[item.name] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    try:
        return kind(**values)
    except ConfigError as error:
        raise error.prefixed(prefix) from None
