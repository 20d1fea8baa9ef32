"""Every way of a swap on a small model without vLLM: fused, padded and tied matrices, packed by torch's operators."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from forge_async.errors import ConfigError
from forge_async.policy import PolicyConfig, UpdateConfig, vllm_compat
from forge_async.policy.attestation import DigestMismatchError, attest
from forge_async.policy.layer_costs import Costs
from forge_async.policy.live_weights import LiveWeights, Prepared
from forge_async.policy.weight_plan import WeightMismatchError, WeightPlan
from forge_async.store import tensor_digest

WAYS = [("copy", "live"), ("copy", "packed"), ("flip", "live"), ("flip", "packed")]
LAYOUT = {
    "embed.weight": ((40, 32), torch.float32),
    "q.weight": ((32, 32), torch.float32),
    "k.weight": ((16, 32), torch.float32),
    "norm": ((32,), torch.float32),
    "out.weight": ((32, 48), torch.float32),
}


class Linear(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.cpu_linear = vllm_compat.CpuLinear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cpu_linear(x, self.weight)


class Model(nn.Module):
    """q above k in one matrix; an output layer tied to the embedding, whose vocabulary of 40 is padded to 64 rows."""

    def __init__(self) -> None:
        super().__init__()

        def new(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape), requires_grad=False)

        self.embed, self.norm = new(64, 32), new(32)
        self.qk, self.out = Linear(new(48, 32)), Linear(new(32, 48))
        self.head = Linear(self.embed)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "embed.weight":
                self.embed[: len(tensor)].data.copy_(tensor)
                self.embed[len(tensor) :].data.fill_(0)
            elif name in ("q.weight", "k.weight"):
                self.qk.weight.data.narrow(0, 0 if name[0] == "q" else 32, len(tensor)).copy_(tensor)
            else:
                (self.norm if name == "norm" else self.out.weight).data.copy_(tensor)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.out(self.qk(functional.embedding(ids, self.embed) * self.norm)))


def expected(tensors: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    x = tensors["embed.weight"][ids] * tensors["norm"]
    x = x @ torch.cat([tensors["q.weight"], tensors["k.weight"]]).T @ tensors["out.weight"].T
    return functional.pad(x @ tensors["embed.weight"].T, (0, 24))


def version(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, (shape, _) in LAYOUT.items()}


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch):
    def packed_layers(model: Model) -> dict[str, vllm_compat.PackedLinear]:
        shared = {"qk.weight": model.qk, "out.weight": model.out, "embed": model.head}
        return {name: vllm_compat.PackedLinear(layer, shared=name == "embed") for name, layer in shared.items()}

    monkeypatch.setattr(vllm_compat, "packed_layers", packed_layers)

    def made(swap: str, layers: str) -> tuple[Model, LiveWeights]:
        model = Model()
        model.load_weights(version(0).items())
        plan = WeightPlan.record(
            model.load_weights, dict(model.named_parameters()), LAYOUT, {"head.weight": "embed.weight"}
        )
        return model, LiveWeights(model, plan, UpdateConfig(swap=swap, layers=layers), compiled=False)

    return made


IDS = torch.tensor([3, 9, 39, 0, 7])


def check(model: Model, weights: LiveWeights, tensors: dict[str, torch.Tensor]) -> None:
    assert torch.allclose(model(IDS), expected(tensors, IDS), rtol=1e-4, atol=1e-2)
    held = {name: tensor.clone() for name, tensor in weights.tensors()}
    assert held.keys() == tensors.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in tensors.items())
    assert torch.equal(weights.read("head.weight"), tensors["embed.weight"])


@pytest.mark.parametrize(("swap", "layers"), WAYS)
def test_versions_follow_each_other(make, swap: str, layers: str) -> None:
    model, weights = make(swap, layers)
    check(model, weights, version(0))
    assert (model.qk.weight.numel() == 0) == (layers == "packed")  # else memory would be needed twice
    for seed in (1, 2, 3):
        tensors = version(seed)
        prepared = weights.prepare(tensors)
        check(model, weights, version(seed - 1))
        weights.apply(prepared)
        check(model, weights, tensors)
        weights.discard()
        if swap == "flip":
            weights.check_live(prepared)
            tensors["norm"].zero_()  # the update's own memory is no longer needed
            assert model.norm.abs().sum() > 0


@pytest.mark.parametrize(("before", "after"), list(itertools.product(WAYS, WAYS)))
def test_any_way_follows_any_other(make, before: tuple[str, str], after: tuple[str, str]) -> None:
    model, weights = make(*before)
    for seed, (swap, layers) in enumerate((after, before, after), start=1):
        weights.flips, weights.config = swap == "flip", UpdateConfig(swap=swap, layers=layers)
        weights.apply(weights.prepare(version(seed)))
        assert weights.packs == (layers == "packed")
        check(model, weights, version(seed))


def test_a_flip_keeps_two_sets_and_no_more(make) -> None:
    model, weights = make("flip", "live")
    seen = set()
    for seed in range(1, 6):
        weights.apply(weights.prepare(version(seed)))
        seen.add(model.out.weight.data_ptr())
    assert len(seen) == 2


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("layers", ["live", "packed"])
def test_a_wrong_mapping_is_found_before_the_flip(make, layers: str, at_once: bool) -> None:
    model, weights = make("flip", layers)
    (first, one), (second, other) = weights.plan.writes["qk.weight"]
    tensors = version(1)
    weights.plan.writes["qk.weight"] = [(first, one), (second, replace(other, target_offset=0))]
    prepared = weights.prepare(tensors, digests=at_once)
    with pytest.raises(DigestMismatchError, match=r"version 1: [qk]\.weight"):
        attest(1, digests(tensors), tensors, weights.digests(prepared), weights.plan.aliases)
    check(model, weights, version(0))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_held_is_attested(make, way: tuple[str, str]) -> None:
    _, weights = make(*way)
    tensors = version(1)
    weights.apply(weights.prepare(tensors))
    attest(1, digests(tensors), tensors, weights.digests(), weights.plan.aliases)
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    weights.apply(weights.prepare(halves))
    attest(2, digests(halves), halves, weights.digests(), weights.plan.aliases)
    with pytest.raises(DigestMismatchError, match=r"version 3: embed\.weight"):
        attest(3, digests(tensors), tensors, weights.digests(), weights.plan.aliases)
    with pytest.raises(DigestMismatchError, match=r"head\.weight and embed\.weight differ"):
        both = halves | {"head.weight": halves["embed.weight"] + 1}
        attest(4, digests(both), both, weights.digests(), weights.plan.aliases)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_number_is_held_and_attested_as_any_other_value(make, way: tuple[str, str]) -> None:
    """A trainer that diverged is no fault of the generator's packing."""
    _, weights = make(*way)
    tensors = version(1)
    for tensor in tensors.values():
        tensor.view(-1)[:3] = torch.tensor([torch.nan, -torch.inf, -0.0])
    weights.apply(weights.prepare(tensors))
    attest(1, digests(tensors), tensors, weights.digests(), weights.plan.aliases)
    assert all(same for _, same in weights.compare(tensors))


@pytest.mark.parametrize("layers", ["live", "packed"])
def test_digests_taken_while_preparing_are_those_of_what_forward_passes_then_use(make, layers: str) -> None:
    _, weights = make("flip", layers)
    prepared = weights.prepare(version(1), digests=True)
    assert prepared.digests == digests(version(1))
    weights.apply(prepared)
    weights.check_live(prepared)
    assert {name: digest for name, _, digest in weights.digests()} == prepared.digests, "unpacked from the live layers"


def test_a_machine_whose_packing_loses_values_is_refused(make, monkeypatch: pytest.MonkeyPatch) -> None:
    unpack = vllm_compat.PackedLinear.unpack
    monkeypatch.setattr(vllm_compat.PackedLinear, "unpack", lambda layer, packed: unpack(layer, packed) * 2)
    with pytest.raises(WeightMismatchError, match=r"qk\.weight: .* does not unpack to the same"):
        make("flip", "packed")


def test_a_layer_that_kept_the_old_memory_is_named(make) -> None:
    model, weights = make("flip", "packed")
    old, prepared = model.out.cpu_linear.packed, weights.prepare(version(1))
    weights.apply(prepared)
    weights.check_live(prepared)
    model.out.cpu_linear.packed = old
    with pytest.raises(WeightMismatchError, match=r"out\.weight: forward passes use other memory"):
        weights.check_live(prepared)
    assert not torch.equal(weights.read("out.weight"), version(1)["out.weight"])


def test_a_tied_output_layer_that_missed_the_update_is_found(make) -> None:
    model, weights = make("copy", "packed")
    old = model.head.cpu_linear.packed
    weights.apply(weights.prepare(version(1)))
    model.head.cpu_linear.packed = old
    with pytest.raises(WeightMismatchError, match="embed: the output layer's packed matrix differs"):
        list(weights.tensors())


def test_auto_packs_where_updates_are_rare_and_not_where_they_are_frequent(make) -> None:
    """A pass of 90 or 150 ms, and an update that costs 500 or 100 ms: equal at one second between updates."""
    model, weights = make("flip", "auto")
    assert weights.packs and weights.costs is not None
    assert all(seconds > 0 for seconds in (*weights.costs.forward.values(), *weights.costs.update.values()))
    weights.costs = Costs(forward={True: 0.05, False: 0.11}, update={True: 0.5, False: 0.1})

    def prepared_after(interval_s: float) -> Prepared:
        weights._applied.clear()
        now = weights.now()
        weights._applied.extend(now - interval_s * i for i in (3, 2, 1))
        return weights.prepare(version(1), step_s=0.09 if weights.packs else 0.15)

    assert prepared_after(1.2).packs and not prepared_after(0.8).packs
    weights.apply(prepared_after(0.8))
    assert weights.costs.update[False] != 0.1  # measured
    check(model, weights, version(1))
    weights.costs.update.update({True: 0.5, False: 0.1})
    assert prepared_after(1.2).packs and not prepared_after(0.8).packs


def test_settings_that_cannot_be_had_are_refused(make, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="CUDA graphs") as raised:
        PolicyConfig(enforce_eager=False, update=UpdateConfig(swap="flip"))
    assert raised.value.key == "update.swap"
    for bad in ({"swap": "move"}, {"layers": "loose"}, {"pull_nice": 20}):
        with pytest.raises(ConfigError):
            UpdateConfig(**bad)
    monkeypatch.setattr(vllm_compat, "can_pack", lambda dtype: False)
    with pytest.raises(ConfigError, match="does not pack") as raised:
        make("flip", "packed")
    assert raised.value.key == "policy.update.layers"
    model, weights = make("flip", "auto")
    assert not weights.packs
    weights.apply(weights.prepare(version(1)))
    check(model, weights, version(1))


def test_what_does_not_fit_changes_nothing(make) -> None:
    model, weights = make("flip", "packed")
    with pytest.raises(WeightMismatchError, match=r"norm.*\[31\]"):
        weights.prepare(version(1) | {"norm": torch.zeros(31)})
    check(model, weights, version(0))
    assert vllm_compat.can_pack(torch.float32)
