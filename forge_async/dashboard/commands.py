"""What other processes ask of a run: lines of ``control.jsonl`` in its folder, which it reads while it goes on.

Whoever may write to the folder may control the run; the file is only made by the first command.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any, ClassVar

from forge_async.errors import ConfigError


class Commands:
    """The reading side: what was asked since the run opened the file, each once."""

    NAMES: ClassVar[tuple[str, ...]] = ("pause", "resume", "stop")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        """New commands in their order; a line that is not whole yet waits, one that is no command is skipped."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return []
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = []
        for line in whole.splitlines():
            try:
                command = json.loads(line)
            except ValueError:
                continue
            if isinstance(command, dict):
                found.append(command)
        return found


def send_command(path: Path, name: str) -> str:
    """Ask the run whose ``control.jsonl`` is at ``path`` for ``name``; its outcome is an event of the returned id."""
    if name not in Commands.NAMES:
        raise ConfigError("command", name, f"one of {', '.join(Commands.NAMES)}")
    identity = uuid.uuid4().hex[:12]
    line = json.dumps({"id": identity, "command": name, "at": round(time.time(), 3)}) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
    return identity
