"""Checks that need no engine: templates, limits, memory, staleness."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from forge_async.checks import sampling_bias
from forge_async.config import Config
from forge_async.doctor.finding import Finding
from forge_async.errors import DataError
from forge_async.mesh.runtime import visible_gpus
from forge_async.rollout.rendering import render_prompt
from forge_async.types import Prompt

OPTIMIZER_BYTES = 16
"""Per parameter in the trainer: float32 weight, gradient and two moments."""


def check_at_rest(config: Config, tokenizer: Any, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """All of them: cheap, so that every start of a run looks at them too."""
    yield check_template(tokenizer, prompts)
    yield check_completion_limit(config, tokenizer, prompts)
    yield check_mask(config)
    yield check_staleness(config)
    yield check_memory(config)


def check_template(tokenizer: Any, prompts: Sequence[Prompt]) -> Finding:
    """That prompts begin with at most one BOS, and that a later turn's prompt continues the earlier tokens."""
    check = "chat template: one BOS, and turns continue each other"
    bos = tokenizer.bos_token_id
    for prompt in prompts:
        leading = 0
        for token in prompt.token_ids:
            if bos is None or token != bos:
                break
            leading += 1
        if leading > 1:
            return Finding(
                check,
                False,
                f"prompt {prompt.prompt_id} begins with {leading} BOS tokens (id {bos})",
                "Remove the BOS from the chat template or from the dataset's text: the model has never seen two.",
            )
        answer = {"role": "assistant", "content": str(prompt.answer)}
        follow_up = {"role": "user", "content": "Go on."}
        try:
            longer = render_prompt(tokenizer, [*prompt.messages, answer, follow_up])
        except DataError:
            continue  # a template without several turns: none will be asked of it
        if longer[: len(prompt.token_ids)].tolist() != prompt.token_ids.tolist():
            return Finding(
                check,
                True,
                "the template rewrites earlier turns: an episode of several turns is trained as several sequences",
            )
    return Finding(check, True, f"{len(prompts)} prompts, at most one BOS each; a second turn continues the first")


def check_completion_limit(config: Config, tokenizer: Any, prompts: Sequence[Prompt]) -> Finding:
    """That the reference answers fit ``policy.sampling.max_tokens``, an end token included."""
    limit = config.policy.sampling.max_tokens
    lengths = [
        len(tokenizer(str(prompt.answer), add_special_tokens=False)["input_ids"]) + 1
        for prompt in prompts
        if isinstance(prompt.answer, str | int | float)
    ]
    if not lengths:
        return Finding("completion limit", True, "the dataset has no plain answers to compare with")
    cut = sum(length > limit for length in lengths)
    figure = f"reference answers take up to {max(lengths)} tokens, policy.sampling.max_tokens is {limit}"
    remedy = f"{cut} of {len(lengths)} right answers cannot be given. Raise policy.sampling.max_tokens."
    return Finding("completion limit", not cut, figure, remedy if cut else "")


def check_mask(config: Config) -> Finding:
    """That the trainer can take its softmax over the tokens which the sampler chose from."""
    bias, restricting = sampling_bias(config), config.policy.sampling.restricting
    if bias is not None:
        return Finding("sampling mask", False, bias, "Set policy.sampling.sampling_mask=true.")
    kept = ", ".join(f"{name}={value:g}" for name, value in restricting.items())
    return Finding(
        "sampling mask", True, f"recorded and replayed ({kept})" if kept else "not needed: no token is left out"
    )


def check_staleness(config: Config) -> Finding:
    """What the config promises about the age of trained tokens, and whether the engines can be kept busy within it."""
    buffer, policy = config.buffer, config.policy
    requests = buffer.capacity * config.rollout.group_size
    seats = policy.num_replicas * policy.max_num_seqs
    figure = (
        f"no trained token is older than {buffer.token_bound} steps; at most {buffer.capacity} prompts are open, "
        f"{requests} requests for {seats} places in the engines"
    )
    return Finding("staleness bound", True, figure)


def parameters_of(model_path: str) -> int:
    """Parameters of a Hugging Face folder, from the headers of its safetensors files."""
    count = 0
    for path in sorted(Path(model_path).glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        count += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return count


def memory_parts(config: Config, parameters: int, vocabulary: int) -> Iterator[tuple[str, float]]:
    """(What, GiB) of all processes of the run together; activations of the layers are not among them."""
    gib = 2.0**30
    dtype: torch.dtype = getattr(torch, config.policy.dtype)
    weights = parameters * dtype.itemsize / gib
    yield "trainer", OPTIMIZER_BYTES * parameters * config.trainer.parallelism.dp_replicate / gib
    if config.trainer.loss.kl.coefficient > 0:
        yield "reference", 4 * parameters * config.trainer.parallelism.dp_replicate / gib
    yield "logits", 3 * 4 * config.trainer.logprob_chunk * vocabulary * config.trainer.procs / gib
    yield "policy", config.policy.num_replicas * (2 * weights + config.policy.kv_cache_gib)
    yield "store", (config.store.keep_versions + 1) * weights


def check_memory(config: Config) -> Finding:
    """An estimate of the run's memory against what is free here; on GPUs, whose memory is not asked for, a figure."""
    settings = json.loads((Path(config.model.path) / "config.json").read_text(encoding="utf-8"))
    parts = dict(memory_parts(config, parameters_of(config.model.path), settings["vocab_size"]))
    needed = sum(parts.values())
    text = f"about {needed:.2f} GiB ({', '.join(f'{name} {size:.2f}' for name, size in parts.items())})"
    if visible_gpus() and config.trainer.device != "cpu":
        return Finding("memory", True, f"{text}, over {len(visible_gpus())} GPUs and this host")
    free = psutil.virtual_memory().available / 2**30
    remedy = "Lower policy.kv_cache_gib or policy.num_replicas, or shard the trainer over more hosts."
    return Finding("memory", needed <= free, f"{text} of {free:.1f} GiB free", "" if needed <= free else remedy)
