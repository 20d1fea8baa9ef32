"""Command lines: ``forge-async``, and what every app shares (config, overrides, errors, exit codes).

Commands import what they need when they run: to be helped with a typo must not wait for torch.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from forge_async.config import Config, SFTConfig, load_config, to_yaml
from forge_async.errors import ForgeError, require
from forge_async.rollout.names import check_names

T = TypeVar("T")

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells expect it."""
DIFFERS = 3
"""Exit code of a replay that came out differently."""


# ---- what the apps share ----


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
    return code_of(lambda: with_config(main, schema, options.config, options.overrides, options.print_config))


def with_config(
    main: Callable[[T], Awaitable[None]], schema: type[T], path: str, overrides: list[str], print_config: bool
) -> None:
    """Load the config, and print it or run ``main`` with it."""
    config = load_config(path, overrides, schema)
    if print_config:
        print(to_yaml(config), end="")
    else:
        if isinstance(config, Config):  # a run's start looks, too, but later: once the engines' packages are imported
            check_names(config.reward, config.rollout.environment)
        asyncio.run(main(config))  # type: ignore[arg-type]


def code_of(work: Callable[[], None]) -> int:
    """Do ``work``; the exit code, after a line about what ended it. What is no error of the user's passes through."""
    try:
        work()
    except ForgeError as error:
        from forge_async.policy.turns import Diverged

        differs = isinstance(error, Diverged)
        print(f"{'differs' if differs else 'error'}: {error}", file=sys.stderr)
        return DIFFERS if differs else 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


async def train(config: Config) -> None:
    """What ``forge-async run`` and ``apps/grpo_main.py`` do."""
    from forge_async.run import launch

    async with launch(config) as run:
        await run.train()


# ---- forge-async ----


class Commands(TyperGroup):
    """Turns errors of every command into one line and an exit code; ``--debug`` may stand anywhere."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        debug = "--debug" in args
        return super().parse_args(ctx, ["--debug"] * debug + [word for word in args if word != "--debug"])

    def invoke(self, ctx: Any) -> Any:
        if ctx.params.get("debug"):
            return super().invoke(ctx)

        def work() -> None:
            try:
                super(Commands, self).invoke(ctx)
            except Exception as error:
                if isinstance(error, ForgeError) or type(error).__module__.startswith("typer"):
                    raise  # usage errors and exits are typer's own
                raise ForgeError(
                    f"{type(error).__name__}: {error}. With --debug this shows where it happened."
                ) from None

        code = code_of(work)
        if code:
            raise typer.Exit(code)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Asynchronous reinforcement learning for language models that never stops generating.

A CONFIG is a YAML file; settings on top of it are given as key=value. A RUN is a run's folder, such as runs/grpo_tiny.

[dim]Exit codes: 0 done, 1 an error that you can act on, 2 wrong usage, 3 a replay that differs, 130 interrupted.[/]""",
)

ConfigFile = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file, such as configs/grpo_tiny.yaml.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="key=value", help="Settings that override the file's.")]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the resolved config and stop.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder, such as runs/grpo_tiny.")]


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
) -> None:
    pass


@app.command()
def run(config: ConfigFile, overrides: Overrides = None, print_config: PrintConfig = False) -> None:
    """Train.

    [bold]Examples[/]

      forge-async run configs/grpo_tiny.yaml

      forge-async run configs/grpo_tiny.yaml trainer.optimizer.lr=1e-4 steps=20 name=slower

      forge-async run configs/grpo_tiny.yaml resume=runs/grpo_tiny
    """
    with_config(train, Config, config, overrides or [], print_config)


@app.command()
def doctor(config: ConfigFile, overrides: Overrides = None, print_config: PrintConfig = False) -> None:
    """Check everything that training relies on, before a night is spent on it.

    [bold]Example[/]

      forge-async doctor configs/grpo_smollm2.yaml
    """

    async def diagnosed(loaded: Config) -> None:
        from forge_async.doctor import diagnose

        if not await diagnose(loaded):
            raise ForgeError("the config is not sound, see the lines marked FAILED")

    with_config(diagnosed, Config, config, overrides or [], print_config)


@app.command()
def sft(config: ConfigFile, overrides: Overrides = None, print_config: PrintConfig = False) -> None:
    """Warm a model up on a dataset's own answers, until it is right often enough to learn from.

    [bold]Example[/]

      forge-async sft configs/sft_tiny.yaml target_accuracy=0.25 export_path=models/mine
    """

    async def warm(loaded: SFTConfig) -> None:
        from forge_async.commands.warm_up import warm_up

        await warm_up(loaded)

    with_config(warm, SFTConfig, config, overrides or [], print_config)


@app.command()
def replay(
    run: RunPath,
    steps: Annotated[int | None, typer.Option(help="Repeat only the first so many steps.")] = None,
    stall_s: Annotated[float, typer.Option(help="Give up when nothing moved for so many seconds.")] = 60.0,
) -> None:
    """Repeat a recorded run and compare every token, version and loss; stops at the first difference.

    Exit code 0: all as recorded; 1: it cannot be replayed; 3: it came out differently.

    [bold]Example[/]

      forge-async replay runs/grpo_tiny --steps 10
    """
    require(steps is None or steps >= 1, "--steps", steps, "1 or more", "Without it every step is repeated.")
    require(stall_s > 0, "--stall-s", stall_s, "more than 0 seconds")
    from forge_async.commands.folders import run_folder
    from forge_async.replay import replay as repeat

    asyncio.run(repeat(run_folder(run).path, steps, stall_s))


@app.command()
def generate(
    source: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="A run's folder, or a Hugging Face folder.")],
    prompt: Annotated[str, typer.Argument(help="Becomes a user message, rendered as the run's own prompts are.")],
    overrides: Overrides = None,
    n: Annotated[int, typer.Option("-n", min=1, help="How many completions.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Repeats the draws; without one they are others each time.")] = None,
) -> None:
    """Answer a prompt, with the newest weights of a run (exported, or in a checkpoint) or any other model.

    [bold]Examples[/]

      forge-async generate runs/grpo_tiny 101101 -n 4

      forge-async generate models/smollm2 "What is 3 + 4?" policy.sampling.temperature=0 policy.sampling.max_tokens=32
    """
    from forge_async.commands.generate import answer

    show(asyncio.run(answer(source, prompt, n, seed, overrides)))


@app.command()
def episodes(
    run: RunPath,
    last: Annotated[int, typer.Option(min=1, help="How many.")] = 10,
    step: Annotated[int | None, typer.Option(help="Those of one step only.")] = None,
) -> None:
    """Show the episodes that a run has sampled into episodes.jsonl; it may still be going on.

    [bold]Example[/]

      forge-async episodes runs/grpo_tiny --last 20
    """
    from forge_async.commands.folders import run_folder
    from forge_async.observability.seen import of_file

    found = of_file(run_folder(run).episodes, last, step)
    if not found:
        raise ForgeError(f"{run} has no episode{'' if step is None else f' of step {step}'} in episodes.jsonl")
    show(found)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Folders of runs, also ones that go on.")],
    picture: Annotated[Path | None, typer.Option(help="Draw the curves into this file as well (.png, .svg).")] = None,
) -> None:
    """Show the curves of several runs, and their final figures side by side.

    [bold]Example[/]

      forge-async compare runs/grpo_tiny runs/grpo_tiny-2 --picture curves.png
    """
    from forge_async.commands.compare import comparison, draw
    from forge_async.commands.folders import run_folder

    folders = [run_folder(path) for path in dict.fromkeys(runs)]
    show(comparison(folders))
    if picture is not None:
        draw(folders, picture)
        print(picture)


@app.command()
def export(
    run: RunPath,
    version: Annotated[int | None, typer.Option(help="The checkpoint's version; without it the newest.")] = None,
    to: Annotated[Path | None, typer.Option(help="Folder to write; without it RUN/model-VERSION.")] = None,
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder (safetensors), which transformers and vLLM load.

    [bold]Example[/]

      forge-async export runs/grpo_tiny --version 80 --to models/counts_bits
    """
    from forge_async.commands.export import checkpoint_of
    from forge_async.commands.export import export as write
    from forge_async.commands.folders import config_of, run_folder
    from forge_async.run.checkpoints import version_of

    folder = run_folder(run)
    target = to or folder.path / f"model-{version_of(checkpoint_of(folder, version))}"
    write(folder, config_of(folder), version, target)
    print(target)


@app.command()
def dashboard(
    run: RunPath,
    port: Annotated[int | None, typer.Option(help="Without one 8790, or the next free one; 0 takes any.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but a loopback one needs a token.")
    ] = "127.0.0.1",
    token: Annotated[str | None, typer.Option(help="What a browser has to bring; made up where one is needed.")] = None,
    control: Annotated[bool, typer.Option("--control", help="The page may pause, resume and stop the run.")] = False,
) -> None:
    """Serve a page about a run, while it goes on or later: figures, curves, a timeline, and episodes token by token.

    [bold]Examples[/]

      forge-async dashboard runs/grpo_tiny

      forge-async dashboard runs/grpo_tiny --control --port 8000
    """
    from forge_async.commands.folders import run_folder
    from forge_async.dashboard.serve import open_dashboard

    open_dashboard(run_folder(run).path, port, host, token, control)


@app.command()
def trace(
    run: RunPath,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Without one RUN/trace.json.")] = None,
) -> None:
    """Write what every actor of a run was doing, as a trace for ui.perfetto.dev or chrome://tracing.

    [bold]Example[/]

      forge-async trace runs/grpo_tiny
    """
    from forge_async.commands.folders import run_folder
    from forge_async.observability.trace import write_trace

    print(write_trace(run_folder(run).path, output))


def show(content: Any) -> None:
    """Print what shows itself, on a terminal in its width, elsewhere wide enough for its lines."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(content)


def main(arguments: list[str] | None = None) -> int:
    """``forge-async``: see ``forge-async --help``; returns the exit code."""
    try:
        app(arguments, prog_name="forge-async", standalone_mode=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0


if __name__ == "__main__":
    sys.exit(main())
