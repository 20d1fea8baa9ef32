"""Which side of a run waited for the other, and what would balance them: from the rates that the run measured."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

WAITS = 0.1
"""Share of a step from which waiting is worth a word."""
WORTH = 1.05
"""A change is advised that makes steps shorter by this factor or more."""
MEASURED_STEPS = 6
"""Fewer steps give no advice: the first one fills the pipeline, and five say what a step takes."""


@dataclass(frozen=True)
class Resources:
    """What the two sides run on."""

    trainer: int
    generators: int
    unit: str = "cores"
    """``cores`` or ``GPUs``."""
    shared: bool = False
    """Both sides use the same ones."""


@dataclass(frozen=True)
class Measured:
    """Rates of a run."""

    step_s: float
    """Mean wall time from step to step."""
    trainer_busy_s: float
    """Of a step."""
    generators_busy_s: float
    """Of a step, mean over generators."""
    fixed_s: float
    """Part of ``trainer_busy_s`` that does not grow with the batch: clip, optimizer, handing weights over."""
    groups_per_step: int
    max_staleness: int
    max_open_groups: int | None = None
    """Of the buffer; None: as many as the bound allows."""
    resources: Resources | None = None
    steps: int = MEASURED_STEPS
    """That this is the mean of."""

    @property
    def batches_under_way(self) -> float:
        """At most, from admission to update."""
        allowed = self.max_staleness + 1
        return allowed if self.max_open_groups is None else min(allowed, self.max_open_groups / self.groups_per_step)


@dataclass(frozen=True)
class Advice:
    """What a run's rates say. A setting is None where there is nothing to change about it."""

    waited: str
    """``trainer``, ``generators``, ``both`` (in turns) or ``neither``."""
    idle_trainer: float
    """Share of a step."""
    idle_generators: float
    trainer: int | None = None
    """Cores or GPUs; the generators get the rest, ``generators``."""
    generators: int | None = None
    unit: str = "cores"
    groups_per_step: int | None = None
    max_staleness: int | None = None
    max_open_groups: int | None = None
    step_s: float | None = None
    """Expected of the run's batch with what is advised."""

    @property
    def nothing(self) -> bool:
        settings = self.trainer, self.groups_per_step, self.max_staleness, self.max_open_groups
        return all(setting is None for setting in settings)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        said = {
            "trainer": f"the trainer waited for samples {self.idle_trainer:.0%} of the time",
            "generators": f"the generators waited for the trainer {self.idle_generators:.0%} of the time",
            "both": f"trainer and generators waited for each other ({self.idle_trainer:.0%} and "
            f"{self.idle_generators:.0%} of the time)",
            "neither": "both sides were busy",
        }[self.waited]
        changes = []
        if self.trainer is not None:
            changes.append(f"{self.trainer} {self.unit} for the trainer and {self.generators} for the generators")
        if self.max_staleness is not None:
            changes.append(f"buffer.max_staleness={self.max_staleness}")
        if self.max_open_groups is not None:
            changes.append(f"buffer.max_open_groups={self.max_open_groups}")
        if self.groups_per_step is not None:
            changes.append(f"buffer.groups_per_step={self.groups_per_step}")
        if not changes:
            return said if self.waited == "neither" else f"{said}; none of these settings would balance them"
        return f"{said}; {', '.join(changes)} would make it about {self.step_s:.2g} s per step's worth of samples"


def advise(run: Measured) -> Advice | None:
    """Advice for the next run; None where too little was measured.

    A side's work is its busy time times what it runs on, and is taken to spread evenly. The split is the one whose
    slower side is fastest. Where both still wait, they do so in turns: with a bound of s, s + 1 batches are under way
    (fewer where fewer groups may be open), so that one takes as many steps from admission to update, and as many must
    be under way as fit into that at the balanced pace; what may be open is raised where that allows fewer. Sides that
    share what they run on gain nothing by either. Where there is nothing to split and the trainer is slower, a larger
    batch spreads its fixed part over more groups.
    """
    if not (run.steps >= MEASURED_STEPS and run.step_s > 0 and run.trainer_busy_s > 0 and run.generators_busy_s > 0):
        return None
    trainer, generators = min(run.trainer_busy_s, run.step_s), min(run.generators_busy_s, run.step_s)
    idle_trainer, idle_generators = 1 - trainer / run.step_s, 1 - generators / run.step_s
    waits = idle_trainer >= WAITS, idle_generators >= WAITS
    names = {(True, True): "both", (True, False): "trainer", (False, True): "generators", (False, False): "neither"}
    waited, pace = names[waits], max(trainer, generators)
    split: tuple[int, int] | None = None
    on = run.resources
    if on is not None and not on.shared and any(waits):
        whole = on.trainer + on.generators

        def slower(share: int) -> float:
            return max(trainer * on.trainer / share, generators * on.generators / (whole - share))

        share = min(range(1, whole), key=lambda count: (slower(count), abs(count - on.trainer)))
        if share != on.trainer and slower(share) * WORTH < pace:
            split, pace = (share, whole - share), slower(share)
    staleness: int | None = None
    open_groups: int | None = None
    if all(waits) and run.step_s > WORTH * pace and not (on is not None and on.shared):
        under_way = math.ceil(run.batches_under_way * run.step_s / pace - 1e-6)
        staleness = under_way - 1 if under_way - 1 > run.max_staleness else None
        cap = run.max_open_groups
        # One within a batch of the bound only lets a step make room before its weights have arrived.
        holds = cap is not None and (staleness is not None or cap <= run.max_staleness * run.groups_per_step)
        if cap is not None and holds and under_way * run.groups_per_step > cap:
            open_groups = under_way * run.groups_per_step
    groups: int | None = None
    growing = trainer - run.fixed_s
    if split is None and growing < generators < trainer and waits[1]:
        groups = math.ceil(run.groups_per_step * run.fixed_s / (generators - growing))
        groups = min(groups, 4 * run.groups_per_step)
        pace = max(generators, growing + run.fixed_s * run.groups_per_step / groups)
        if pace * WORTH > trainer:
            groups, pace = None, trainer
    expected = pace if split or groups or open_groups or staleness is not None else None
    return Advice(
        waited=waited,
        idle_trainer=idle_trainer,
        idle_generators=idle_generators,
        trainer=split[0] if split else None,
        generators=split[1] if split else None,
        unit=on.unit if on is not None else "cores",
        groups_per_step=groups,
        max_staleness=staleness,
        max_open_groups=open_groups,
        step_s=expected,
    )
