"""The checkpoints of a run's folder."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from forge_async.errors import ConfigError
from forge_async.observability import RunFolder
from forge_async.observability.run_folder import META_FILE, write_whole

NAME = re.compile(r"version-(\d+)")


def version_of(checkpoint: Path) -> int:
    """Of a checkpoint's folder, from its name."""
    return int(checkpoint.name.rpartition("-")[2])


def mark_exported(model: Path, version: int) -> None:
    """Write down whose weights were exported to the folder ``model``."""
    write_whole(model / META_FILE, json.dumps({"version": version}) + "\n")


def exported_version(model: Path) -> int | None:
    """The version whose weights are in ``model``; None: no run has exported a whole model there."""
    try:
        return int(json.loads((model / META_FILE).read_text(encoding="utf-8"))["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


class Checkpoints:
    """Those of ``folder``, of which the newest ``keep`` are kept."""

    def __init__(self, folder: RunFolder, keep: int = 1) -> None:
        self.folder, self.keep = folder, keep

    def complete(self) -> list[Path]:
        """Oldest first; ``version-*.partial`` is one whose saving was cut off."""
        found = {
            path.parent: NAME.fullmatch(path.parent.name) for path in self.folder.checkpoints.glob(f"*/{META_FILE}")
        }
        versions = {folder: int(match[1]) for folder, match in found.items() if match}
        return sorted(versions, key=lambda folder: versions[folder])

    def newest(self) -> Path | None:
        found = self.complete()
        return found[-1] if found else None

    def place(self, version: int) -> Path:
        """The folder of ``version``, which may not exist."""
        return self.folder.checkpoints / f"version-{version:06d}"

    def read(self) -> dict[str, Any]:
        """What the newest one says beside the trainer's state: ``version``, ``source`` and ``ledger``.

        Raises:
            ConfigError: there is none, or it is damaged.
        """
        newest = self.newest()
        if newest is None:
            raise ConfigError("resume", str(self.folder.path), "a run folder with a complete checkpoint")
        try:
            state = json.loads((newest / META_FILE).read_text(encoding="utf-8"))
            found: dict[str, Any] = state["extra"] | {"version": int(state["version"])}
            if not {"source", "ledger"} <= found.keys():
                raise KeyError("source and ledger")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                "resume",
                str(self.folder.path),
                "a run folder whose newest checkpoint is whole",
                f"{newest / META_FILE} is damaged ({type(error).__name__}: {error}). Remove {newest} to go on from the "
                "one before.",
            ) from error
        return found

    def delete_old(self) -> None:
        for old in self.complete()[: -self.keep]:
            shutil.rmtree(old)
