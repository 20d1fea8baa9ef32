"""Train a language model by asynchronous GRPO.

    python apps/grpo_main.py --config configs/grpo_tiny.yaml trainer.optimizer.lr=1e-4 ...

Copy this file to start your own: the config names the model, the task and its rewards; ``launch`` brings the meshes up,
with weights in sync and the log-prob check passed; the loop below is where your own code goes.
"""

from __future__ import annotations

import sys

import forge_async
from forge_async.cli import run_app
from forge_async.config import Config


async def main(config: Config) -> None:
    async with forge_async.launch(config) as run:  # meshes up, weights in sync, ratio check passed
        async for step in run.steps():  # each has been trained and published; generation goes on meanwhile
            run.log(step)


if __name__ == "__main__":
    sys.exit(run_app(main, Config, "configs/grpo_tiny.yaml", __doc__))
