"""Checkpoints by torch's distributed checkpoint (DCP): every rank writes its shards, any number of ranks resumes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from forge_async.errors import ForgeError
from forge_async.observability.run_folder import META_FILE


def save_checkpoint(folder: Path, state: dict[str, Any], version: int, extra: dict[str, Any], rank: int) -> None:
    """Write to ``folder`` + ``.partial`` and rename when every rank is done: a folder under its name is complete.

    Args:
        state: ``model``, ``optimizer`` and ``schedule``; anything with ``state_dict`` and ``load_state_dict``.
        extra: the caller's own state, anything JSON can hold.
    """
    staging = folder.with_name(folder.name + ".partial")
    if rank == 0:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    _barrier()
    dcp.save(_state_dict(state), checkpoint_id=str(staging), no_dist=not dist.is_initialized())
    if rank == 0:
        (staging / META_FILE).write_text(json.dumps({"version": version, "extra": extra}))
        if folder.exists():
            shutil.rmtree(folder)
        staging.rename(folder)


def load_checkpoint(folder: Path, state: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Load into ``state`` in place; returns policy version and the caller's ``extra``.

    Raises:
        ForgeError: there is no complete checkpoint at ``folder``, or it is one of another model.
    """
    file = folder / META_FILE
    if not file.is_file():
        raise ForgeError(f"no complete checkpoint at {folder}: {META_FILE} is missing")
    meta = json.loads(file.read_text())
    loaded = _state_dict(state)
    try:
        dcp.load(loaded, checkpoint_id=str(folder), no_dist=not dist.is_initialized())
    except CheckpointException as error:  # not an Exception: it would end the process of the trainer
        cause, _ = next(iter(error.failures.values()))
        raise ForgeError(f"the checkpoint {folder} does not fit this model: {cause}. Resume with its model.") from error
    for name, part in state.items():
        # Parameters were loaded in place; a model's own load_state_dict would only copy them onto themselves.
        if not isinstance(part, nn.Module):
            part.load_state_dict(loaded[name])
    return int(meta["version"]), meta["extra"]


def _state_dict(state: dict[str, Any]) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in state.items()}


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
