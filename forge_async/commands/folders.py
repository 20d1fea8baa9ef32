"""Run folders, as commands are given them."""

from __future__ import annotations

from pathlib import Path

from forge_async.config import Config, load_config
from forge_async.errors import ConfigError
from forge_async.observability import RunFolder


def run_folder(path: str | Path) -> RunFolder:
    """The folder of a run, finished or not.

    Raises:
        ConfigError: it is none; the message names those beside it.
    """
    path = Path(path)
    if not (path / "config.yaml").is_file():
        near = sorted(
            str(found.parent) for found in [*path.parent.glob("*/config.yaml"), *Path("runs").glob("*/config.yaml")]
        )
        here = ", ".join(dict.fromkeys(near)) or "none"
        raise ConfigError("RUN", str(path), "a run's folder (one that holds config.yaml)", f"Here are: {here}.")
    return RunFolder(path)


def config_of(folder: RunFolder, overrides: list[str] | None = None) -> Config:
    """The config that the run was started with, and ``overrides`` on top."""
    return load_config(folder.config, overrides)
