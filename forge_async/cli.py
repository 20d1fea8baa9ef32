"""Command lines: what every app shares (config, overrides, errors, exit codes), and ``forge-async run | replay``."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

from forge_async.config import Config, load_config, to_yaml
from forge_async.dashboard import serve
from forge_async.errors import ForgeError
from forge_async.observability import trace

T = TypeVar("T")

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells expect it."""
DIFFERS = 3
"""Exit code of a replay that came out differently."""


def run_app(
    main: Callable[[T], Awaitable[None]],
    schema: type[T],
    default_config: str,
    description: str | None,
    arguments: list[str] | None = None,
) -> int:
    """Parse ``--config FILE [--print-config] key=value ...``, then run ``main(config)``; returns the exit code.

    0: done; 1: an error the user can act on, printed as one line; 130: interrupted. Other exceptions pass through.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=default_config, help=f"YAML file of the run (default: {default_config})")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file's")
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        setting = unknown[0].lstrip("-").partition("=")[0]
        parser.error(f"unknown option {unknown[0]}; settings are given without dashes: {setting}=VALUE")
    try:
        config = load_config(options.config, options.overrides, schema)
        if options.print_config:
            print(to_yaml(config), end="")
            return 0
        asyncio.run(main(config))  # type: ignore[arg-type]
    except ForgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


async def train(config: Config) -> None:
    """What ``forge-async run`` and ``apps/grpo_main.py`` do."""
    from forge_async.run import launch

    async with launch(config) as run:
        await run.train()


async def doctor(config: Config) -> None:
    """What ``forge-async doctor`` does."""
    from forge_async.doctor import diagnose

    if not await diagnose(config):
        raise ForgeError("the config is not sound, see the lines marked FAILED")


COMMANDS = {"run": train, "doctor": doctor}


def replay_run(arguments: list[str]) -> int:
    """Repeat a recorded run and compare every token, version and loss; stops at the first difference.

    Exit codes: 0: all as recorded; 1: it cannot be replayed; 3: it came out differently; 130: interrupted.
    """
    from forge_async.policy.turns import Diverged
    from forge_async.replay import replay

    parser = argparse.ArgumentParser(
        "forge-async replay", description=replay_run.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("--steps", type=int, help="repeat only the first so many steps")
    parser.add_argument("--stall-s", type=float, default=60.0, help="give up when nothing moved for so many seconds")
    options = parser.parse_args(arguments)
    try:
        asyncio.run(replay(options.run, options.steps, options.stall_s))
    except Diverged as error:
        print(f"differs: {error}", file=sys.stderr)
        return DIFFERS
    except ForgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def main(arguments: list[str] | None = None) -> int:
    """``forge-async run|doctor CONFIG [key=value ...]``: train, or check everything that training relies on.

    ``forge-async replay RUN``: repeat a recorded run. ``forge-async dashboard RUN``: serve its page.
    ``forge-async trace RUN``: what every actor was doing, for Perfetto.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) >= 2 and arguments[0] in COMMANDS and not arguments[1].startswith("-"):
        return run_app(COMMANDS[arguments[0]], Config, arguments[1], main.__doc__, ["--config", *arguments[1:]])
    if arguments[:1] == ["replay"]:
        return replay_run(arguments[1:])
    if arguments[:1] == ["dashboard"]:
        return serve.main(arguments[1:])
    if arguments[:1] == ["trace"]:
        return trace.main(arguments[1:])
    print("usage: forge-async run|doctor CONFIG [--print-config] [key=value ...]", file=sys.stderr)
    print("       forge-async replay RUN [--steps N] [--stall-s SECONDS]", file=sys.stderr)
    print("       forge-async dashboard RUN [--port N] [--host ADDRESS] [--token T] [--control]", file=sys.stderr)
    print("       forge-async trace RUN [-o FILE]", file=sys.stderr)
    return 0 if arguments in (["-h"], ["--help"]) else 2


if __name__ == "__main__":
    sys.exit(main())
