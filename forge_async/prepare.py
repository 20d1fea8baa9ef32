"""Make the model a run starts from, when its folder is missing: by a recipe of the model zoo, or by a warm-up run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from forge_async import model_zoo
from forge_async.config import ModelConfig
from forge_async.errors import ModelNotFoundError


def ensure_model(model: ModelConfig) -> Path:
    """The folder ``model.path``, made first by ``model.prepare`` when it is not there.

    A warm-up runs in a process of its own, with the interpreter of this one.

    Raises:
        ModelNotFoundError: the folder is missing or incomplete and nothing can make it.
    """
    folder = Path(model.path)
    if (folder / "config.json").is_file():
        return folder
    if model.prepare == "sft":
        app = Path(__file__).parent.parent / "apps" / "sft_main.py"
        done = subprocess.run([sys.executable, str(app), "--config", model.warmup_config, f"export_path={folder}"])
        if done.returncode:
            raise ModelNotFoundError(f"model.path = {str(folder)!r}: the warm-up {model.warmup_config} failed")
        return folder
    if model.prepare:
        return model_zoo.prepare(model.prepare, folder)
    raise ModelNotFoundError(
        f"model.path = {str(folder)!r}: no such Hugging Face folder (config.json is missing). Give the path of an "
        f"existing one, or set model.prepare to one of: sft, {', '.join(model_zoo.CATALOGUE)}."
    )
