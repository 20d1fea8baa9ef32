"""HF transformers as the judge of what an engine did: log-probs under the weights, and the keys and values, claimed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from forge_async.policy.life_cycle import spans_of
from forge_async.types import Completion

TOLERANCE = 1e-4


def perturbed(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Other weights of the same kind: matrices get noise of a third of their own spread, vectors of a twentieth."""
    generator = torch.Generator().manual_seed(seed)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        scale = 0.3 * tensor.std() if tensor.ndim > 1 else 0.05
        return tensor + scale * torch.randn(tensor.shape, generator=generator)

    return {name: change(tensor) for name, tensor in tensors.items()}


class Seen:
    """What an engine of one kind of model did, with that model's weights of all versions in HF transformers.

    Version v has the weights ``weights[v % len(weights)]``.
    """

    def __init__(
        self, folder: Path, work: Path, weights: list[dict[str, torch.Tensor]], recorded: dict[str, Any]
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.weights, self.recorded = weights, recorded
        self.models = []
        for version, tensors in enumerate(weights):
            copy = work / f"version-{version}"
            shutil.copytree(folder, copy)
            save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
            self.models.append(AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32).eval())

    def __getitem__(self, key: str) -> Any:
        return self.recorded[key]

    @torch.no_grad()
    def logits(self, completion: Completion, versions: np.ndarray | None = None) -> torch.Tensor:
        """float32 [R, V]: token r's logits by the model of its version.

        Keys and values stay as once computed, but for a token from which on another version is the oldest in the cache:
        there all are computed anew, by the token's own version.
        """
        from transformers import DynamicCache

        versions = completion.policy_versions if versions is None else versions
        ids = torch.tensor(np.concatenate([completion.prompt_token_ids, completion.token_ids]).astype(np.int64))
        start, parts = len(completion.prompt_token_ids), []
        for _, first, last in spans_of(completion.kv_versions):
            cache, done = DynamicCache(), 0
            for version, begin, end in spans_of(versions[first:last]):
                model, stop = self.models[version % len(self.models)], start + first + end - 1
                out = model(ids[None, done:stop], past_key_values=cache, use_cache=True)
                done = stop
                parts.append(out.logits[0, -(end - begin) :])
        return torch.cat(parts).float()

    def logprobs(self, completion: Completion, **kwargs: Any) -> np.ndarray:
        return picked(self.logits(completion, **kwargs), completion)


def picked(logits: torch.Tensor, completion: Completion) -> np.ndarray:
    chosen = torch.tensor(completion.token_ids.astype(np.int64))[:, None]
    return logits.log_softmax(-1).gather(1, chosen)[:, 0].numpy()
