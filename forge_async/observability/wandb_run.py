"""Figures for Weights & Biases, from a thread of its own: neither its start nor its network holds a run up."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forge_async.observability.run_folder import write_whole

ID_FILE = "wandb_id"
"""Holds the id under which W&B knows the run; a resumed run goes on with it."""
CLOSE_S = 30.0
"""Seconds that the end waits for W&B."""


class WandbRun:
    """One W&B run per run folder. Only the controller has one, so ranks do not matter.

    Args:
        mode: ``online``, or ``offline``: files in ``<folder>/wandb``, for ``wandb sync``.
        warn: told once, when W&B fails; what is written after that is dropped.
    """

    def __init__(self, folder: Path, project: str, mode: str, warn: Callable[[str], None]) -> None:
        self._folder, self._project, self._mode, self._warn = folder, project, mode, warn
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="wandb", daemon=True)
        self._thread.start()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Hand over the figures of a step; returns at once."""
        if self._thread.is_alive():
            self._queue.put({"step": step, **scalars})

    def close(self) -> None:
        """Wait until all is with W&B, for at most :data:`CLOSE_S`."""
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._warn(f"W&B did not take the last figures within {CLOSE_S:g} s")

    def _main(self) -> None:
        """Consumes the queue; ends by None in it, or by the first error."""
        try:
            import wandb  # slow to import
            from wandb.sdk.lib.runid import generate_id

            settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True)
            own = sys.exit, sys.excepthook
            run = wandb.init(
                project=self._project,
                name=self._folder.name,
                id=self._identity(generate_id),
                resume="allow",
                dir=str(self._folder),
                mode=self._mode,  # type: ignore[arg-type]
                config=self._config(),
                settings=settings,
            )
            sys.exit, sys.excepthook = own  # it has put hooks there, to learn of an end that finish() tells it
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            while (values := self._queue.get()) is not None:
                run.log(values)
            run.finish()
            wandb.teardown()  # its process ends with the run, not with this one
        except Exception as error:
            self._warn(f"W&B failed, the run goes on without it (metrics.wandb): {type(error).__name__}: {error}")

    def _identity(self, make: Callable[[], str]) -> str:
        path = self._folder / ID_FILE
        if not path.exists():
            write_whole(path, make())
        return path.read_text(encoding="utf-8").strip()

    def _config(self) -> dict[str, Any]:
        import yaml

        path = self._folder / "config.yaml"
        return (yaml.safe_load(path.read_text(encoding="utf-8")) or {}) if path.exists() else {}
