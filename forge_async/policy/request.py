"""One request to the engine, over all the times that it is submitted to vLLM."""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from forge_async.policy.config import SamplingConfig
from forge_async.policy.vllm_compat import kept_ids, mask_params
from forge_async.types import Completion, FinishReason, SamplingMask

if TYPE_CHECKING:
    from vllm import CompletionOutput, SamplingParams


@dataclass(eq=False)
class Request:
    """What was asked, and what has come so far: one entry per generated token in each list."""

    request_id: str
    prompt: np.ndarray
    """int32 [P]."""
    params: SamplingParams
    """As asked; :meth:`remaining_params` is what is left of it."""
    future: Future[Completion]
    records_mask: bool = False
    """Whether the completion comes with a sampling mask."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kv_versions: list[int] = field(default_factory=list)
    kept: list[np.ndarray] = field(default_factory=list)
    """int32 arrays of ids that the sampler kept; empty unless ``records_mask``."""
    kv_version: int = -1
    """The version at which its keys and values begin; -1 before it was first submitted."""
    submitted_at: int = 0
    """Tokens that it had when it was last submitted to vLLM."""
    internal_id: str = ""
    """vLLM's id of the last submission."""

    def remaining_params(self) -> SamplingParams:
        """Parameters with which prompt and generated tokens go on to the very completion that was asked for.

        A seeded request goes on with a seed of its own, made of its seed and its length: the old one would repeat the
        draws that made its first tokens.
        """
        done = len(self.token_ids)
        if not done:
            return self.params
        params = self.params.clone()
        assert params.max_tokens is not None
        params.max_tokens -= done
        params.min_tokens = max(0, params.min_tokens - done)
        if params.seed is not None:
            digest = hashlib.blake2b(f"{params.seed} {done}".encode(), digest_size=7).digest()
            params.seed = int.from_bytes(digest, "big")
        return params

    def append(self, sample: CompletionOutput, version: int) -> list[int]:
        """Take the tokens that one forward pass sampled, with their records; returns them."""
        new = list(sample.token_ids)
        if not new:
            return new
        logprobs = sample.logprobs
        assert logprobs is not None
        self.token_ids += new
        self.logprobs += [logprobs.logprobs[start] for start in logprobs.start_indices]  # the sampled token is first
        self.versions += [version] * len(new)
        self.kv_versions += [self.kv_version] * len(new)
        if self.records_mask:
            kept, complete = kept_ids(sample)
            self.kept += kept
            for place, whole in enumerate(complete, start=-len(new)):
                if not whole:
                    self.logprobs[place] = math.nan  # no ratio without the mask: the token leaves the loss, counted
        return new

    def restart(self) -> int:
        """Forget all generated tokens; returns how many there were."""
        discarded = len(self.token_ids)
        for values in (self.token_ids, self.logprobs, self.versions, self.kv_versions, self.kept):
            values.clear()
        return discarded

    def completion(self, reason: FinishReason, stop_reason: int | str | None = None) -> Completion:
        return Completion(
            prompt_token_ids=self.prompt,
            token_ids=np.asarray(self.token_ids, dtype=np.int32),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            policy_versions=np.asarray(self.versions, dtype=np.int32),
            kv_versions=np.asarray(self.kv_versions, dtype=np.int32),
            finish_reason=reason,
            stop_reason=stop_reason,
            sampling_mask=self._mask() if self.records_mask else None,
            temperature=self.params.temperature,
        )

    def _mask(self) -> SamplingMask:
        counts = np.array([len(ids) for ids in self.kept], dtype=np.int32)
        return SamplingMask(np.concatenate([np.zeros(0, np.int32), *self.kept], dtype=np.int32), counts)


def sampling_params(
    sampling: SamplingConfig, seed: int | None, vocabulary: int, native_mask: bool = False
) -> SamplingParams:
    """vLLM's parameters of a request: one completion, each token with its own log-prob, told as they come.

    Args:
        vocabulary: the model's number of ids.
        native_mask: the engine was built to record sampling masks itself.
    Raises:
        ConfigError: the kept tokens cannot be recorded with these settings.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        seed=seed,
        flat_logprobs=True,
        **mask_params(sampling, vocabulary, native_mask),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
