"""The checkpoints of a run's folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from forge_async.errors import ConfigError
from forge_async.observability import RunFolder
from forge_async.trainer.checkpoint import META_FILE


def version_of(checkpoint: Path) -> int:
    """Of a checkpoint's folder, from its name."""
    return int(checkpoint.name.rpartition("-")[2])


class Checkpoints:
    """Those of ``folder``, of which the newest ``keep`` are kept."""

    def __init__(self, folder: RunFolder, keep: int = 1) -> None:
        self.folder, self.keep = folder, keep

    def complete(self) -> list[Path]:
        """Oldest first; ``version-*.partial`` is one whose saving was cut off."""
        return sorted(path.parent for path in self.folder.checkpoints.glob(f"version-*[0-9]/{META_FILE}"))

    def newest(self) -> Path | None:
        found = self.complete()
        return found[-1] if found else None

    def place(self, version: int) -> Path:
        """The folder of ``version``, which may not exist."""
        return self.folder.checkpoints / f"version-{version:06d}"

    def read(self) -> dict[str, Any]:
        """What the newest one says beside the trainer's state: ``version``, ``source`` and ``ledger``.

        Raises:
            ConfigError: there is none.
        """
        newest = self.newest()
        if newest is None:
            raise ConfigError("resume", str(self.folder.path), "a run folder with a complete checkpoint")
        state = json.loads((newest / META_FILE).read_text(encoding="utf-8"))
        return state["extra"] | {"version": state["version"]}

    def delete_old(self) -> None:
        for old in self.complete()[: -self.keep]:
            shutil.rmtree(old)
