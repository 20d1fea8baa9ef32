"""Train a language model by asynchronous GRPO: ``python apps/grpo_main.py --config configs/grpo_tiny.yaml key=value ...``.

Copy this file to start your own: the config names the model, the task and its rewards; ``launch`` brings the meshes up
with weights in sync and the log-prob check passed; the loop below is where your own code goes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import forge_async
from forge_async.config import Config, load_config, to_yaml
from forge_async.errors import ForgeError
from forge_async.prepare import ensure_model


async def main(config: Config) -> None:
    async with forge_async.launch(config) as run:
        async for step in run.steps():
            run.log(step)


def cli(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/grpo_tiny.yaml", help="YAML file of the run")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file's")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = load_config(options.config, options.overrides)
        if options.print_config:
            print(to_yaml(config), end="")
            return 0
        ensure_model(config.model)
        asyncio.run(main(config))
    except ForgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("stopped by the user", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(cli())
