"""How a run is, at a glance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_async.observability.tables import Shown


@dataclass(frozen=True)
class ReplicaStatus:
    """One generator, as it last told, and as its service sees it now."""

    state: str
    """starting, healthy, dead or stopped."""
    version: int | None
    running: int | None
    """Requests that the engine decodes."""
    told_s: float = 0.0
    """Seconds since it told version and requests; all else of a status is as of now."""
    respawns: int = 0

    def __str__(self) -> str:
        told = "" if self.version is None else f", version {self.version}"
        if told and self.state == "healthy":
            when = "now" if self.told_s < 1 else f"{self.told_s:.0f} s ago"
            told += f", {self.running} requests running ({when})"
        return f"{self.state}{told}{f', {self.respawns} respawns' if self.respawns else ''}"


@dataclass(frozen=True, repr=False)
class Status(Shown):
    """Of a run. Prints itself; in a notebook it is a table."""

    name: str
    state: str
    """``new``, ``starting``, ``paused``, ``running``, ``pausing``, ``held`` (by its page), ``ended`` (all steps are
    trained), ``failed`` or ``stopped``."""
    folder: Path | None = None
    version: int = 0
    """Policy version: optimizer steps done."""
    steps: int = 0
    """The last version that the config asks for."""
    reward: float | None = None
    """Mean of the last step's batch."""
    staleness: int | None = None
    """Largest of the last step's tokens, versions."""
    learning_rate: float = 0.0
    """``trainer.optimizer.lr`` as it is set now; warm-up and decay apply to it."""
    temperature: float = 1.0
    update_mode: str = ""
    ready: int = 0
    """Groups that wait for the trainer."""
    in_flight: int = 0
    """Prompts that are generated or scored."""
    admitted: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    replicas: tuple[ReplicaStatus, ...] = ()
    failure: str | None = None
    """What ended the run."""

    def title(self) -> str:
        return f"run {self.name}: {self.state}"

    def rows(self) -> Iterable[Sequence[Any]]:
        dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items())) or "none"
        yield "version", f"{self.version} of {self.steps}"
        if self.reward is not None:
            yield "last step", f"reward {self.reward:.3f}, staleness at most {self.staleness}"
        yield (
            "settings",
            f"learning rate {self.learning_rate:g}, temperature {self.temperature:g}, update mode {self.update_mode}",
        )
        yield "buffer", f"{self.ready} groups ready, {self.in_flight} prompts in flight"
        yield "prompts", f"{self.admitted} admitted, {self.trained} trained, dropped: {dropped}"
        for index, replica in enumerate(self.replicas):
            yield f"replica {index}", str(replica)
        yield "folder", self.folder
        if self.failure is not None:
            yield "failure", self.failure
