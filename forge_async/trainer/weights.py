"""Weights between a torchtitan model and Hugging Face names: load from safetensors, hand out shards, export.

Hugging Face names are the wire format; torchtitan's state-dict adapter holds the name map and the rotary permutation
of llama's query and key weights.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from forge_async.errors import ForgeError, ModelNotFoundError
from forge_async.model_zoo import check_export_folder
from forge_async.store.layout import FullTensor, TensorShard

_EXPERT_KEY = "moe.routed_experts.inner_experts."
_PERMUTED = re.compile(r"attention\.qkv_linear\.w[qk]\.weight$")
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".gguf", ".safetensors.index.json")


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
def hf_shards(model: nn.Module, adapter: Any, rank: int, world_size: int) -> Iterator[TensorShard]:
    """This rank's part of every tensor, under Hugging Face names; over all ranks each tensor is covered exactly once.

    Views of live parameters, but for tensors that must be gathered (see :func:`_needs_whole`), which go to one rank
    each, in turn. Collective where there are such: all ranks must iterate to the end.
    """
    for position, (name, value) in enumerate(model.state_dict().items()):
        heads = _permuted_heads(adapter, name)
        if not isinstance(value, DTensor):
            if rank == 0 and heads:
                yield from _unpermuted(adapter, name, value, heads, tuple(value.shape), 0)
            elif rank == 0:
                yield from _whole(adapter, name, value)
        elif heads and _is_split_by_rows(value):
            _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
            if value.to_local().numel() and _is_first_replica(value):
                yield from _unpermuted(adapter, name, value.to_local(), heads, tuple(value.shape), offsets[0])
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
                    yield TensorShard(hf_name, local, tuple(value.shape), tuple(offsets))


def _whole(adapter: Any, name: str, value: torch.Tensor) -> Iterator[TensorShard]:
    for hf_name, tensor in adapter.to_hf({name: value}).items():
        yield TensorShard(hf_name, tensor, tuple(tensor.shape), (0,) * tensor.ndim)


def hf_layout(model: nn.Module, adapter: Any) -> tuple[FullTensor, ...]:
    """Every tensor in full, under Hugging Face names, in the same order on every rank."""
    layout = []
    for name, value in model.state_dict().items():
        blank = torch.empty(value.shape, dtype=value.dtype, device="meta")
        for hf_name, tensor in adapter.to_hf({name: blank}).items():
            layout.append(FullTensor(hf_name, tensor.dtype, tuple(tensor.shape)))
    return tuple(layout)


@torch.no_grad()
def memory_of(model: nn.Module) -> list[int]:
    """Addresses of this rank's parameters: while they stay the same, so do views of them."""
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return [tensor.untyped_storage().data_ptr() for tensor in local]


def gathers(model: nn.Module, adapter: Any) -> bool:
    """Whether :func:`hf_shards` is collective; the same on every rank."""
    return any(
        isinstance(value, DTensor)
        and _needs_whole(adapter, name, value)
        and not (_permuted_heads(adapter, name) and _is_split_by_rows(value))
        for name, value in model.state_dict().items()
    )


def _permuted_heads(adapter: Any, name: str) -> int:
    """Heads of a tensor whose rows llama permutes (query and key); 0 for every other tensor."""
    found = _PERMUTED.search(name)
    if found is None or not hasattr(adapter, "_permute"):
        return 0
    attention = adapter.model_config.layers[0].attention
    heads = attention.n_heads if name.endswith("wq.weight") else attention.n_kv_heads or attention.n_heads
    return int(heads)


def _unpermuted(
    adapter: Any, name: str, rows: torch.Tensor, heads: int, whole: tuple[int, ...], start: int
) -> Iterator[TensorShard]:
    """Rows ``start``... of a query or key weight, as views in Hugging Face's order of rows.

    torchtitan holds a head's rows in pairs (j, 0), (j, 1), Hugging Face all of (., 0) before all of (., 1). Whole heads
    stay in their place, so that they make one shard; of a head that is cut, each half makes a shard of its own.
    """
    (hf_name,) = adapter.to_hf({name: torch.empty(whole, device="meta")})
    head = whole[0] // heads
    end = start + rows.shape[0]
    first, last = -(-start // head), end // head
    if first < last:
        block = rows[first * head - start : last * head - start]
        pairs = block.view(last - first, head // 2, 2, whole[1]).transpose(1, 2)
        yield TensorShard(hf_name, pairs, whole, (first * head, 0), tuple(block.shape))
    cuts = [(start, min(end, first * head))] + ([(last * head, end)] if last >= first else [])
    for cut_start, cut_end in cuts:
        base = cut_start // head * head
        for half in (0, 1):
            begin = cut_start + (cut_start + half) % 2
            part = rows[begin - start : cut_end - start : 2]
            if cut_start < cut_end and part.shape[0]:
                yield TensorShard(hf_name, part, whole, (base + half * head // 2 + (begin - base) // 2, 0))


def _is_split_by_rows(value: DTensor) -> bool:
    """One mesh dimension holds consecutive rows each; the others hold copies."""
    shards = [placement for placement in value.placements if not placement.is_replicate()]
    return len(shards) == 1 and type(shards[0]) is Shard and shards[0].dim == 0


def _needs_whole(adapter: Any, name: str, value: DTensor) -> bool:
    """Query and key rows that are permuted and not split by rows alone; experts split over another dimension than the
    first."""
    if _permuted_heads(adapter, name):
        return True
    return _EXPERT_KEY in name and any(not item.is_replicate() and item.dim != 0 for item in value.placements)


def _expert_shards(adapter: Any, name: str, value: DTensor) -> Iterator[TensorShard]:
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
        yield TensorShard(hf_name, tensor, tuple(tensor.shape), (0,) * tensor.ndim)


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
