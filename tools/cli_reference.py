"""Writes docs/cli-reference.md: every command of ``forge-async`` with its arguments, options and examples.

``python tools/cli_reference.py``
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from forge_async.cli import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli-reference.md"
HEAD = """# Every command

Written by `make reference` from what `--help` prints. [The command line](cli.md) is the overview.
"""

KINDS = {int: "N", float: "X", str: "TEXT", Path: "PATH", bool: ""}
"""What is written for an option's value, by its type."""


def section(name: str, command: Any) -> Iterator[str]:
    """A command: what it does, a table of what it takes, its examples."""
    context = command.make_context(name, [], resilient_parsing=True)
    about, _, examples = command.help.partition("[bold]Example")
    yield f"## {name}\n"
    yield re.sub(r"\[/?[a-z]*\]", "", about).strip() + "\n"
    rows = [row for parameter in command.params if (row := parameter_row(parameter, context)) is not None]
    yield "| | default | |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    lines = [line.strip() for line in examples.splitlines() if line.strip().startswith("forge-async ")]
    yield "```bash\n" + "\n".join(lines) + "\n```\n"


def parameter_row(parameter: Any, context: Any) -> str | None:
    """One argument or option as a row of a table; None for ``--help``."""
    if parameter.name == "help":
        return None
    if parameter.param_type_name == "argument":
        shown, default = parameter.metavar or parameter.name.upper(), "required" if parameter.required else ""
        shown += " ..." if parameter.nargs == -1 and not shown.endswith("...") else ""
    else:
        metavar = KINDS[parameter.type_descriptor.annotation]
        shown = ", ".join(parameter.opts) + ("" if parameter.is_flag else f" {metavar}")
        default = parameter.get_default(context)
        default = "" if default in (None, False) else f"`{default}`"
    cells = (f"`{shown}`", default, parameter.help or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page() -> str:
    group: Any = typer.main.get_command(app)
    parts = [HEAD]
    for name, command in group.commands.items():
        parts.extend(section(name, command))
    parts.append("`--debug`, anywhere on the line, shows where an error comes from.\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
