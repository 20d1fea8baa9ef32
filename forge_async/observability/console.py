"""What a person sees while a run goes on: a live view on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import IO

from rich.console import Console as RichConsole
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SPARKS = "▁▂▃▄▅▆▇█"
RECENT_STEPS = 8
"""Rows of the live table."""


@dataclass(frozen=True)
class StepView:
    """The figures of one step that a person watches."""

    step: int
    reward: float
    """Mean over the step's episodes."""
    staleness_mean: float
    """Versions."""
    staleness_max: int
    generated_tokens_per_s: float
    """All generators together."""
    trained_tokens_per_s: float
    buffer_ready: int
    """Finished groups that wait for the trainer."""
    buffer_in_flight: int
    """Prompts whose episodes are being generated or scored."""
    idle_trainer: float | None
    """Share of the time since the last step; None while it is not known."""
    idle_generators: Sequence[float | None]
    step_s: float
    """Wall time of the step, seconds."""
    note: str = ""
    """Anything else worth a word, such as "skipped"."""


class Console:
    """Shows the run's phase, its steps and its warnings. Use as a context manager; it leaves the terminal as it was.

    What cannot be written (its file is on a full disk, its reader has gone) is not shown.

    Args:
        total_steps: steps of the whole run.
        title: head of the live view, such as the run's name.
        enabled: False shows warnings only.
        file: where to print, standard output by default; the live view needs a terminal.
    """

    def __init__(
        self, total_steps: int, title: str = "forge_async", enabled: bool = True, file: IO[str] | None = None
    ) -> None:
        self._file = file or sys.stdout
        # A notebook's cell says that it is a terminal and is none: lines there, no live view.
        cell = type(self._file).__module__.startswith("ipykernel")
        self._rich = RichConsole(
            file=self._file,
            highlight=False,
            soft_wrap=True,
            force_jupyter=False,
            force_terminal=False if cell else None,
        )
        self._total, self._title, self._enabled = total_steps, title, enabled
        self._recent: deque[StepView] = deque(maxlen=RECENT_STEPS)
        self._rewards: list[float] = []
        self._phase = ""
        self._warned: set[str] = set()
        self._live: Live | None = None

    def __enter__(self) -> Console:
        if self._enabled and self._rich.is_terminal:
            # No refresh thread: the view changes when there is news, and nothing of it can outlive the run.
            self._live = Live(self._view(), console=self._rich, auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the live view; later lines are printed plainly."""
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(OSError):
                live.update(self._view(), refresh=True)
                live.stop()

    def phase(self, text: str) -> None:
        """What the run is doing besides steps: starting engines, saving a checkpoint. "" ends it."""
        if text == self._phase:
            return
        self._phase = text
        if self._live is not None:
            self._refresh(self._live)
        elif self._enabled and text:
            self._plain(text)

    def step(self, view: StepView) -> None:
        """Show a finished step."""
        self._recent.append(view)
        self._rewards.append(view.reward)
        self._phase = ""
        if self._live is not None:
            self._refresh(self._live)
        elif self._enabled:
            self._plain(line(view, self._total))

    def print(self, text: str) -> None:
        """A line that stays, above the live view."""
        if self._enabled:
            self._plain(text)

    def warn(self, text: str) -> None:
        """A warning, shown once per text, also when the console is switched off (then on standard error)."""
        if text in self._warned:
            return
        self._warned.add(text)
        with contextlib.suppress(OSError):
            if self._enabled:
                self._rich.print(Text(f"warning: {text}", style="yellow"))
            else:
                print(f"warning: {text}", file=sys.stderr, flush=True)

    def _plain(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._rich.print(Text(text))
            self._file.flush()

    def _refresh(self, live: Live) -> None:
        with contextlib.suppress(OSError):
            live.update(self._view(), refresh=True)

    def _view(self) -> RenderableType:
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        for name in (
            "step",
            "reward",
            "staleness",
            "gen tok/s",
            "train tok/s",
            "buffer",
            "idle trainer",
            "idle gen",
            "s",
        ):
            table.add_column(name, justify="right")
        for view in self._recent:
            table.add_row(
                str(view.step),
                f"{view.reward:.3f}",
                f"{view.staleness_mean:.1f} / {view.staleness_max}",
                f"{view.generated_tokens_per_s:.0f}",
                f"{view.trained_tokens_per_s:.0f}",
                f"{view.buffer_ready} + {view.buffer_in_flight}",
                percent(view.idle_trainer),
                " ".join(percent(share) for share in view.idle_generators) or "-",
                f"{view.step_s:.1f}",
            )
        done = self._recent[-1].step if self._recent else 0
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            f"{done}/{self._total}",
            ProgressBar(total=self._total, completed=done, width=40),
            Text(self._phase, style="cyan"),
        )
        curve = Text("reward  ", style="dim") + Text(sparkline(self._rewards, 60), style="green")
        return Panel(Stack(bar, curve, table), title=self._title, title_align="left", border_style="dim")


def line(view: StepView, total: int) -> str:
    """One step as one line of plain text."""
    width = len(str(total))
    generators = " ".join(percent(share) for share in view.idle_generators) or "-"
    text = (
        f"step {view.step:>{width}}/{total}  reward {view.reward:.3f}  "
        f"staleness {view.staleness_mean:.1f} max {view.staleness_max}  "
        f"tok/s gen {view.generated_tokens_per_s:.0f} train {view.trained_tokens_per_s:.0f}  "
        f"buffer {view.buffer_ready}+{view.buffer_in_flight}  "
        f"idle trainer {percent(view.idle_trainer)} gen {generators}  {view.step_s:.1f} s"
    )
    return f"{text}  {view.note}" if view.note else text


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as a row of at most ``width`` block characters, each the mean of its part; scaled from min to max."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in means)
