"""The folder of one run: what lies where, and how a new one gets its name."""

from __future__ import annotations

import os
from pathlib import Path

from forge_async.errors import ConfigError

META_FILE = "forge.json"
"""In a checkpoint's folder: written last, so that it marks a whole one."""


class RunPaths:
    """What lies where in the folder of a run; nothing need be there."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def episodes(self) -> Path:
        return self.path / "episodes.jsonl"

    @property
    def spans(self) -> Path:
        return self.path / "spans.jsonl"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def commands(self) -> Path:
        return self.path / "control.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def plot(self) -> Path:
        return self.path / "reward.png"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def schedule(self) -> Path:
        return self.path / "schedule"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"


class RunFolder(RunPaths):
    """A run's own folder, ``runs/<name>/``. The folder and ``checkpoints/`` exist; files appear as they are written."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(
                "output_dir", str(self.path), f"a folder that can be written ({error.strerror})"
            ) from error

    @classmethod
    def create(cls, output_dir: str | Path, name: str) -> RunFolder:
        """A new folder ``output_dir/name``, or ``name-2``, ``name-3``, ... when that is taken: runs never share one."""
        parent = Path(output_dir)
        try:
            parent.mkdir(parents=True, exist_ok=True)
            number = 1
            while True:
                path = parent / (name if number == 1 else f"{name}-{number}")
                try:
                    path.mkdir()
                    return cls(path)
                except FileExistsError:
                    number += 1
        except OSError as error:
            raise ConfigError(
                "output_dir", str(output_dir), f"a folder that can be written ({error.strerror})"
            ) from error

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """The folder of an earlier run, to resume it.

        Raises:
            ConfigError: there is no run in it.
        """
        if not (Path(path) / "config.yaml").is_file():
            raise ConfigError("resume", str(path), "a run folder (one that holds config.yaml)")
        return cls(path)

    def write_config(self, text: str) -> None:
        """Save the resolved config."""
        write_whole(self.config, text)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that readers see the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
