"""What an HF model folder holds: names, shapes and tensors of its safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from forge_async.errors import ModelNotFoundError

SAFETENSORS_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def read_config(folder: str | Path) -> dict[str, object]:
    """The folder's ``config.json``."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ModelNotFoundError(
            f"{folder}: not a Hugging Face model folder (no config.json); "
            "make one with: python -m forge_async.model_zoo NAME FOLDER"
        )
    return json.loads(path.read_text())


def weight_files(folder: str | Path) -> list[Path]:
    """The folder's safetensors files, in name order."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ModelNotFoundError(f"{folder}: no *.safetensors file")
    return files


def layout(folder: str | Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """HF name -> (shape, dtype) of every tensor, out of the files' headers."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                header = file.get_slice(name)
                kind = header.get_dtype()
                if kind not in SAFETENSORS_DTYPES:
                    raise ModelNotFoundError(
                        f"{path.name}: {name} has dtype {kind}; quantized models cannot be updated"
                    )
                found[name] = tuple(header.get_shape()), SAFETENSORS_DTYPES[kind]
    return found


def tensors(folder: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, tensor) pairs, one at a time."""
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                yield name, file.get_tensor(name)
