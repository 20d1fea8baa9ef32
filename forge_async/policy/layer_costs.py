"""What each form of layers costs here, measured, and which is cheaper: ``policy.update.layers: auto``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from forge_async.policy import vllm_compat
from forge_async.policy.weight_plan import WeightPlan

Layers = Mapping[str, vllm_compat.PackedLinear | vllm_compat.PackedExperts]


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

    def learn(self, packs: bool, seconds: float) -> None:
        """Note what an update cost. The least counts: the first ones in a form make its memory's pages, later ones do
        not."""
        self.update[packs] = min(self.update[packs], seconds)


def forward_s(
    plan: WeightPlan, layers: Layers, layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]], rows: int
) -> float:
    """Processor seconds of all linear layers' products with ``rows`` of input, with the weights as the layers hold them
    now. One layer after the other, as in a forward pass: the same one again would find its weights in the caches.

    Args:
        layout: shape [O, I] and dtype of each parameter, which may be empty while its layer is packed.
    """
    products = []
    for name, layer in layers.items():
        if isinstance(layer, vllm_compat.PackedLinear):
            shape, dtype = layout[name]
            products.append((layer.linear, torch.zeros(rows, shape[1], dtype=dtype), plan.parameters[name].data))

    def forward() -> None:
        for linear, x, weight in products:
            linear(x, weight)

    with torch.no_grad():
        return _seconds(forward)


def update_s(plan: WeightPlan, layers: Layers) -> dict[bool, float]:
    """Processor seconds of copying all weights, and of packing those of layers besides; while they are live."""
    largest = max((parameter.data for parameter in plan.parameters.values()), key=lambda weight: weight.nbytes)
    destination = torch.empty_like(largest)

    def pack() -> None:
        for name, layer in layers.items():
            layer.pack(plan.parameters[name].data)

    with torch.no_grad():
        copy_s = _seconds(lambda: destination.copy_(largest)) * plan.nbytes / largest.nbytes
        return {False: copy_s, True: copy_s + _seconds(pack)}


def _seconds(call: Callable[[], object]) -> float:
    """Processor time of one call: the least of three, after one to warm up."""
    taken = []
    for _ in range(4):
        began = time.thread_time()
        call()
        taken.append(time.thread_time() - began)
    return min(taken[1:])
