"""Lists and records that show themselves: as a table on a terminal, as HTML in a notebook, as text anywhere else."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

T = TypeVar("T")

WIDTH = 120
"""Of tables as text, characters."""


class Shown:
    """Base of what shows itself; a subclass says how by :meth:`title`, :meth:`columns` and :meth:`rows`."""

    def title(self) -> str:
        raise NotImplementedError

    def columns(self) -> Sequence[str]:
        """Heads of the columns; empty for a table of names and values."""
        return ()

    def rows(self) -> Iterable[Sequence[Any]]:
        raise NotImplementedError

    def __rich__(self) -> RenderableType:
        columns = self.columns()
        table = Table(title=self.title(), title_justify="left", box=None, pad_edge=False, show_header=bool(columns))
        for number, name in enumerate(columns or ("", "")):
            table.add_column(name, overflow="fold", style="bold" if not columns and number == 0 else "")
        for row in self.rows():
            table.add_row(*(Text(text(cell)) for cell in row))
        return table

    def __repr__(self) -> str:
        buffer = io.StringIO()
        Console(file=buffer, width=WIDTH, force_jupyter=False, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())

    def _repr_html_(self) -> str:
        def line(row: Iterable[Any], tag: str) -> str:
            style = "text-align:left;vertical-align:top;white-space:pre-wrap"
            return "<tr>" + "".join(f'<{tag} style="{style}">{html.escape(text(c))}</{tag}>' for c in row) + "</tr>"

        head = line(self.columns(), "th") if self.columns() else ""
        body = "".join(line(row, "td") for row in self.rows())
        return f"<table><caption>{html.escape(self.title())}</caption>{head}{body}</table>"


class Listing(Shown, list[T], Generic[T]):
    """A list that shows itself as a table; its elements say how by ``cells()``, in the order of ``COLUMNS``."""

    def __init__(self, items: Iterable[T], title: str, columns: Sequence[str]) -> None:
        super().__init__(items)
        self._title, self._columns = title, columns

    def title(self) -> str:
        return f"{self._title} ({len(self)})"

    def columns(self) -> Sequence[str]:
        return self._columns

    def rows(self) -> Iterable[Sequence[Any]]:
        return [item.cells() for item in self]  # type: ignore[attr-defined]


def text(value: Any) -> str:
    """A cell: floats by four significant digits, None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return " ".join(text(each) for each in value)
    return str(value)
