"""Weights between a torchtitan model and Hugging Face names: load from safetensors, hand out shards, export.

Hugging Face names are the wire format; torchtitan's state-dict adapter holds the name map and the rotary permutation
of llama's query and key weights.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from forge_async.errors import ForgeError, ModelNotFoundError
from forge_async.model_zoo import check_export_folder

_EXPERT_KEY = "moe.routed_experts.inner_experts."
_PERMUTED = re.compile(r"attention\.qkv_linear\.w[qk]\.weight$")
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".gguf", ".safetensors.index.json")


@dataclass(frozen=True)
class HfShard:
    """One rank's part of one tensor under its Hugging Face name."""

    name: str
    tensor: torch.Tensor
    """The local part; shares memory with the live parameter where no conversion was needed."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where the local part begins in the whole, per dimension."""


def read_safetensors(model_path: str | Path) -> dict[str, torch.Tensor]:
    """Every tensor of a model folder, memory-mapped.

    Raises:
        ModelNotFoundError: the folder holds no ``*.safetensors``.
    """
    files = sorted(Path(model_path).glob("*.safetensors"))
    if not files:
        raise ModelNotFoundError(f"model folder {model_path} has no *.safetensors file")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(str(file), framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 (a safetensors handle is not a mapping)
                tensors[name] = handle.get_tensor(name)
    return tensors


@torch.no_grad()
def load_hf_weights(model: nn.Module, adapter: Any, model_path: str | Path) -> None:
    """Copy a model folder's weights into ``model``; every rank reads its own slices.

    Raises:
        ForgeError: a tensor is missing, unknown or of another shape; the message names it.
    """
    source = read_safetensors(model_path)
    try:
        titan_tensors = adapter.from_hf(dict(source))
    except (KeyError, AssertionError, RuntimeError) as error:
        raise ForgeError(f"{model_path}: its weights do not fit its config.json: {error}") from error
    targets = model.state_dict()
    missing = sorted(set(targets) - set(titan_tensors))
    unknown = sorted(set(titan_tensors) - set(targets))
    if missing or unknown:
        raise ForgeError(
            f"{model_path}: weights do not fit its config.json: missing {missing[:3]}, unknown {unknown[:3]} "
            f"({len(missing)} missing and {len(unknown)} unknown in all)"
        )
    for name, target in targets.items():
        value = titan_tensors[name]
        if tuple(value.shape) != tuple(target.shape):
            raise ForgeError(
                f"{model_path}: {name} has shape {tuple(value.shape)}, config.json asks for {tuple(target.shape)}"
            )
        if isinstance(target, DTensor):
            shape, offsets = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
            for dimension, (length, offset) in enumerate(zip(shape, offsets, strict=True)):
                value = value.narrow(dimension, offset, length) if length else value[:0]
            target.to_local().copy_(value)
        else:
            target.copy_(value)


@torch.no_grad()
def hf_shards(model: nn.Module, adapter: Any, rank: int, world_size: int) -> Iterator[HfShard]:
    """This rank's part of every tensor, under Hugging Face names; over all ranks each tensor is covered exactly once.

    Collective: with several ranks all of them must iterate to the end, because llama's query and key weights are
    gathered (their rotary permutation mixes rows of several shards). Those go to one rank each, in turn.
    """
    for position, (name, value) in enumerate(model.state_dict().items()):
        if not isinstance(value, DTensor):
            if rank == 0:
                yield from _whole(adapter, name, value)
        elif _needs_whole(adapter, name, value):
            whole = value.full_tensor()
            if rank == position % world_size:
                yield from _whole(adapter, name, whole)
        elif _EXPERT_KEY in name:
            yield from _expert_shards(adapter, name, value)
        else:
            local = value.to_local()
            _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
            if local.numel() and _is_first_replica(value):
                for hf_name in adapter.to_hf({name: local}):
                    yield HfShard(hf_name, local, tuple(value.shape), tuple(offsets))


def _whole(adapter: Any, name: str, value: torch.Tensor) -> Iterator[HfShard]:
    for hf_name, tensor in adapter.to_hf({name: value}).items():
        yield HfShard(hf_name, tensor, tuple(tensor.shape), (0,) * tensor.ndim)


def _needs_whole(adapter: Any, name: str, value: DTensor) -> bool:
    """Llama permutes query and key rows; experts split over another dimension than the first are not separable."""
    if _PERMUTED.search(name) and hasattr(adapter, "_permute"):
        return True
    return _EXPERT_KEY in name and any(not item.is_replicate() and item.dim != 0 for item in value.placements)


def _expert_shards(adapter: Any, name: str, value: DTensor) -> Iterator[HfShard]:
    """Experts are one [E, ...] tensor here and E tensors there; a rank hands out the experts it holds."""
    local = value.to_local()
    _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if not local.numel() or not _is_first_replica(value):
        return
    layer = re.search(r"\d+", name)
    assert layer is not None
    generic = re.sub(r"\d+", "{}", name, count=1)
    template = next(hf for hf, own in adapter.from_hf_map.items() if own == generic)
    for index in range(local.shape[0]):
        tensor = local[index]
        hf_name = template.format(layer.group(0), offsets[0] + index)
        yield HfShard(hf_name, tensor, tuple(tensor.shape), (0,) * tensor.ndim)


def _is_first_replica(value: DTensor) -> bool:
    """False on ranks that hold a copy of what another rank hands out (replicated mesh dimensions)."""
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(
        index == 0 or not placement.is_replicate()
        for placement, index in zip(value.placements, coordinate, strict=True)
    )


@torch.no_grad()
def full_hf_state(model: nn.Module, adapter: Any) -> dict[str, torch.Tensor]:
    """Whole tensors under Hugging Face names, on the CPU, on every rank. Collective."""
    whole = {}
    for name, value in model.state_dict().items():
        tensor = value.full_tensor() if isinstance(value, DTensor) else value
        for hf_name, converted in adapter.to_hf({name: tensor.detach()}).items():
            whole[hf_name] = converted.cpu().contiguous()
    return whole


def write_hf_folder(folder: Path, weights: dict[str, torch.Tensor], model_path: Path, dtype: str) -> None:
    """A folder that transformers and vLLM load: weights, the model's config and its tokenizer.

    Written beside and renamed, so that an interrupted export leaves no half folder under its final name.

    Raises:
        ForgeError: something else is in its place; see :func:`check_export_folder`.
    """
    folder = folder.absolute()
    check_export_folder(folder)
    staging = folder.with_name(folder.name + ".partial")
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    for file in model_path.iterdir():
        if file.is_file() and not file.name.endswith(_NOT_COPIED):
            shutil.copyfile(file, staging / file.name)
    config = json.loads((model_path / "config.json").read_text())
    config["dtype"] = dtype
    config.pop("torch_dtype", None)
    (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    target_dtype = getattr(torch, dtype)
    unique = {name: tensor.to(target_dtype).clone() for name, tensor in weights.items()}
    save_file(unique, str(staging / "model.safetensors"), metadata={"format": "pt"})
    readable = (staging / "config.json").stat().st_mode & 0o777  # safetensors writes for the owner alone
    (staging / "model.safetensors").chmod(readable)
    if folder.exists():
        shutil.rmtree(folder)
    staging.rename(folder)
