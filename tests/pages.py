"""What the documentation says, in parts, for the tests that hold it to it."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

PROGRAMS = ("forge-async", "make", "python", "tensorboard", "source", "ssh", "pip", "uv", "git", "docker", "pytest")
"""A line of plain text that begins with one of these is a command; in a block of bash every line is one."""


def name_of(page: Path) -> str:
    """As ``README.md`` or ``api/run.md``: below docs/, or the repository's own."""
    docs = ROOT / "docs"
    return str(page.relative_to(docs if docs in page.parents else ROOT))


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that a reader is to put it into: named by a comment in its first line."""
        named = re.match(r"# ([\w.]+\.(?:py|yaml))\n", self.text)
        return named and named[1]


@dataclass(frozen=True)
class Command:
    page: str
    text: str
    inline: bool
    """In running text or a table, where it may have placeholders."""

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


def blocks() -> Iterator[Block]:
    for page in PAGES:
        for match in re.finditer(r"^( *)```(\S*)\n(.*?)^\1```$", page.read_text(), re.M | re.S):
            text = "".join(line.removeprefix(match[1]) for line in match[3].splitlines(keepends=True))
            yield Block(name_of(page), match[2], text)


BLOCKS = list(blocks())


def commands() -> Iterator[Command]:
    """Every shell command of the documentation, each form once per page."""
    for block in BLOCKS:
        for line in block.text.splitlines():
            shell = block.language == "bash" and line.strip() and not line.startswith("#")
            if shell or (block.language in ("", "text") and is_command(line)):
                yield Command(block.page, line, inline=False)
    for page in PAGES:
        text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.M | re.S)
        for match in re.findall(r"`([^`\n]+)`", text):
            if is_command(match) and " " in match:
                yield Command(name_of(page), match.replace("\\|", "|"), inline=True)


def is_command(line: str) -> bool:
    return line.split(" ")[0] in PROGRAMS


@cache
def functions_of(path: str) -> dict[str, str]:
    """The source of every function of a file of tests, by name, with what decorates it."""
    source = (ROOT / path).read_text()
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name: ast.get_source_segment(source, node) or "" for node in nodes}
