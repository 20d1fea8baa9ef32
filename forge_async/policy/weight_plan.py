"""The plan by which HF tensors become a vLLM model's live parameters, made once and replayed for every version.

vLLM fuses, splits and pads what a checkpoint holds (q, k and v are one matrix; experts are stacked), and each model
class knows how in its ``load_weights``. The plan is obtained by running that very method once per HF tensor while a
dispatch mode notes where it would copy to, without copying. Replaying it is a list of in-place copies: no allocation,
no Python per-model logic, and nothing changes before every name and shape was checked.

The same plan read backwards gives the HF tensors as the model holds them now, which is what a version's digest is
computed from (attestation), and what proves at start-up that the plan is right: read backwards, it must return the
checkpoint that was just loaded.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge_async.errors import ForgeError
from forge_async.policy import checkpoint
from forge_async.store.digest import (
    DigestedCopy,
    bytes_digest,
    digest_of_blocks,
    nothing,
    number_of_blocks,
    tensor_bytes,
)
from forge_async.store.pulled import Pulled

NOT_A_WEIGHT = "rotary_emb.inv_freq"
"""Names with this in them are computed, not learned; checkpoints of some models carry them all the same."""


class WeightMismatchError(ForgeError):
    """Tensors do not fit the model; the message names the tensor. Nothing was changed."""


@dataclass(frozen=True)
class Piece:
    """One copy: a strided part of a contiguous HF tensor to an equally shaped part of a parameter."""

    parameter: str
    """Name of the parameter."""
    shape: tuple[int, ...]
    target_stride: tuple[int, ...]
    """Of the part within the parameter, elements."""
    target_offset: int
    """Of the part's first element within the parameter, elements."""
    stride: tuple[int, ...]
    """Of the part within the HF tensor, elements."""
    offset: int
    """Of the part's first element within the HF tensor, elements."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a contiguous HF ``tensor`` that this piece is about, as a view."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)

    def within(self, parameter: torch.Tensor) -> torch.Tensor:
        """The part of ``parameter``, laid out as the live one was at recording, as a view."""
        return parameter.as_strided(self.shape, self.target_stride, parameter.storage_offset() + self.target_offset)

    def covers(self, shape: tuple[int, ...]) -> bool:
        """Whether it is all of an HF tensor of ``shape``, in order."""
        return self.shape == shape and self.offset == 0 and self.stride == torch.empty(shape, device="meta").stride()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class PlanEntry:
    """Where one HF tensor goes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Of the live parameter."""
    pieces: tuple[Piece, ...]


class WeightPlan:
    """HF name -> parts of parameters. Build it with :meth:`record`.

    The plan holds names and strides, no memory: it serves the live parameters, which it knows, and any other set of
    tensors of the same names and layouts (``of=``; :meth:`write` is told where to).

    ``aliases`` maps an HF name that shares another one's parameter (tied embeddings) to that other name. An update may
    or may not contain it; where it does, attestation shows whether it holds the same values.
    """

    def __init__(
        self, entries: Mapping[str, PlanEntry], aliases: Mapping[str, str], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        self.entries = dict(entries)
        self.aliases = dict(aliases)
        self.parameters = dict(parameters)
        """The live parameters by name; their data may be exchanged for data of the same layout."""
        self.writes: dict[str, list[tuple[str, Piece]]] = {name: [] for name in parameters}
        """Parameter -> (HF name, piece) of everything that sets it."""
        for entry in self.entries.values():
            for piece in entry.pieces:
                self.writes[piece.parameter].append((entry.name, piece))
        last = {entry.name: entry.pieces[-1].parameter for entry in self.entries.values()}
        self.completed_by = {name: [hf for hf, parameter in last.items() if parameter == name] for name in parameters}
        """Parameter -> HF names that are whole once it is written, if parameters are written in their order."""
        self.names = list(dict.fromkeys(name for writes in self.writes.values() for name, _ in writes))
        """HF names, those that share a parameter one after the other."""

    @classmethod
    def record(
        cls,
        load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
        parameters: Mapping[str, torch.Tensor],
        layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        aliases: Mapping[str, str] | None = None,
    ) -> WeightPlan:
        """Run ``load_weights`` once per tensor of ``layout`` (HF name -> shape, dtype), copying nothing.

        Args:
            load_weights: the model's own loader, called with one (name, tensor) pair at a time.
            parameters: the live parameters by name.
            aliases: see the class.
        Raises:
            WeightMismatchError: the loader rejects a tensor, takes nothing from it, changes a parameter by other means
                than copies from it, or leaves part of a parameter unset.
        """
        aliases = dict(aliases or {})
        recorder = _CopyRecorder(parameters)
        entries: dict[str, PlanEntry] = {}
        for name, (shape, dtype) in layout.items():
            if name in aliases or NOT_A_WEIGHT in name:
                continue
            source = torch.empty(shape, dtype=dtype)  # never touched, so it takes no memory
            try:
                with recorder.recording(source):
                    load_weights([(name, source)])
            except WeightMismatchError as error:
                raise WeightMismatchError(f"{name} {list(shape)}: {error}") from error
            except (AssertionError, RuntimeError, ValueError, KeyError, AttributeError) as error:
                raise WeightMismatchError(
                    f"{name} {list(shape)}: the model's loader rejects it ({type(error).__name__}: {error})"
                ) from error
            if not recorder.pieces:
                raise WeightMismatchError(f"{name} {list(shape)}: the model has no parameter for it")
            live = parameters[recorder.pieces[0].parameter]
            entries[name] = PlanEntry(name, tuple(shape), live.dtype, tuple(recorder.pieces))
        recorder.check_covered(parameters)
        return cls(entries, aliases, parameters)

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise :class:`WeightMismatchError` unless ``shapes`` (HF name -> shape) is a whole version of this model."""
        missing = sorted(self.entries.keys() - shapes.keys())
        if missing:
            raise WeightMismatchError(
                f"{missing[0]}: not among the {len(shapes)} tensors of the update"
                + (f" (nor are {len(missing) - 1} others)" if len(missing) > 1 else "")
            )
        for name, shape in shapes.items():
            entry = self.entries.get(self.aliases.get(name, name))
            if entry is None:
                raise WeightMismatchError(f"{name} {list(shape)}: the generator's model has no such tensor")
            if tuple(shape) != entry.shape:
                raise WeightMismatchError(
                    f"{name}: the update's shape is {list(shape)}, the generator's {list(entry.shape)}"
                )

    def wait_for_copies(self) -> None:
        """Until copies started by the calling thread are done: sources may be freed or reused from here on."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def read(self, name: str, of: Callable[[str], torch.Tensor] | None = None) -> torch.Tensor:
        """The HF tensor ``name`` as the model holds it now: a view of the live parameter where that is possible.

        ``of`` gives other tensors, by parameter name, to be read instead.
        """
        entry = self.entries[self.aliases.get(name, name)]
        held = self.parameters.__getitem__ if of is None else of
        with torch.inference_mode():
            if len(entry.pieces) == 1:
                (piece,) = entry.pieces
                target = piece.within(held(piece.parameter))
                if piece.shape == entry.shape and target.is_contiguous():
                    return target
            full = torch.empty(entry.shape, dtype=entry.dtype, device=self.device)
            for piece in entry.pieces:
                piece.of(full).copy_(piece.within(held(piece.parameter)))
            return full

    def holds(self, name: str, tensor: torch.Tensor, of: Callable[[str], torch.Tensor] | None = None) -> bool:
        """Whether every part that the model holds of the HF tensor ``name`` equals ``tensor``'s, bit by bit.

        On a tensor-parallel rank those are its slices, so that :meth:`read` has no whole tensor to return. ``of`` as
        there.
        """
        entry = self.entries[self.aliases.get(name, name)]
        held = self.parameters.__getitem__ if of is None else of
        source = tensor.to(entry.dtype).contiguous()
        with torch.inference_mode():
            return all(
                same_bits(piece.within(held(piece.parameter)), piece.of(source).to(self.device))
                for piece in entry.pieces
            )

    @property
    def nbytes(self) -> int:
        """Bytes copied by one swap."""
        return sum(piece.numel * entry.dtype.itemsize for entry in self.entries.values() for piece in entry.pieces)


class Place:
    """Memory for one parameter that takes version after version: its views are made once, since that costs as much as
    the copies of small tensors.

    Args:
        memory: laid out as the live parameter was at recording.
    """

    def __init__(self, plan: WeightPlan, parameter: str, memory: torch.Tensor) -> None:
        self.memory = memory
        self._held: dict[str, tuple[torch.dtype, tuple[int, ...], memoryview]] = {}
        """Tensors that lie here in one run of bytes, where the model looks for them, by HF name; on the CPU."""
        held_at: dict[str, int] = {}
        for name in plan.completed_by[parameter] if memory.device.type == "cpu" else ():
            entry = plan.entries[name]
            if len(entry.pieces) == 1 and entry.pieces[0].shape == entry.shape:
                held = entry.pieces[0].within(memory)
                if held.is_contiguous():
                    self._held[name], held_at[name] = (held.dtype, entry.shape, tensor_bytes(held)), held.data_ptr()
        self._copies = [
            (name, None if piece.covers(plan.entries[name].shape) else piece, piece.within(memory))
            for name, piece in plan.writes[parameter]
        ]
        self._addresses = [address(target) for _, _, target in self._copies]
        self._in_place = {
            name
            for name, piece, target in self._copies
            if piece is None and target.is_contiguous() and held_at.get(name) == target.data_ptr()
        }
        """Tensors that are copied in one piece to where they are held."""
        self._digested: dict[str, DigestedCopy] = {}
        self._digests: dict[str, str] = {}

    def write(self, tensors: Mapping[str, torch.Tensor], digests: bool = False) -> None:
        """Copy what a version (HF name -> full tensor) holds for the parameter; on a GPU copies are only started.

        With ``digests`` what is copied in one piece to where it is held is digested on the way, for :meth:`digest`.
        """
        self._digests.clear()
        with torch.no_grad():
            for (name, piece, target), to in zip(self._copies, self._addresses, strict=True):
                if piece is None and (pulled := in_parts(tensors, name)) is not None:
                    pulled.copy_into(name, target)
                    continue
                if digests and name in self._in_place:
                    source, ready = arriving(tensors, name)
                    if name not in self._digested:
                        self._digested[name] = DigestedCopy(target, source.shape, 0, number_of_blocks(target.nbytes))
                    blocks = self._digested[name](source, ready)
                    self._digests[name] = digest_of_blocks(target.dtype, source.shape, blocks)
                else:
                    source = tensors[name].contiguous()
                    part = source if piece is None else piece.of(source)
                    if to and part.dtype == target.dtype and part.shape == target.shape and (begins := address(part)):
                        ctypes.memmove(to, begins, part.nbytes)  # which writes past the caches what is too large
                    else:
                        target.copy_(part, non_blocking=True)

    def digest(self, name: str) -> str | None:
        """Of an HF tensor as it lies here, read where the model looks for it; None where it must be assembled."""
        known, held = self._digests.get(name), self._held.get(name)
        return known or (None if held is None else bytes_digest(*held))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype hold the same, bit by bit: NaN too, which equals nothing."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.dtype.itemsize]
    return torch.equal(one.view(bits), other.view(bits))


def address(tensor: torch.Tensor) -> int:
    """Where a tensor begins in memory; 0 where it does not lie in one run on the CPU."""
    return tensor.data_ptr() if tensor.device.type == "cpu" and tensor.is_contiguous() else 0


def in_parts(tensors: Mapping[str, torch.Tensor], name: str) -> Pulled | None:
    """``tensors`` where they are pulled ones and ``name`` lies in several parts, better copied than put together."""
    return tensors if isinstance(tensors, Pulled) and not tensors.lies_whole(name) else None


def arriving(tensors: Mapping[str, torch.Tensor], name: str) -> tuple[torch.Tensor, Callable[[int], None]]:
    """A contiguous tensor, and what waits until so many of its first elements can be read: see ``Pulled.arriving``."""
    return tensors.arriving(name) if isinstance(tensors, Pulled) else (tensors[name].contiguous(), nothing)


def build_plan(model: torch.nn.Module, model_path: str | Path, whole: bool = True) -> WeightPlan:
    """The weight plan of a vLLM ``model`` that was just loaded from ``model_path``, proved by reading it backwards.

    Args:
        whole: False on a tensor-parallel rank, which holds parts of the tensors: they are compared where it has them.
    Raises:
        WeightMismatchError: what the plan reads back is not what the checkpoint holds (a layout of this model, device
            or vLLM release that in-place copies would not serve).
    """
    parameters = dict(model.named_parameters())
    aliases = {}
    embedding, head = parameters.get("model.embed_tokens.weight"), getattr(model, "lm_head", None)
    if embedding is not None and getattr(head, "weight", None) is embedding:
        aliases["lm_head.weight"] = "model.embed_tokens.weight"
    plan = WeightPlan.record(model.load_weights, parameters, checkpoint.layout(model_path), aliases)
    for name, tensor in checkpoint.tensors(model_path):
        if name not in plan.entries:
            continue
        tensor = tensor.to(plan.entries[name].dtype).to(plan.device)
        if not (same_bits(plan.read(name), tensor) if whole else plan.holds(name, tensor)):
            raise WeightMismatchError(
                f"{name}: the live parameters do not hold the checkpoint's values as loaded, so weights of this model "
                "cannot be replaced in place here"
            )
    return plan


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _CopyRecorder(TorchDispatchMode):
    """Notes copies from one source tensor into live parameters instead of carrying them out."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.live = {_storage(parameter): name for name, parameter in parameters.items()}
        self.offsets = {name: parameter.storage_offset() for name, parameter in parameters.items()}
        self.written: dict[int, int] = dict.fromkeys(self.live, 0)
        """Storage -> elements that a copy or a fill of padding would set."""
        self.pieces: list[Piece] = []
        self.source: torch.Tensor | None = None

    def recording(self, source: torch.Tensor) -> _CopyRecorder:
        self.source, self.pieces = source, []
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func._schema.is_mutable or not isinstance(args[0], torch.Tensor) or _storage(args[0]) not in self.live:
            return func(*args, **kwargs)
        target = args[0]
        if func is torch.ops.aten.copy_.default:
            part = args[1]
            assert self.source is not None
            if _storage(part) != _storage(self.source) or part.shape != target.shape or part.dtype != self.source.dtype:
                raise WeightMismatchError("the model's loader transforms it before the copy, which cannot be replayed")
            name = self.live[_storage(target)]
            shape, offset = tuple(target.shape), target.storage_offset() - self.offsets[name]
            self.pieces.append(
                Piece(name, shape, tuple(target.stride()), offset, tuple(part.stride()), part.storage_offset())
            )
        elif func not in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):  # fills pad the vocabulary
            raise WeightMismatchError(f"the model's loader changes a parameter by {func}, which cannot be replayed")
        self.written[_storage(target)] += target.numel()
        return target

    def check_covered(self, parameters: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in parameters.items():
            written = self.written[_storage(parameter)]
            if written != parameter.numel():
                raise WeightMismatchError(
                    f"parameter {name} {list(parameter.shape)}: the checkpoint's tensors set {written} of its "
                    f"{parameter.numel()} elements"
                )
