"""Checkpoints by torch's distributed checkpoint (DCP): every rank writes its shards, any number of ranks resumes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
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

    Raises:
        ForgeError: on every rank, where one could not write; what was there before under the name is untouched.
    """
    staging, former = (folder.with_name(folder.name + end) for end in (".partial", ".former"))
    meta = json.dumps({"version": version, "extra": extra})

    def begin() -> None:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)

    def finish() -> None:
        try:
            (staging / META_FILE).write_text(meta)
            if folder.exists():
                folder.rename(former)
            staging.rename(folder)
        except OSError:
            shutil.rmtree(staging, ignore_errors=True)
            if former.exists():
                former.rename(folder)
            raise
        shutil.rmtree(former, ignore_errors=True)

    _on_first_rank(folder, rank, begin)
    try:
        dcp.save(_state_dict(state), checkpoint_id=str(staging), no_dist=not dist.is_initialized())
    except CheckpointException as error:
        if rank == 0:
            shutil.rmtree(staging, ignore_errors=True)  # the disk may be full of it
        raise _unwritten(folder, repr(_cause(error))) from error
    _on_first_rank(folder, rank, finish)


def _on_first_rank(folder: Path, rank: int, work: Callable[[], None]) -> None:
    """All ranks wait for the first to do it, and fail with it."""
    failure: list[str | None] = [None]
    if rank == 0:
        try:
            work()
        except OSError as error:
            failure = [repr(error)]
    if dist.is_initialized():
        dist.broadcast_object_list(failure)
    if failure[0] is not None:
        raise _unwritten(folder, failure[0])


def _unwritten(folder: Path, cause: str) -> ForgeError:
    return ForgeError(
        f"the checkpoint {folder} could not be written: {cause}. "
        "Make room there or choose another place, then save or resume again."
    )


def _cause(error: CheckpointException) -> BaseException:
    """What failed on the first rank that did. A CheckpointException is no Exception: it would end the process."""
    cause, _ = next(iter(error.failures.values()))
    return cause


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
    except CheckpointException as error:
        raise ForgeError(
            f"the checkpoint {folder} does not fit this model: {_cause(error)}. Resume with its model."
        ) from error
    for name, part in state.items():
        # Parameters were loaded in place; a model's own load_state_dict would only copy them onto themselves.
        if not isinstance(part, nn.Module):
            part.load_state_dict(loaded[name])
    return int(meta["version"]), meta["extra"]


def _state_dict(state: dict[str, Any]) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in state.items()}
