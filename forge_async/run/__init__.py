"""A run: meshes up, weights in sync, log-probs verified, then the loop; and whatever happens, everything down again.

::

    async with forge_async.launch(config) as run:        # a script
        async for step in run.steps():
            run.log(step)

    run = forge_async.launch(config)                      # a notebook, or anything that pokes
    await run.start(); await run.step(3); run.status(); await run.resume(); await run.pause(); await run.stop()

``engines.py`` brings processes up, ``pace.py`` takes steps or rests, ``recording.py`` writes down what came of each,
``checkpoints.py`` finds what was saved; ``parts.py`` puts these together. ``controls.py`` and ``status.py`` are what a
person handles and sees, ``handle.py`` is the run as its user knows it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from forge_async.tqdm_compat import quiet_tqdm

if TYPE_CHECKING:
    from forge_async.run.handle import Run, launch
    from forge_async.run.status import Status

_ROOMS = {"Run": "handle", "Status": "status", "launch": "handle"}

__all__ = ["Run", "Status", "launch"]


def __getattr__(name: str) -> Any:
    """Import on first use: to look for a checkpoint must not wait for Monarch and torch."""
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    quiet_tqdm()
    return getattr(importlib.import_module(f"{__name__}.{_ROOMS[name]}"), name)
