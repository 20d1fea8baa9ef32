"""How a new version becomes live: prepared in any thread, beside generation, and applied between two forward passes.

======  ==========================  ===========================================================================
swap    layers                      prepared beside generation, then in the pause
======  ==========================  ===========================================================================
flip    live                        a second set of parameters is filled; parameters are pointed at it
flip    packed                      each matrix is packed, into new memory; layers are pointed at it
copy    live                        nothing; parameters are overwritten in place
copy    packed                      nothing; each matrix is packed anew, one after the other
======  ==========================  ===========================================================================

``live`` layers compute with parameters as a checkpoint holds them. ``packed`` ones (CPU only) have them in the blocks
that oneDNN's kernels read, as vLLM itself sets them up: faster, and dearer to update. ``auto`` weighs both by what was
measured in this process: time per forward pass, cost per update, and time between updates.

What a flip has prepared can be read, and so attested, before anything live has changed.
"""

from __future__ import annotations

import collections
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from forge_async.errors import ConfigError
from forge_async.mesh.processes import GiveWay
from forge_async.policy import layer_costs, vllm_compat
from forge_async.policy.config import UpdateConfig
from forge_async.policy.layer_costs import Costs
from forge_async.policy.weight_plan import Place, WeightMismatchError, WeightPlan, in_parts, same_bits
from forge_async.store.digest import tensor_digest


@dataclass
class WeightSet:
    """Tensors by parameter name, each in one form or (tied embeddings) in both."""

    dense: dict[str, torch.Tensor] = field(default_factory=dict)
    packed: dict[str, torch.Tensor] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    """Of the dense ones."""


@dataclass
class Prepared:
    """A version on its way: what :meth:`LiveWeights.apply` needs. The tensors must stay valid until then."""

    tensors: Mapping[str, torch.Tensor]
    weights: WeightSet | None
    """The second set, filled; None where the swap copies."""
    packs: bool
    cost_s: float = 0.0
    """Processor seconds of the preparation, and of reading it back."""
    digests: dict[str, str] = field(default_factory=dict)
    """Of the second set, by HF name, where they were asked for."""


class LiveWeights:
    """The weights of a vLLM model that was just loaded, and their replacement.

    Args:
        model: as vLLM has built it; its parameters hold what ``plan`` reads.
        compiled: forward passes may be CUDA graphs, which read parameters at fixed addresses.
        rows: of a typical forward pass, for the measurements.
    Raises:
        ConfigError: ``layers`` or ``swap`` cannot be had here.
        WeightMismatchError: this machine's packing loses values.
    """

    def __init__(
        self, model: torch.nn.Module, plan: WeightPlan, config: UpdateConfig, compiled: bool, rows: int = 32
    ) -> None:
        self.model, self.plan, self.config = model, plan, config
        on_cpu = plan.device.type == "cpu"
        if config.swap == "flip" and compiled and not on_cpu:
            raise ConfigError(
                "policy.update.swap",
                "flip",
                "copy or auto with CUDA graphs",
                "Graphs read parameters at fixed addresses. Set policy.enforce_eager=true to flip.",
            )
        self.flips = config.swap == "flip" or (config.swap == "auto" and (on_cpu or not compiled))
        self.layers = vllm_compat.packed_layers(model) if on_cpu else {}
        """Parameters that can be packed."""
        dtypes = {plan.parameters[name].dtype for name in self.layers}
        if not self.layers or not all(vllm_compat.can_pack(dtype) for dtype in dtypes):
            if config.layers == "packed":
                raise ConfigError(
                    "policy.update.layers",
                    "packed",
                    "live or auto here",
                    f"This {'CPU does not pack ' + ', '.join(map(str, dtypes)) if on_cpu else 'is not a CPU'}.",
                )
            self.layers = {}
        self.packs = bool(self.layers) and config.layers != "live"
        """Whether the layers are packed now."""
        self._layout = {name: (tuple(live.shape), live.dtype) for name, live in plan.parameters.items()}
        self._owners: dict[str, list[tuple[torch.nn.Module, str]]] = {name: [] for name in plan.parameters}
        """Modules that compute with each parameter (several with tied ones), and what they call it."""
        names = {id(parameter): name for name, parameter in plan.parameters.items()}
        for module in model.modules():
            for key, value in module._parameters.items():
                if id(value) in names:
                    self._owners[names[id(value)]].append((module, key))
        self._stream = torch.cuda.Stream(plan.device) if plan.device.type == "cuda" else None
        """Copies beside generation do not wait for forward passes, nor those for them."""
        self._places: dict[str, Place] = {}
        """Of live dense tensors, by parameter, as far as they were asked for."""
        self._spare: dict[str, Place] = {}
        """Of dense tensors of the last version: filled again by the next."""
        self._workbench: dict[str, Place] = {}
        """By parameter: places in one memory, where matrices of several tensors are put together to be packed."""
        self._retired: list[torch.Tensor] = []
        """Packed tensors of the last version. Their memory is not given back in the pause: that takes long."""
        self._applied = collections.deque([self.now()], maxlen=6)
        self.costs: Costs | None = None
        if self.layers and config.layers == "auto":
            live_s = layer_costs.forward_s(plan, self.layers, self._layout, rows)
            self.costs = Costs({False: live_s}, layer_costs.update_s(plan, self.layers))
        if self.packs:
            for name, layer in self.layers.items():
                parameter = plan.parameters[name]
                dense = parameter.data
                packed = layer.pack(dense)
                if not same_bits(layer.unpack(packed), dense):
                    raise WeightMismatchError(f"{name}: what is packed here does not unpack to the same values")
                layer.install(parameter, dense if layer.shared else None, packed)
            if self.costs is not None:
                self.costs.forward[True] = layer_costs.forward_s(plan, self.layers, self._layout, rows)

    # ---- any thread ----

    def prepare(
        self,
        tensors: Mapping[str, torch.Tensor],
        step_s: float = 0.0,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        digests: bool = False,
        packs: bool | None = None,
    ) -> Prepared:
        """All that can be done for a version without touching what is live; one call at a time.

        Args:
            tensors: HF name -> full tensor.
            step_s: mean seconds of a forward pass at present, for ``layers: auto``.
            shapes: of all tensors, where asking for a tensor may have to wait for it.
            digests: of a flip, read tensors back from the parameters and digest them at once, each while it is in the
                processor's caches, and those that are packed as they were packed (unpacking costs as much as packing);
                not on tensor-parallel ranks, which have parts only.
            packs: whether to pack layers, as a replay prescribes; None decides by ``layers``.
        Raises:
            WeightMismatchError: a name or a shape does not fit.
        """
        self.plan.check(shapes or {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        packs = self._choose(step_s) if packs is None else packs and bool(self.layers)
        if not self.flips:
            return Prepared(tensors, None, packs)
        began = time.thread_time()
        new = WeightSet()
        prepared = Prepared(tensors, new, packs)
        give_way = GiveWay()
        with torch.no_grad(), nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for name in self.plan.parameters:
                layer = self.layers.get(name) if packs else None
                if layer is None or layer.shared:
                    place = new.places[name] = self._spare.pop(name) if name in self._spare else self._new_place(name)
                    place.write(tensors, digests)
                    new.dense[name] = place.memory
                else:
                    place = self._gather(name, tensors)
                if layer is not None:
                    new.packed[name] = layer.pack(place.memory)
                if digests:
                    self._digest(name, place, prepared)
                give_way()
            self.plan.wait_for_copies()
        self._spare.clear()  # what is left served the other form of layers
        prepared.cost_s = time.thread_time() - began
        return prepared

    def _digest(self, parameter: str, place: Place, prepared: Prepared) -> None:
        """Note the digests of the HF tensors that are whole with ``parameter``, whose new values are in ``place``."""
        others = self._reader(prepared)
        for name in self.plan.completed_by[parameter]:
            digest = place.digest(name)
            if digest is None:
                held = self.plan.read(name, of=lambda other: place.memory if other == parameter else others(other))
                digest = tensor_digest(held)
            prepared.digests[name] = digest

    def tensors(self, prepared: Prepared | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, tensor) as the model holds it now, or will once ``prepared`` is applied.

        Read from what forward passes use: packed matrices are unpacked. A tensor is valid until the next is asked for.

        Raises:
            WeightMismatchError: the packed form of a tied matrix differs from the one looked up.
        """
        dense = self._reader(prepared)
        for name in self.plan.names:
            yield name, self.plan.read(name, of=dense)

    def digests(self, prepared: Prepared | None = None) -> Iterator[tuple[str, torch.dtype, str]]:
        """(HF name, dtype, digest) of :meth:`tensors`; what was digested when it was prepared is not read again."""
        if prepared is not None and prepared.digests:
            yield from ((name, self.plan.entries[name].dtype, digest) for name, digest in prepared.digests.items())
            return
        for name, tensor in self.tensors(prepared):
            yield name, tensor.dtype, tensor_digest(tensor)

    def compare(
        self, published: Mapping[str, torch.Tensor], prepared: Prepared | None = None
    ) -> Iterator[tuple[str, bool]]:
        """(HF name, whether the model holds the published tensor's values), of those parts that this rank has.

        ``prepared`` and errors as in :meth:`tensors`, which is not for tensor-parallel ranks: they have parts only.
        """
        dense = self._reader(prepared)
        for name in self.plan.names:
            yield name, self.plan.holds(name, published[name], of=dense)

    def _reader(self, prepared: Prepared | None) -> Callable[[str], torch.Tensor]:
        """Parameter name -> its values, live ones or those of ``prepared``; the last one is remembered."""
        if prepared is not None and prepared.weights is None:
            raise ValueError("a swap by copy has nothing to read before it is applied")
        held: dict[str, torch.Tensor] = {}

        def dense(parameter: str) -> torch.Tensor:
            if parameter not in held:
                held.clear()
                began = time.thread_time()
                held[parameter] = self._dense(parameter, None if prepared is None else prepared.weights)
                if prepared is not None:
                    prepared.cost_s += time.thread_time() - began
            return held[parameter]

        return dense

    def read(self, name: str) -> torch.Tensor:
        """One HF tensor as the model holds it now, see :meth:`tensors`."""
        return self.plan.read(name, of=lambda parameter: self._dense(parameter, None))

    def check_live(self, prepared: Prepared) -> None:
        """That forward passes use exactly the memory that was prepared.

        Raises:
            WeightMismatchError: naming a parameter that a layer holds otherwise.
        """
        assert prepared.weights is not None
        for name, parameter in self.plan.parameters.items():
            layer, packed = self.layers.get(name), prepared.weights.packed.get(name)
            dense = prepared.weights.dense.get(name)
            right = all(module._parameters[key] is parameter for module, key in self._owners[name])
            right = right and (dense is None or parameter.data_ptr() == dense.data_ptr())
            if layer is not None and packed is not None:
                right = right and layer.packed(parameter) is packed
            elif layer is not None:
                right = right and not self.packs
            if not right:
                raise WeightMismatchError(f"{name}: forward passes use other memory than the new version's")

    def discard(self) -> None:
        """Give back the memory of the version before the live one, as far as the next has no use for it."""
        self._retired.clear()

    # ---- the engine's thread ----

    def apply(self, prepared: Prepared) -> None:
        """Make a prepared version live, between two forward passes."""
        if prepared.weights is not None:
            self._flip(prepared)
        else:
            began = time.thread_time()
            self._copy(prepared)
            prepared.cost_s = time.thread_time() - began
        self.packs = prepared.packs
        self._applied.append(self.now())
        if self.costs is not None:
            self.costs.learn(prepared.packs, prepared.cost_s)

    def _flip(self, prepared: Prepared) -> None:
        new = prepared.weights
        assert new is not None
        spare: dict[str, Place] = {}
        for name, parameter in self.plan.parameters.items():
            layer = self.layers.get(name)
            if layer is None or not self.packs or layer.shared:
                spare[name] = self._live_place(name)
            if layer is not None and self.packs:
                self._retired.append(layer.packed(parameter))
            if layer is None:
                parameter.data = new.dense[name]
            else:
                layer.install(parameter, new.dense.get(name), new.packed.get(name))
        self._spare, self._places = spare, new.places

    def _copy(self, prepared: Prepared) -> None:
        with torch.no_grad():
            for name, parameter in self.plan.parameters.items():
                layer = self.layers.get(name)
                if layer is not None and prepared.packs:
                    dense = parameter.data if layer.shared else self._gather(name, prepared.tensors).memory
                    if layer.shared:
                        self._live_place(name).write(prepared.tensors)
                    layer.install(parameter, dense if layer.shared else None, layer.pack(dense))
                    if not layer.shared:
                        self._places.pop(name, None)
                else:
                    if layer is not None and self.packs:
                        layer.install(parameter, parameter.data if layer.shared else self._like(name), None)
                    self._live_place(name).write(prepared.tensors)
            self.plan.wait_for_copies()

    # ---- forms ----

    def _dense(self, name: str, weights: WeightSet | None) -> torch.Tensor:
        """A parameter as a checkpoint would hold it, out of ``weights`` or what is live."""
        layer = self.layers.get(name)
        if weights is None:
            parameter = self.plan.parameters[name]
            dense: torch.Tensor | None = parameter.data
            packed: torch.Tensor | None = None
            if layer is not None and self.packs:
                packed = layer.packed(parameter)
                dense = dense if layer.shared else None
        else:
            dense, packed = weights.dense.get(name), weights.packed.get(name)
        if packed is None:
            assert dense is not None
            return dense
        assert layer is not None
        with torch.no_grad():
            unpacked = layer.unpack(packed)
        if dense is not None and not same_bits(dense, unpacked):
            raise WeightMismatchError(f"{name}: the output layer's packed matrix differs from the embedding tied to it")
        return unpacked

    def _like(self, name: str) -> torch.Tensor:
        """New memory of a parameter's layout; padding is zero."""
        shape, dtype = self._layout[name]
        return torch.zeros(shape, dtype=dtype, device=self.plan.device)

    def _live_place(self, name: str) -> Place:
        """Where a dense parameter lies now."""
        memory, known = self.plan.parameters[name].data, self._places.get(name)
        if known is None or known.memory.data_ptr() != memory.data_ptr():
            known = self._places[name] = Place(self.plan, name, memory)
        return known

    def _new_place(self, name: str) -> Place:
        return Place(self.plan, name, self._like(name))

    def _gather(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Place:
        """A parameter's new values as a checkpoint would hold them: a view of the update where one tensor is all, else
        on the workbench, valid until the next is asked for."""
        shape, dtype = self._layout[name]
        writes = self.plan.writes[name]
        if len(writes) == 1:
            (source, piece) = writes[0]
            same = piece.covers(shape) and piece.stride == piece.target_stride
            if same and in_parts(tensors, source) is None:
                tensor = tensors[source]
                if tuple(tensor.shape) == shape and tensor.dtype == dtype and tensor.is_contiguous():
                    return Place(self.plan, name, tensor)
        whole = sum(piece.numel for _, piece in writes) == math.prod(shape)
        if whole and isinstance(self.layers[name], vllm_compat.PackedLinear):
            place = self._on_workbench(name)
        else:
            place = self._new_place(name)  # padding is zero; packed experts may keep the memory
        place.write(tensors)
        return place

    def _on_workbench(self, name: str) -> Place:
        if not self._workbench:
            nbytes = {key: math.prod(self._layout[key][0]) * self._layout[key][1].itemsize for key in self.layers}
            memory = torch.empty(max(nbytes.values()), dtype=torch.uint8)
            for key, size in nbytes.items():
                shape, dtype = self._layout[key]
                self._workbench[key] = Place(self.plan, key, memory[:size].view(dtype).view(shape))
        return self._workbench[name]

    # ---- auto ----

    @staticmethod
    def now() -> float:
        """Seconds on the clock that updates are timed by."""
        return time.monotonic()

    def _choose(self, step_s: float) -> bool:
        """Whether the next version's layers are to be packed: the form with more forward passes until the one after."""
        if self.costs is None or self.config.layers != "auto":
            return bool(self.layers) and self.config.layers == "packed"
        interval = statistics.median(
            later - sooner for sooner, later in itertools.pairwise([*self._applied, self.now()])
        )
        return self.costs.choose(interval, step_s, self.packs)
