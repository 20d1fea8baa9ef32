"""The weight plan on a toy model whose loader fuses, stacks, pads and shares as vLLM's do."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from forge_async.errors import ConfigError
from forge_async.policy import PolicyConfig, SamplingConfig, UpdateConfig
from forge_async.policy.weight_plan import Place, WeightMismatchError, WeightPlan

LAYOUT = {
    "embed.weight": ((5, 4), torch.float32),
    "q.weight": ((4, 4), torch.float32),
    "k.weight": ((2, 4), torch.float32),
    "experts.0.w": ((3, 4), torch.float32),
    "experts.1.w": ((3, 4), torch.float32),
    "rotary_emb.inv_freq": ((2,), torch.float32),
}


class Toy(nn.Module):
    """q above k in one matrix, experts stacked and each split in two columns, a vocabulary of 5 padded to 8 rows."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.full((8, 4), -7.0, dtype=dtype), requires_grad=False)
        self.qk = nn.Parameter(torch.full((6, 4), -7.0, dtype=dtype), requires_grad=False)
        self.experts = nn.Parameter(torch.full((2, 3, 4), -7.0, dtype=dtype), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "embed.weight":
                self.embed[: len(tensor)].data.copy_(tensor)
                self.embed[len(tensor) :].data.fill_(0)
            elif name in ("q.weight", "k.weight"):
                self.qk.data.narrow(0, 0 if name[0] == "q" else 4, len(tensor)).copy_(tensor)
            elif name.startswith("experts."):
                for half in (slice(0, 2), slice(2, 4)):
                    self.experts.data[int(name[8])][:, half].copy_(tensor[:, half])


def plan_of(model: Toy, layout: dict = LAYOUT) -> WeightPlan:
    return WeightPlan.record(
        model.load_weights, dict(model.named_parameters()), layout, {"head.weight": "embed.weight"}
    )


def version(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(shape, generator=generator) for n, (shape, _) in LAYOUT.items() if "rotary" not in n}


def shapes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def apply(plan: WeightPlan, tensors: dict[str, torch.Tensor]) -> None:
    """A whole version into the live parameters, as a swap by copy does it."""
    for name, parameter in plan.parameters.items():
        Place(plan, name, parameter.data).write(tensors)


def test_recording_changes_nothing() -> None:
    model = Toy()
    plan_of(model)
    assert all((parameter == -7).all() for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replay_is_what_the_models_own_loader_does_and_reads_back(dtype: torch.dtype) -> None:
    model, reference = Toy(dtype), Toy(dtype)
    plan = plan_of(model)
    for seed in (1, 2):
        tensors = version(seed)
        plan.check(shapes(tensors))
        apply(plan, tensors)
        reference.load_weights(tensors.items())
        reference.embed[5:] = -7  # the padding is left alone by a replay
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, reference.get_parameter(name))
        assert all(torch.equal(plan.read(name), tensor.to(dtype)) for name, tensor in tensors.items())
        assert torch.equal(plan.read("head.weight"), tensors["embed.weight"].to(dtype))
    assert plan.nbytes == (5 * 4 + 6 * 4 + 2 * 3 * 4) * dtype.itemsize


def test_a_strided_source_is_copied_right() -> None:
    model = Toy()
    plan, tensors = plan_of(model), version(3)
    apply(plan, {name: tensor.t().contiguous().t() for name, tensor in tensors.items()})
    assert all(torch.equal(plan.read(name), tensor) for name, tensor in tensors.items())


def test_a_version_that_does_not_fit_is_named() -> None:
    plan, tensors = plan_of(Toy()), version(1)
    with pytest.raises(WeightMismatchError, match=r"k\.weight.*\[3, 4\].*\[2, 4\]"):
        plan.check(shapes(tensors) | {"k.weight": (3, 4)})
    with pytest.raises(WeightMismatchError, match=r"extra.*no such tensor"):
        plan.check(shapes(tensors) | {"extra": (1,)})
    with pytest.raises(WeightMismatchError, match=r"k\.weight: not among the 4"):
        plan.check({name: shape for name, shape in shapes(tensors).items() if name != "k.weight"})
    plan.check(shapes(tensors) | {"head.weight": (5, 4)})


def test_a_parameter_that_the_checkpoint_leaves_unset_is_named() -> None:
    layout = {name: entry for name, entry in LAYOUT.items() if name != "k.weight"}
    with pytest.raises(WeightMismatchError, match=r"parameter qk .*16 of its 24"):
        plan_of(Toy(), layout)


def test_a_loader_that_cannot_be_replayed_is_named() -> None:
    class Transforming(Toy):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for _, tensor in weights:
                self.qk.data[:4].copy_(tensor * 2)

    with pytest.raises(WeightMismatchError, match=r"q\.weight.*transforms"):
        plan_of(Transforming(), {"q.weight": LAYOUT["q.weight"]})

    class Ignoring(Toy):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            list(weights)

    with pytest.raises(WeightMismatchError, match=r"q\.weight.*no parameter"):
        plan_of(Ignoring(), {"q.weight": LAYOUT["q.weight"]})


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: SamplingConfig(temperature=-1), "temperature"),
        (lambda: SamplingConfig(temperature=1e-6), "temperature"),
        (lambda: SamplingConfig(top_p=0), "top_p"),
        (lambda: SamplingConfig(max_tokens=0), "max_tokens"),
        (lambda: UpdateConfig(mode="drian"), "mode"),
        (lambda: UpdateConfig(kv="drop"), "kv"),
        (lambda: PolicyConfig(dtype="float64"), "dtype"),
        (lambda: PolicyConfig(max_model_len=64), "sampling.max_tokens"),
        (lambda: PolicyConfig(max_num_batched_tokens=8), "max_num_batched_tokens"),
    ],
)
def test_settings_are_checked(make, key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make()
    assert raised.value.key == key
