"""The folder of one run: what lies where, and how a new one gets its name."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path
from typing import IO

from forge_async.errors import ConfigError

logger = logging.getLogger(__name__)

META_FILE = "forge.json"
"""In the folder of a checkpoint or an exported model: written last, so that it marks a whole one; holds ``version``."""


class RunPaths:
    """What lies where in the folder of a run; nothing need be there."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

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
    def model(self) -> Path:
        return self.path / "model"

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
    def lock(self) -> Path:
        return self.path / ".lock"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"


class RunFolder(RunPaths):
    """A run's own folder, ``runs/<name>/``. The folder and ``checkpoints/`` exist; files appear as they are written."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._claim: IO[str] | None = None
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
                    return cls(path).claim()
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
            ConfigError: there is no run in it, or one that still goes on.
        """
        if not (Path(path) / "config.yaml").is_file():
            raise ConfigError("resume", str(path), "a run folder (one that holds config.yaml)")
        return cls(path).claim()

    def claim(self) -> RunFolder:
        """Keep others from writing here until :meth:`release`, or until this process ends, however it does.

        Raises:
            ConfigError: another run writes here.
        """
        self._claim = self.lock.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._claim.seek(0)
            owner = self._claim.read().strip()
            self.release()
            allowed = f"a run folder that no running process writes to (process {owner} does)"
            raise ConfigError("resume", str(self.path), allowed, "Stop that run first, or wait for its end.") from None
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): nothing keeps two runs from writing there", self.path, error.strerror
            )
        self._claim.truncate(0)
        self._claim.write(str(os.getpid()))
        self._claim.flush()
        return self

    def release(self) -> None:
        """Let another run go on here."""
        if self._claim is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._claim, fcntl.LOCK_UN)  # also for a process that was forked off and has it open still
            self._claim.close()
            self._claim = None

    def forget_end(self) -> None:
        """Remove what an earlier leg said of itself when it ended: the run goes on."""
        self.summary.unlink(missing_ok=True)
        self.status.unlink(missing_ok=True)

    def write_config(self, text: str) -> None:
        """Save the resolved config."""
        write_whole(self.config, text)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that readers see the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
