"""Writes docs/configuration-reference.md: every setting with its default and what it does, out of the dataclasses.

``python tools/config_reference.py [--check]``; with ``--check`` nothing is written and the exit code says whether the
page is up to date.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path

from forge_async.config import Config, SFTConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration-reference.md"
HEAD = """# All settings

Written by `make reference` from the config dataclasses. [Configuration](configuration.md) says how to set them.
`null` is YAML's word for "not given".
"""


def field_docstrings(schema: type) -> dict[str, str]:
    """The string below each field of a dataclass."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(schema))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[node.target.id] = " ".join(str(after.value.value).split())
    return found


def settings(schema: type, prefix: str = "") -> Iterator[tuple[str, type, list[tuple[str, str, str]]]]:
    """(prefix, dataclass, rows of key, default and meaning) for a config dataclass and each one inside."""
    hints, texts = typing.get_type_hints(schema), field_docstrings(schema)
    rows, inner = [], []
    for item in dataclasses.fields(schema):
        kind, name = hints[item.name], f"{prefix}{item.name}"
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            inner.append((kind, f"{name}."))
            continue
        default = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
        rows.append((name, as_yaml(default), texts.get(item.name, "")))
    yield prefix.rstrip("."), schema, rows
    for kind, deeper in inner:
        yield from settings(kind, deeper)


def as_yaml(value: object) -> str:
    if value is dataclasses.MISSING:
        return "required"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, list):
        return f"[{', '.join(as_yaml(inner) for inner in value)}]"
    return str(value)


def page() -> str:
    parts = [HEAD]
    own = {field.name for field in dataclasses.fields(Config)}
    for title, schema in (("A run", Config), ("A supervised warm-up", SFTConfig)):
        parts.append(f"## {title}\n")
        if schema is SFTConfig:
            shared = ", ".join(
                f"`{f.name}`" for f in dataclasses.fields(SFTConfig) if f.name in own and is_section(SFTConfig, f.name)
            )
            parts.append(f"For `forge-async sft` and `apps/sft_main.py`. {shared} are as above.\n")
        for prefix, kind, rows in settings(schema):
            if schema is SFTConfig and prefix:
                continue
            if prefix:
                parts.append(f"### {prefix}\n")
                parts.append(f"{(inspect.getdoc(kind) or '').splitlines()[0]}\n")
            if rows:
                parts.append("| setting | default | |\n|---|---|---|")
                parts.extend(f"| `{key}` | `{default}` | {cell(text)} |" for key, default, text in rows)
                parts.append("")
    return "\n".join(parts)


def is_section(schema: type, name: str) -> bool:
    return dataclasses.is_dataclass(typing.get_type_hints(schema)[name])


def cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        current = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        return int(current != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
