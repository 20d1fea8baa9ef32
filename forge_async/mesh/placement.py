"""Which cores the trainer and each policy replica run on.

Two engines that share cores collapse (each spins while the other works), so trainer and generators get disjoint cores
wherever there are enough.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from forge_async.errors import require


@dataclass(frozen=True)
class PlacementConfig:
    """Cores of this machine, by number as in ``taskset``; null: planned from the cores this process may use."""

    trainer_cores: list[int] | None = None
    """Cores of all trainer processes together, dealt to them in order."""
    policy_cores: list[int] | None = None
    """Cores of all policy replicas together, dealt to them in equal runs."""

    def __post_init__(self) -> None:
        for name in ("trainer_cores", "policy_cores"):
            value = getattr(self, name)
            require(
                value is None or (len(value) > 0 and all(core >= 0 for core in value)),
                name,
                value,
                "null or a list of core numbers, such as [0, 1]",
            )


@dataclass(frozen=True)
class Placement:
    """The plan: cores of the trainer, and of each policy replica."""

    trainer: list[int]
    policy: list[list[int]]


def plan_placement(
    config: PlacementConfig,
    trainer_procs: int,
    policy_replicas: int,
    policy_procs: int = 1,
    cores: Iterable[int] | None = None,
) -> Placement:
    """Split ``cores`` (default: those this process may use) between trainer and policy replicas.

    Cores named in ``config`` are taken as given. Otherwise the trainer gets a share in proportion to its processes,
    at least one core, and the replicas the rest. Where there are fewer cores than processes, processes share.
    """
    available = sorted(os.sched_getaffinity(0) if cores is None else set(cores))
    for name, chosen in (("trainer_cores", config.trainer_cores), ("policy_cores", config.policy_cores)):
        missing = sorted(set(chosen or []) - set(available))
        require(not missing, name, chosen, f"among the cores this process may use, {available}")
    taken = set(config.trainer_cores or []) | set(config.policy_cores or [])
    free = [core for core in available if core not in taken] or available
    trainer, policy = config.trainer_cores, config.policy_cores
    if trainer is None and policy is None:
        if len(free) == 1:
            warnings.warn("one core only: trainer and policy share it and slow each other down", stacklevel=2)
            trainer, policy = list(free), list(free)
        else:
            processes = trainer_procs + policy_replicas * policy_procs
            share = min(max(round(len(free) * trainer_procs / processes), 1), len(free) - 1)
            trainer, policy = free[:share], free[share:]
    trainer = list(free) if trainer is None else list(trainer)
    policy = list(free) if policy is None else list(policy)
    if set(trainer) & set(policy) and len(available) > 1:
        warnings.warn(f"trainer and policy share cores {sorted(set(trainer) & set(policy))}", stacklevel=2)
    return Placement(trainer, deal(policy, policy_replicas))


def deal(cores: list[int], parts: int) -> list[list[int]]:
    """Deal ``cores`` into ``parts`` runs of nearly equal length; with fewer cores than parts, parts share."""
    if len(cores) < parts:
        return [[cores[part % len(cores)]] for part in range(parts)]
    bounds = [round(part * len(cores) / parts) for part in range(parts + 1)]
    return [cores[start:end] for start, end in itertools.pairwise(bounds)]
