"""The reward curve of a run as a picture, with the staleness of what was trained underneath."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_async.observability.jsonl import read

REWARD, STALE_MEAN, STALE_MAX, BOUND = "#1b7f5c", "#3c6fb4", "#8fb0dc", "#b03a48"


@dataclass(frozen=True)
class Curve:
    """One point per step, in order of the steps."""

    steps: Sequence[int]
    reward: Sequence[float]
    staleness_mean: Sequence[float] = ()
    staleness_max: Sequence[float] = ()


def read_curve(metrics: Path) -> Curve:
    """The curve out of ``metrics.jsonl``, from the keys reward, staleness_mean and staleness_max.

    Of a step that was logged twice (before and after a resume) the last record counts.
    """
    rows = {row["step"]: row for row in read(metrics) if "reward" in row}
    ordered = [rows[step] for step in sorted(rows)]
    return Curve(
        steps=sorted(rows),
        reward=[float(row["reward"]) for row in ordered],
        staleness_mean=[float(row.get("staleness_mean", 0)) for row in ordered],
        staleness_max=[float(row.get("staleness_max", 0)) for row in ordered],
    )


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and its neighbours, ``window`` (odd) in all, fewer at the ends."""
    half = window // 2
    parts = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def plot_rewards(curve: Curve, path: Path, title: str = "Mean reward", staleness_bound: int | None = None) -> None:
    """Draw ``curve`` into the PNG ``path``: each step's mean reward, its smoothed course, and the staleness below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imported late: slow, and not every run draws
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 5.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    upper.plot(
        curve.steps, curve.reward, color=REWARD, alpha=0.3, linewidth=1, marker="o", markersize=2.5, label="each step"
    )
    window = max(3, len(curve.reward) // 10 | 1)
    upper.plot(curve.steps, smooth(curve.reward, window), color=REWARD, linewidth=2.4, label=f"mean of {window} steps")
    upper.set_ylabel("mean reward")
    upper.set_title(title, loc="left", fontweight="bold")
    upper.legend(frameon=False, loc="lower right")
    if curve.staleness_max:
        lower.step(curve.steps, curve.staleness_max, where="mid", color=STALE_MAX, linewidth=1.4, label="largest")
        lower.plot(curve.steps, curve.staleness_mean, color=STALE_MEAN, linewidth=1.6, label="mean")
    if staleness_bound is not None:
        lower.axhline(staleness_bound, color=BOUND, linewidth=1, linestyle="--", label=f"bound {staleness_bound}")
    lower.set_ylim(-0.1, max([1.0, staleness_bound or 0, *curve.staleness_max]) * 1.6)
    lower.set_ylabel("staleness\n(versions)")
    lower.set_xlabel("optimizer step")
    lower.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    if lower.get_legend_handles_labels()[0]:
        lower.legend(frameon=False, loc="upper right", ncols=3, fontsize="small")
    for axis in (upper, lower):
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, format="png")
    temporary.replace(path)


def plot_run(
    metrics: Path, target: Path, title: str = "Mean reward", staleness_bound: int | None = None
) -> Path | None:
    """Draw the curve of ``metrics.jsonl`` into the PNG ``target``; returns it, or None when no step was logged."""
    curve = read_curve(metrics)
    if not curve.steps:
        return None
    plot_rewards(curve, target, title, staleness_bound)
    return target
