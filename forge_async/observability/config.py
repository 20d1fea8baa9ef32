"""What a run shows and records."""

from __future__ import annotations

from dataclasses import dataclass

from forge_async.errors import require


@dataclass(frozen=True)
class MetricsConfig:
    """Where a run's progress goes, beside the event log, which is always written."""

    console: bool = True
    """Live view on a terminal, one plain line per step elsewhere; off prints nothing until the summary."""
    tensorboard: bool = True
    """Write ``tensorboard/`` in the run folder."""
    wandb: str = ""
    """Log to Weights & Biases: ``online``, ``offline`` (files for ``wandb sync``), or "" for not at all."""
    wandb_project: str = "forge_async"
    jsonl: bool = True
    """Write ``metrics.jsonl``; the reward plot is drawn from it."""
    episodes_per_step: int = 4
    """Sampled episodes per step in ``episodes.jsonl``; 0 records none."""
    status_every_s: float = 2.0
    """Seconds between two looks at all actors, for ``status.json`` and ``spans.jsonl``; 0 never looks."""
    plot: bool = True
    """Draw ``reward.png`` at the end."""
    record_schedule: bool = True
    """Write ``schedule/``: what ``forge-async replay`` needs to repeat the run."""

    def __post_init__(self) -> None:
        require(self.episodes_per_step >= 0, "episodes_per_step", self.episodes_per_step, "0 (none) or more")
        require(self.wandb in ("", "online", "offline"), "wandb", self.wandb, "online, offline or empty")
        require(self.status_every_s >= 0, "status_every_s", self.status_every_s, "0 (never) or more seconds")
        require(
            self.jsonl or not self.plot,
            "jsonl",
            self.jsonl,
            "true while plot is true",
            "Set metrics.plot=false as well.",
        )
