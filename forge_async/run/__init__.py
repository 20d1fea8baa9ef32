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

from forge_async.run.handle import Run, launch
from forge_async.run.status import Status

__all__ = ["Run", "Status", "launch"]
