"""``forge-async export``: a checkpoint of a run as a Hugging Face folder."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

from forge_async.config import Config
from forge_async.errors import ConfigError
from forge_async.observability import RunFolder
from forge_async.run.checkpoints import Checkpoints, mark_exported, version_of
from forge_async.trainer.config import ParallelismConfig


def checkpoint_of(folder: RunFolder, version: int | None) -> Path:
    """The folder of the checkpoint of ``version``; None: of the newest.

    Raises:
        ConfigError: there is none; the message names those that are there.
    """
    found = {version_of(path): path for path in Checkpoints(folder).complete()}
    wanted = max(found, default=None) if version is None else version
    if wanted not in found:
        have = ", ".join(map(str, found)) or "none: the run saved no checkpoint"
        raise ConfigError("--version", version, f"one of the run's checkpoints ({have})")
    return found[wanted]


def export(folder: RunFolder, config: Config, version: int | None, target: Path) -> Path:
    """Write the checkpoint's weights to ``target``; returns the checkpoint. On the CPU, in this process alone.

    Raises:
        ForgeError: there is no such checkpoint, or something else lies at ``target``.
    """
    from forge_async.model_zoo import check_export_folder
    from forge_async.trainer.engine import TrainerEngine

    checkpoint = checkpoint_of(folder, version)
    check_export_folder(target)
    # Any number of ranks reads what any other wrote; a reference model is not needed.
    loss = replace(config.trainer.loss, kl=replace(config.trainer.loss.kl, coefficient=0.0))
    alone = replace(config.trainer, procs=1, parallelism=ParallelismConfig(), device="cpu", dtype="float32", loss=loss)
    engine = TrainerEngine(alone, config.model.path, config.steps, config.seed)
    with warnings.catch_warnings():  # torch warns of how torchtitan sets a loaded schedule's rate
        warnings.filterwarnings("ignore", message="To get the last learning rate", category=UserWarning)
        engine.load_checkpoint(checkpoint)
    engine.export_hf(target)
    mark_exported(target, version_of(checkpoint))
    return checkpoint
