"""What each form of layers costs here, measured, and which is cheaper: ``policy.update.layers: auto``."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from forge_async.policy import vllm_compat
from forge_async.policy.weight_plan import WeightPlan


@dataclass
class Costs:
    """Measured seconds, by form (``packed`` or not)."""

    forward: dict[bool, float]
    """Of all linear layers in one forward pass."""
    update: dict[bool, float]
    """Of bringing one version into this form."""

    def choose(self, interval_s: float, step_s: float, packs: bool) -> bool:
        """Whether the next version's layers are to be packed: the form with more forward passes until the one after.

        Args:
            interval_s: between two versions.
            step_s: of a forward pass at present, with layers packed or not (``packs``).
        """
        rest = max(step_s - self.forward[packs], 0.0)

        def passes(packs: bool) -> float:
            return max(interval_s - self.update[packs], 0.0) / (rest + self.forward[packs])

        return passes(True) > passes(False)


def measure(
    plan: WeightPlan, layers: Mapping[str, vllm_compat.PackedLinear | vllm_compat.PackedExperts], rows: int
) -> Costs:
    """Time each kind of matrix once in both forms, with ``rows`` of input. ``update[True]`` is measured when the layers
    are packed."""
    kinds: dict[tuple[int, ...], list[str]] = {}
    for name, layer in layers.items():
        if isinstance(layer, vllm_compat.PackedLinear):
            kinds.setdefault(tuple(plan.parameters[name].shape), []).append(name)
    forward = {True: 0.0, False: 0.0}
    with torch.no_grad():
        for names in kinds.values():
            weight = plan.parameters[names[0]].data
            x = torch.zeros(rows, weight.shape[1], dtype=weight.dtype)
            linear = vllm_compat.CpuLinear()
            for packs in (False, True):
                linear.packed = vllm_compat.pack(weight) if packs else None
                forward[packs] += len(names) * _seconds(functools.partial(linear, x, weight))
    largest = max(plan.parameters.values(), key=lambda parameter: parameter.nbytes).data
    destination = torch.empty_like(largest)
    copy_s = _seconds(lambda: destination.copy_(largest)) * plan.nbytes / largest.nbytes
    return Costs(forward, {True: copy_s, False: copy_s})


def _seconds(call: Callable[[], object]) -> float:
    """Processor time of one call: the least of three, after one to warm up."""
    taken = []
    for _ in range(4):
        began = time.thread_time()
        call()
        taken.append(time.thread_time() - began)
    return min(taken[1:])
