"""A run's metrics as a pandas DataFrame."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from forge_async.observability.jsonl import read

if TYPE_CHECKING:
    import pandas


def metrics_frame(metrics: Path) -> pandas.DataFrame:
    """One row per step of ``metrics.jsonl``, indexed by ``step``; a column per metric, in the order they came up.

    Of a step that was logged twice (before and after a resume) the last record counts. Lists stay lists.
    """
    import pandas  # slow to import, and few runs need it

    rows = {record["step"]: record for record in read(metrics)}
    frame = pandas.DataFrame([rows[step] for step in sorted(rows)])
    return frame.set_index("step") if len(frame) else pandas.DataFrame(index=pandas.Index([], name="step"))


class RunMetrics:
    """What a run has logged: :meth:`frame` is a pandas DataFrame of it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"<metrics of {self.path}: frame() is a DataFrame of them>"

    def frame(self) -> pandas.DataFrame:
        """See :func:`metrics_frame`."""
        return metrics_frame(self.path)
