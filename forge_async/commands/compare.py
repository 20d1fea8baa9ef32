"""``forge-async compare``: the curves of several runs over each other, and their final figures side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forge_async.errors import ConfigError
from forge_async.observability import RunFolder
from forge_async.observability.console import sparkline
from forge_async.observability.frames import metrics_frame
from forge_async.observability.metrics import flatten
from forge_async.observability.plot import smooth

if TYPE_CHECKING:
    import pandas

CURVES = ("reward", "train/loss", "train/ratio_mean", "staleness_mean", "tokens_per_s/generated")
"""Series that are shown where a run has them."""
FIGURES = (
    *("steps", "wall_s", "reward/first5", "reward/last10", "staleness/max_seen", "tokens/trained", "swaps"),
    *("swaps_in_flight", "tokens_per_s/generated", "tokens_per_s/trained", "idle_share/trainer"),
)
"""Of ``summary.json``, which a run has once it has ended."""
LAST = {
    "tokens_per_s/generated": "tokens_per_s/generated",
    "tokens_per_s/trained": "tokens_per_s/trained",
    "idle_share/trainer": "idle/trainer",
}
"""Rates of a run that goes on: those of its last step, under these names in metrics.jsonl."""
UNFINISHED = "*"
WIDTH = 40


def frames_of(folders: Sequence[RunFolder]) -> dict[str, pandas.DataFrame]:
    """Each run's metrics, by the folder's name (its path where two are alike).

    Raises:
        ConfigError: a run has logged nothing.
    """
    names = [folder.path.name for folder in folders]
    frames = {}
    for folder, name in zip(folders, names, strict=True):
        frame = metrics_frame(folder.metrics)
        if not len(frame):
            raise ConfigError("RUN", str(folder.path), "a run that has logged a step in metrics.jsonl")
        frames[name if names.count(name) == 1 else str(folder.path)] = frame
    return frames


def figures_of(folder: RunFolder, frame: pandas.DataFrame) -> dict[str, str]:
    """The summary's figures, flattened; of a run that goes on, those that its steps so far tell, marked by a ``*``."""
    if folder.summary.is_file():
        summary = flatten(json.loads(folder.summary.read_text(encoding="utf-8")))
        return {key: _number(summary.get(key)) for key in FIGURES}
    return {key: f"{_number(value)}{UNFINISHED}" for key, value in figures_so_far(frame).items()}


def figures_so_far(frame: pandas.DataFrame) -> dict[str, Any]:
    """What metrics.jsonl tells of the summary to come: means, maxima and sums over its steps, rates of the last one."""
    figures: dict[str, Any] = {"steps": len(frame)}
    if "reward" in frame:
        rewards = frame["reward"].astype(float)
        figures |= {"reward/first5": rewards.head(5).mean(), "reward/last10": rewards.tail(10).mean()}
    if "staleness_max" in frame and len(oldest := frame["staleness_max"].dropna()):
        figures["staleness/max_seen"] = int(oldest.max())
    if "train/trained_tokens" in frame:
        figures["tokens/trained"] = int(frame["train/trained_tokens"].sum())
    for key, series in LAST.items():
        if series in frame and len(values := frame[series].dropna()):
            figures[key] = float(values.iloc[-1])
    return figures


def comparison(folders: Sequence[RunFolder]) -> RenderableType:
    """Curves as rows of blocks, first and last values beside them; then the final figures."""
    frames = frames_of(folders)
    curves = Table(box=None, pad_edge=False, title="curves", title_justify="left")
    for name in ("", "run", "steps", "first", "", "last"):
        curves.add_column(name, no_wrap=True)
    for series in CURVES:
        label = series
        for run, frame in frames.items():
            if series not in frame:
                continue
            if not (values := frame[series].astype(float).dropna().tolist()):
                continue
            curves.add_row(
                label, run, str(len(values)), _number(values[0]), sparkline(values, WIDTH), _number(values[-1])
            )
            label = ""
    table = Table(box=None, pad_edge=False, title="final figures", title_justify="left")
    table.add_column("")
    for run in frames:
        table.add_column(run, justify="right")
    figures = [figures_of(folder, frame) for folder, frame in zip(folders, frames.values(), strict=True)]
    for key in FIGURES:
        table.add_row(key, *(each.get(key, "-") for each in figures))
    shown: list[RenderableType] = [curves, Text(""), table]
    if any(text.endswith(UNFINISHED) for each in figures for text in each.values()):
        shown.append(Text(f"{UNFINISHED} The run has not ended: as of its last step."))
    return Group(*shown)


def draw(folders: Sequence[RunFolder], path: Path) -> None:
    """The curves of all runs, one panel per series, into the picture ``path`` (its ending says of which format)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    frames = frames_of(folders)
    shown = [series for series in CURVES if any(series in frame for frame in frames.values())]
    figure = Figure(figsize=(8, 2.2 * len(shown)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axis, series in zip(axes, shown, strict=True):
        for index, (run, frame) in enumerate(frames.items()):
            if series in frame:
                values = frame[series].astype(float)
                axis.plot(frame.index, values, color=f"C{index}", alpha=0.3, linewidth=1)
                axis.plot(
                    frame.index, smooth(values.tolist(), max(3, len(values) // 10 | 1)), color=f"C{index}", label=run
                )
        axis.set_title(series, loc="left", fontsize="medium")
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize="small")
    axes[-1].set_xlabel("optimizer step")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "--picture", str(path), "a file that can be written, such as curves.png", str(error)
        ) from error


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int | str) else f"{value:.4g}"
