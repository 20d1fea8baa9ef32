"""Everything private to vLLM 0.32.0 that the policy service touches.

1. ``keep_layers_exchangeable``: on CPU vLLM packs linear weights (oneDNN) and stacked experts at load, for good. Then
   parameters are empty or permuted, and a later load is refused half-way (linear) or silently without effect (tied
   output layer, experts). With the patches every layer computes with its parameter as loaded, or with a packed form
   that can be exchanged between two forward passes, and read back bit by bit. Needed until vLLM can update packed
   weights; ``tests/policy/test_engine.py::test_swapped_logprobs_equal_transformers`` covers it.
2. ``model_of``: the model object inside an in-process engine.
3. ``queued_requests`` and ``computed_tokens``: the scheduler's view of a request. vLLM does not tell when it has
   preempted one, and which version's keys and values it has afterwards depends on that.
   ``tests/policy/test_update_modes.py::test_preempted_requests_keep_their_promises`` covers it.
4. ``allow_seeds_in_split_prefills``: a prefill that is split over several passes samples a token after each part, and
   vLLM takes a seeded request's draw for it back in a way that CPU generators lack, which ends the engine. With the
   patch nothing is drawn. ``tests/policy/test_update_modes.py::test_seeds_in_split_prefills`` covers it.
5. ``mask_params`` and ``kept_ids``: the tokens that the sampler kept. The GPU model runner records them
   (``return_sampling_mask``), the CPU one does not: there the likeliest log-probs of the processed distribution are
   asked for, and those of -inf dropped. Needed until the CPU runner records masks.
   ``tests/policy/test_engine.py::test_the_recorded_mask_is_the_set_that_was_kept`` covers it.
6. ``prepare_environment``: on CPU vLLM warns at its import, whatever its log level, that Triton has no CPU backend;
   nothing here asks for one. ``tests/policy/test_quiet.py::test_vllms_notice_of_triton_is_left_out`` covers it.
7. ``reduce_without_segments``: on CPUs with AVX-512 the ranks of a replica reduce over shared memory of a name that all
   replicas of a host have in common with the external launcher. A second replica, or one that takes the place of a
   killed one, then cannot start (``create shm in SHMManager failed. errno: 17``), and a kill leaves segments behind.
   With the patch they reduce by gloo, as on other CPUs.
   ``tests/integration/test_exactness.py::test_when_a_rank_dies_the_replica_is_replaced`` covers it.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from forge_async.errors import require
from forge_async.policy.config import SamplingConfig

if TYPE_CHECKING:
    from vllm import CompletionOutput, LLMEngine

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core lives in this process: weights are swapped in place
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are pinned by whoever started the process
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Set before vLLM is imported, unless already set."""


def prepare_environment() -> None:
    """Variables and log filters; before vLLM is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm.triton_utils.importing").addFilter(_is_no_notice_of_triton)


def _is_no_notice_of_triton(record: logging.LogRecord) -> bool:
    return not record.msg.startswith("Triton is installed, but doesn't include CPU backend")


def build_engine(exchangeable: bool = True, **engine_args: Any) -> LLMEngine:
    """An in-process engine which schedules and executes one forward pass per ``step()``.

    Asynchronous scheduling is off: it would start the next pass before the last one's tokens are known, and a swap
    between two steps would then mislabel tokens. With ``exchangeable`` off, layers are as vLLM itself sets them up.
    """
    prepare_environment()
    from vllm import EngineArgs, LLMEngine
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    if on_cpu:
        allow_seeds_in_split_prefills()
        reduce_without_segments()
        if exchangeable:
            keep_layers_exchangeable()
    if engine_args.get("enforce_eager") is None:
        engine_args["enforce_eager"] = on_cpu
    if on_cpu:
        engine_args["max_logprobs"] = -1  # as many as a mask needs
    else:
        engine_args.setdefault("moe_backend", "triton")  # keeps experts in the order load_weights writes them
    return LLMEngine.from_engine_args(
        EngineArgs(
            async_scheduling=False,
            enable_prefix_caching=True,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            logprobs_mode="processed_logprobs",  # under the distribution that is sampled from
            **engine_args,
        )
    )


SMALL_VOCABULARY = 1024
"""Up to this size every id's log-prob can be told for every token."""

TIES = 8
"""Log-probs asked for beyond top_k: the CPU sampler keeps all tokens that tie with the k-th likeliest. Beyond these
a mask is known to be incomplete."""


def has_native_mask() -> bool:
    """Whether vLLM's model runner here records sampling masks itself."""
    prepare_environment()
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()


def mask_params(sampling: SamplingConfig, vocabulary: int, native: bool) -> dict[str, int]:
    """``top_k`` and ``logprobs`` of a request, such that the kept tokens are told where they are to be recorded.

    Raises:
        ConfigError: there is no way with these settings.
    """
    recorded = sampling.records_mask
    require(
        not recorded or sampling.top_k > 0 or (vocabulary <= SMALL_VOCABULARY and not native),
        "sampling.top_k",
        sampling.top_k,
        f"above 0 (with {', '.join(f'{name} {value:g}' for name, value in sampling.restricting.items())} and a "
        f"vocabulary of {vocabulary})",
        "Any number of tokens may be kept without it, too many to record. Set e.g. policy.sampling.top_k=100, or "
        "policy.sampling.sampling_mask=false, which trains with a bias.",
    )
    if native:  # such an engine wants top_k of every request; the sampled token's log-prob is enough
        return {"top_k": sampling.top_k or vocabulary, "logprobs": 0}
    wanted = (sampling.top_k + TIES if sampling.top_k else vocabulary) if recorded else 0
    return {"top_k": sampling.top_k, "logprobs": min(wanted, vocabulary)}


def kept_ids(sample: CompletionOutput) -> tuple[list[np.ndarray], list[bool]]:
    """For each new token the ids that the sampler kept, int32, and whether these are all of them.

    They are incomplete where more tokens tie with the k-th likeliest than log-probs were asked for: their
    probabilities do not sum to 1 then.
    """
    if sample.sampling_mask is not None:
        kept = [np.asarray(ids, dtype=np.int32) for ids in sample.sampling_mask.token_ids]
        return kept, [True] * len(kept)
    told: Any = sample.logprobs
    kept, complete = [], []
    for start, end in zip(told.start_indices, told.end_indices, strict=True):
        ids = np.array(told.token_ids[start:end], dtype=np.int32)
        logprobs = np.array(told.logprobs[start:end])
        use = np.isfinite(logprobs)
        use[1:] &= ids[1:] != ids[0]  # the sampled token comes first, and again among the likeliest
        kept.append(ids[use])
        complete.append(abs(float(np.exp(logprobs[use]).sum()) - 1) < 1e-3)
    return kept, complete


def model_of(engine: LLMEngine) -> torch.nn.Module:
    return engine.model_executor.driver_worker.get_model()  # type: ignore[attr-defined]


def _scheduler(engine: LLMEngine) -> Any:
    return engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]


def queued_requests(engine: LLMEngine) -> set[str]:
    """Internal ids of the requests that have no keys and values: not scheduled yet, or preempted."""
    return {request.request_id for request in _scheduler(engine).waiting}


def computed_tokens(engine: LLMEngine, internal_id: str) -> int:
    """Tokens of a request whose keys and values are in the cache."""
    return int(_scheduler(engine).requests[internal_id].num_computed_tokens)


def keep_layers_exchangeable() -> None:
    """Patch vLLM's CPU layers, before an engine is built: see the module's docstring. They start as loaded."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    def exchangeable(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = CpuLinear()

    def keep(self: Any, layer: torch.nn.Module) -> None:
        self.packed, self._use_zentorch = False, False

    utils.dispatch_cpu_unquantized_gemm = exchangeable
    CPUUnquantizedExperts.process_weights_after_loading = keep
    if not hasattr(CPUUnquantizedExperts, "apply_packed"):
        CPUUnquantizedExperts.apply_packed = CPUUnquantizedExperts.apply
        CPUUnquantizedExperts.apply = _apply_experts


class CpuLinear:
    """A layer's product with its weight: the parameter as loaded, or a packed form of it."""

    __slots__ = ("packed",)

    def __init__(self) -> None:
        self.packed: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, I], weight [O, I] (not looked at where packed), bias [O] -> [T, O]."""
        if self.packed is None:
            return live_linear(x, weight, bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")


ROWS_PACKED_FOR = 32
"""oneDNN chooses the packed layout for this many rows; others work as well."""


def pack(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` [O, I] in oneDNN's blocks, in new memory."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_PACKED_FOR)


class PackedLinear:
    """How one linear layer takes packed weights: oneDNN's blocked layout by torch's own operators.

    These are as fast as vLLM's (the same kernels), and unlike them can be read back and called from several threads.
    """

    def __init__(self, layer: torch.nn.Module, shared: bool) -> None:
        self.linear: CpuLinear = layer.cpu_linear  # type: ignore[assignment]
        self.shared = shared
        """The parameter is also looked up row by row (tied embeddings), so that it must stay beside the packed form."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """``weight`` [O, I] in oneDNN's blocks, in new memory."""
        return pack(weight)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """The weight that ``packed`` was made from, bit by bit."""
        return packed.to_dense()

    def install(self, parameter: torch.Tensor, dense: torch.Tensor | None, packed: torch.Tensor | None) -> None:
        """Make the weights given the layer's own; ``dense`` may be None where packed ones serve alone."""
        parameter.data = dense if dense is not None else torch.empty(0, dtype=parameter.dtype)
        self.linear.packed = packed

    def packed(self, parameter: torch.Tensor) -> torch.Tensor:
        """What is installed, while that is packed."""
        assert self.linear.packed is not None
        return self.linear.packed


class PackedExperts:
    """How stacked experts take packed weights: vLLM's own layout, which is a permutation within each expert."""

    shared = False

    def __init__(self, experts: Any, parameter: torch.Tensor) -> None:
        self.experts = experts
        self.shape = tuple(parameter.shape)
        """[E, 2 I, H] (gate above up), or [E, H, I]."""
        self._places: torch.Tensor | None = None
        self._installed: torch.Tensor = parameter.data

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        from vllm._custom_ops import cpu_prepack_moe_weight

        return cpu_prepack_moe_weight(weight, self.experts.isa)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """The weight that ``packed`` was made from, bit by bit."""
        experts = self.shape[0]
        if self._places is None:  # pack the index of each element, in digits which every dtype holds exactly
            index = torch.arange(packed[0].numel())
            digits = [
                self.pack((index >> shift & 255).to(packed.dtype).view(1, *self.shape[1:])).long().reshape(-1) << shift
                for shift in (0, 8, 16, 24)
            ]
            self._places = torch.stack(digits).sum(0)
        weight = torch.empty(experts, packed[0].numel(), dtype=packed.dtype)
        weight[:, self._places] = packed.reshape(experts, -1)
        return weight.view(self.shape)

    def install(self, parameter: torch.Tensor, dense: torch.Tensor | None, packed: torch.Tensor | None) -> None:
        """Make the weights given the layer's own."""
        data = packed if packed is not None else dense
        assert data is not None
        parameter.data = self._installed = data
        self.experts.packed = packed is not None

    def packed(self, parameter: torch.Tensor) -> torch.Tensor:
        """What is installed, while that is packed."""
        assert parameter.data_ptr() == self._installed.data_ptr()
        return self._installed


def packed_layers(model: torch.nn.Module) -> dict[str, PackedLinear | PackedExperts]:
    """Parameter name -> how its layer takes packed weights, of a model built with exchangeable layers on CPU."""
    from vllm.model_executor.layers.linear import LinearBase

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    head: Any = getattr(model, "lm_head", None)
    found: dict[str, PackedLinear | PackedExperts] = {}
    layers: list[Any] = list(model.modules())
    for layer in layers:
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if experts is not None and hasattr(layer, "w13_weight") and not _pads(experts):
            for parameter in (layer.w13_weight, layer.w2_weight):
                found[names[id(parameter)]] = PackedExperts(experts, parameter)
        elif isinstance(getattr(layer, "cpu_linear", None), CpuLinear) and (
            isinstance(layer, LinearBase) or layer is head
        ):
            name = names[id(layer.weight)]
            found[name] = PackedLinear(layer, shared=layer is head and name != "lm_head.weight")
    return found


def _pads(experts: Any) -> bool:
    """Whether vLLM's kernel needs wider experts than the model has; those are left as loaded."""
    return experts._padded_intermediate_size(experts.moe_config) != experts.moe_config.intermediate_size_per_partition


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this CPU's oneDNN packs matrices of ``dtype``; bfloat16 needs AVX-512 or AMX, for instance."""
    weight = torch.eye(64, dtype=dtype)
    try:
        packed = pack(weight)
        product = torch.ops.mkldnn._linear_pointwise(weight, packed, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return False
    return torch.equal(packed.to_dense(), weight) and torch.equal(product, weight)


def allow_seeds_in_split_prefills() -> None:
    """Patch vLLM's CPU model runner: rows whose sampled token is dropped have no generator while tokens are sampled."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        dropped = self.discard_request_mask.np[: self.input_batch.num_reqs]
        self.generators_set_aside = {row: generators.pop(row) for row in list(generators) if dropped[row]}
        return GPUModelRunner._sample(self, *args, **kwargs)

    def bookkeeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = GPUModelRunner._bookkeeping_sync(self, *args, **kwargs)
        self.input_batch.generators.update(self.generators_set_aside)
        return result

    CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync = sample, bookkeeping


def reduce_without_segments() -> None:
    """Patch vLLM's CPU communicator: ranks reduce by torch.distributed, not over named shared memory."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def live_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``functional.linear``, computed as (W x^T)^T for the few rows of a decoding step.

    On AVX2 in float32 that is 2.2 times as fast at 4 rows, 1.4 times at 16, 1.1 times at 64, and slower from 256 on.

    Args:
        x: [T, I]. weight: [O, I]. bias: [O].
    """
    if bias is None and x.dim() == 2 and 2 <= x.shape[0] <= 64 and x.dtype == torch.float32:
        return torch.mm(weight, x.t()).t().contiguous()
    return functional.linear(x, weight, bias)


def _apply_experts(self: Any, *args: Any, **kwargs: Any) -> None:
    """Of vLLM's class of experts: by its own kernel where the weights are packed for it."""
    if self.packed:
        self.apply_packed(*args, **kwargs)
    else:
        _apply_live_experts(self, *args, **kwargs)


def _apply_live_experts(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    *unused: Any,
    apply_router_weight_on_input: bool = False,
    **also_unused: Any,
) -> None:
    """Mixture of experts over unpacked parameters: gated SiLU experts, summed with the router's weights.

    Args:
        output: [T, H], written.
        hidden_states: [T, H].
        w1: [E, 2 I, H], gate above up. w2: [E, H, I].
        topk_weights: float32 [T, K]. topk_ids: int32 [T, K].
    """
    if activation.value != "silu" or apply_router_weight_on_input or self.w1_bias is not None:
        raise NotImplementedError(f"live experts on CPU: activation {activation.value}, or expert biases")
    output.zero_()
    for expert in topk_ids.unique().tolist():
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(hidden_states[token], w1[expert]).chunk(2, dim=-1)
        out = functional.linear(functional.silu(gate) * up, w2[expert])
        output.index_add_(0, token, out * topk_weights[token, slot].unsqueeze(-1).to(out.dtype))
