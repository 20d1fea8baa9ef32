"""The domain in plain data: what flows from a dataset to the optimizer.

``Prompt`` -> ``Group`` (n episodes of one prompt) -> ``Episode`` (turns) -> ``Turn`` (one completion and the
environment's answer) -> token. ``TrainingSequence`` is what the trainer eats.

A *policy version* is the number of optimizer steps the trainer has completed, an int. It is the only clock:
the staleness of a token is the trainer's version minus the token's version.

Arrays are one-dimensional NumPy arrays, one entry per token: ids and versions ``int32``, log-probs ``float32``
(natural logarithm), masks ``bool``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]

IdArray = np.ndarray
"""int32 [T]: token ids."""
FloatArray = np.ndarray
"""float32 [T]."""
VersionArray = np.ndarray
"""int32 [T]: policy versions."""

Message = dict[str, Any]
"""A chat message: ``role`` and ``content``, both text, and what templates know besides, such as ``tool_call_id``."""


@dataclass(frozen=True)
class Prompt:
    """One occurrence of a dataset row: the unit whose fate the ledger records.

    ``prompt_id`` is unique per occurrence (epoch and row), so a row seen twice has two ids.
    """

    prompt_id: str
    messages: tuple[Message, ...]
    token_ids: IdArray
    """int32 [P]: the messages rendered by the chat template, generation prompt included."""
    answer: Any = None
    """What the reward functions compare with, as the dataset gives it."""
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def task(self) -> str:
        """The task it belongs to: the dataset's column ``task``; "" when there is none."""
        return str(self.metadata.get("task", ""))


@dataclass(frozen=True)
class SamplingMask:
    """Which ids the sampler kept (top-k, top-p, min-p) at each of T tokens, without padding: N ids in all."""

    token_ids: IdArray
    """int32 [N]: the kept ids, token after token; within a token in no given order."""
    counts: np.ndarray
    """int32 [T]: how many of them each token has. 0 stands for the whole vocabulary."""

    def __post_init__(self) -> None:
        if int(self.counts.sum()) != len(self.token_ids):
            raise ValueError(f"the counts of a sampling mask add up to {self.counts.sum()}, not {len(self.token_ids)}")

    def __len__(self) -> int:
        return len(self.counts)

    @classmethod
    def whole(cls, length: int) -> SamplingMask:
        """``length`` tokens, each with the whole vocabulary."""
        return cls(np.zeros(0, dtype=np.int32), np.zeros(length, dtype=np.int32))

    @classmethod
    def join(cls, masks: Sequence[SamplingMask]) -> SamplingMask:
        """The tokens of all masks, one mask after another."""
        return cls(
            np.concatenate([mask.token_ids for mask in masks], dtype=np.int32),
            np.concatenate([mask.counts for mask in masks], dtype=np.int32),
        )

    def of(self, tokens: np.ndarray) -> SamplingMask:
        """The mask of the tokens at these indices, int [K], in their order."""
        counts = self.counts[tokens]
        starts = (np.cumsum(self.counts) - self.counts)[tokens]
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return SamplingMask(self.token_ids[np.repeat(starts, counts) + within], counts)

    def rows(self) -> np.ndarray:
        """int64 [N]: the token to which each kept id belongs."""
        return np.repeat(np.arange(len(self)), self.counts)

    def has(self, token_ids: np.ndarray) -> np.ndarray:
        """bool [T]: whether each token's own id, int [T], is among those kept for it."""
        rows = self.rows()
        found = self.counts == 0
        found[rows[self.token_ids == token_ids[rows]]] = True
        return found


@dataclass(frozen=True)
class Completion:
    """One generation by the policy service. All arrays have length R, the number of sampled tokens."""

    prompt_token_ids: IdArray
    """int32 [P]."""
    token_ids: IdArray
    """int32 [R]: the sampled ids, a sampled end token included."""
    logprobs: FloatArray
    """float32 [R]: behaviour log-probs, under the distribution that was sampled from."""
    policy_versions: VersionArray
    """int32 [R]: the version whose weights computed each token; never decreases."""
    kv_versions: VersionArray
    """int32 [R]: the oldest version whose keys and values the token attended to."""
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """The stop token id or string that ended it, where there was one other than the end token."""
    sampling_mask: SamplingMask | None = None
    """Kept ids of the R tokens; None where the sampler kept every id, or was told not to record them."""
    temperature: float = 1.0
    """It was sampled at; it may be changed while a run goes on, so each completion keeps its own."""


@dataclass(frozen=True)
class Turn:
    """One completion and what the environment answered (empty when the episode ended)."""

    completion: Completion
    reply: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Episode:
    """One scored trajectory of one prompt."""

    episode_id: str
    prompt_id: str
    turns: tuple[Turn, ...]
    reward: float
    """Weighted sum of ``reward_parts``."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Each reward function's own value, and each part that the environment gave, before weighting."""
    metadata: dict[str, Any] = field(default_factory=dict)
    trained_since: int = 0
    """Tokens of older versions are left out of the loss (``buffer.stale: mask``)."""
    opening: tuple[Message, ...] = ()
    """The environment's messages between the prompt's and the first completion."""
    cut: str = ""
    """The limit that ended it while the environment had more to say: ``turns`` or ``context``; "" for none."""

    @property
    def policy_versions(self) -> VersionArray:
        """int32: of all sampled tokens, turn by turn."""
        return np.concatenate([turn.completion.policy_versions for turn in self.turns])

    @property
    def kv_versions(self) -> VersionArray:
        """int32: of all sampled tokens, turn by turn."""
        return np.concatenate([turn.completion.kv_versions for turn in self.turns])

    @property
    def truncated(self) -> bool:
        """True when a limit ended it: that of turns, of the context, or the last completion's own (there the finish
        reason decides, no id comparison)."""
        return bool(self.cut) or self.turns[-1].completion.finish_reason == "length"


@dataclass(frozen=True)
class Group:
    """The episodes of one prompt; the baseline of their advantages is computed within the group."""

    prompt: Prompt
    episodes: tuple[Episode, ...]
    failed: int = 0
    """Episodes that raised or timed out; they carry no reward and are not trained."""


@dataclass(frozen=True)
class TrainingSequence:
    """One row of training data, before packing. All arrays have length T, prompt and completion together.

    Entry t of ``logprobs``, ``policy_versions``, ``advantages`` and ``loss_mask`` belongs to token t itself (not to the
    prediction of the next token). Prompt tokens have ``loss_mask`` False, log-prob 0 and version -1.
    """

    sequence_id: str
    token_ids: IdArray
    loss_mask: np.ndarray
    """bool [T]: True for sampled tokens that are trained."""
    logprobs: FloatArray
    """float32 [T]: behaviour log-probs."""
    policy_versions: VersionArray
    """int32 [T]."""
    advantages: FloatArray
    """float32 [T]."""
    temperature: float = 1.0
    """The sampling temperature: the trainer scales its logits by 1/temperature before taking log-probs."""
    sampling_mask: SamplingMask | None = None
    """Kept ids of the T tokens, over which alone the trainer takes its softmax; None: the whole vocabulary for all."""
    episode_id: str = ""
    """The sequences of one episode weigh as one; "": the sequence is an episode of its own."""

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in ("loss_mask", "logprobs", "policy_versions", "advantages"):
            if len(getattr(self, name)) != length:
                raise ValueError(
                    f"{self.sequence_id}: {name} has {len(getattr(self, name))} entries, token_ids has {length}; "
                    "every array of a TrainingSequence has one entry per token"
                )
        if self.sampling_mask is not None and len(self.sampling_mask) != length:
            raise ValueError(
                f"{self.sequence_id}: sampling_mask has {len(self.sampling_mask)} entries, token_ids has {length}"
            )

    @property
    def oldest_version(self) -> int:
        """The smallest version among trained tokens."""
        return int(self.policy_versions[self.loss_mask].min())


@dataclass(frozen=True)
class StepStats:
    """What one optimizer step reports. Losses and ratios are means over the trained tokens of the whole step."""

    version: int
    """Policy version after the step; unchanged when ``skipped``."""
    loss: float
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    ratio_mean: float
    """Mean importance ratio exp(trainer log-prob - behaviour log-prob)."""
    ratio_max: float
    clip_fraction: float
    """Share of tokens whose ratio a clip bounds: the sum of ``clip_fraction_low`` and ``clip_fraction_high``."""
    entropy: float
    """Mean entropy of the trainer's next-token distribution on trained tokens, nats."""
    trained_tokens: int
    """Tokens in the loss's denominator."""
    total_tokens: int
    """Tokens in the forward pass, padding excluded."""
    nonfinite_tokens: int
    """Tokens left out of loss and denominator because their behaviour log-prob was not finite."""
    wall_s: float
    skipped: bool = False
    """True when no token had a loss: no optimizer step was taken and the version did not change."""
    clip_fraction_low: float = 0.0
    clip_fraction_high: float = 0.0
    effective_sample_size: float = 0.0
    """(sum r)^2 / (n sum r^2) over the ratios r of n trained tokens: 1 where all are equal, 1/n where one is all."""
    truncated_fraction: float = 0.0
    """Share of tokens whose importance weight was cut to its bound."""
    masked_fraction: float = 0.0
    """Share of tokens that the correction left out because of their importance weight."""
    mismatch_kl_k1: float = 0.0
    """Mean of log mu - log pi: KL from sampler to trainer, nats per token; exact in expectation, noisy."""
    mismatch_kl_k3: float = 0.0
    """Mean of r - 1 - log r: the same KL, never negative and less noisy."""
    padding_fraction: float = 0.0
    """Share of the places of all ranks' rows that hold no token: rows shorter than those computed beside them, rows to
    fill up, multiples for tensor parallelism."""
    prefix_sharing: float = 1.0
    """Tokens of the sequences over tokens computed: how much shared prefixes save."""
    phase_s: dict[str, float] = field(default_factory=dict, compare=False)
    """Seconds by phase on this rank: data (packing and copies), forward (without log-probs), logprobs, reference,
    backward, clip, publish (wait for the weights' snapshot), optimizer, other. They add up to ``wall_s``."""
    reference_kl: float = 0.0
    """KL from the trained to the reference policy by ``trainer.loss.kl.estimator``, nats per token; 0 without one."""
