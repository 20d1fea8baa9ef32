"""Everything private to vLLM 0.32.0 that the policy service touches.

1. ``keep_parameters_live``: on CPU vLLM packs linear weights (oneDNN) and stacked experts at load time. Then parameters
   are empty or permuted, and a later load is refused half-way (linear) or silently without effect (tied output layer,
   experts). With the patches the forward pass reads the very parameters that ``load_weights`` fills, so that in-place
   copies are new weights. Needed until vLLM can update packed weights;
   ``tests/policy/test_engine.py::test_swapped_logprobs_equal_transformers`` covers it.
2. ``model_of``: the model object inside an in-process engine.
3. ``queued_requests`` and ``computed_tokens``: the scheduler's view of a request. vLLM does not tell when it has
   preempted one, and which version's keys and values it has afterwards depends on that.
   ``tests/policy/test_update_modes.py::test_preempted_requests_keep_their_promises`` covers it.
4. ``allow_seeds_in_split_prefills``: a prefill that is split over several passes samples a token after each part, and
   vLLM takes a seeded request's draw for it back in a way that CPU generators lack, which ends the engine. With the
   patch nothing is drawn. ``tests/policy/test_update_modes.py::test_seeds_in_split_prefills`` covers it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from vllm import LLMEngine

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
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def build_engine(live_parameters: bool = True, **engine_args: Any) -> LLMEngine:
    """An in-process engine which schedules and executes one forward pass per ``step()``.

    Asynchronous scheduling is off: it would start the next pass before the last one's tokens are known, and a swap
    between two steps would then mislabel tokens.
    """
    prepare_environment()
    from vllm import EngineArgs, LLMEngine
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    if on_cpu:
        allow_seeds_in_split_prefills()
        if live_parameters:
            keep_parameters_live()
    if engine_args.get("enforce_eager") is None:
        engine_args["enforce_eager"] = on_cpu
    if not on_cpu:
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


def keep_parameters_live() -> None:
    """Patch vLLM's CPU layers, before an engine is built, so that they compute with their parameters as loaded."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    def use_parameter(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = live_linear

    utils.dispatch_cpu_unquantized_gemm = use_parameter
    CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: None
    CPUUnquantizedExperts.apply = _apply_live_experts


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


def live_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``functional.linear``, computed as (W x^T)^T for the few rows of a decoding step.

    On AVX2 in float32 that is 2.2 times as fast at 4 rows, 1.4 times at 16, 1.1 times at 64, and slower from 256 on.

    Args:
        x: [T, I]. weight: [O, I]. bias: [O].
    """
    if bias is None and x.dim() == 2 and 2 <= x.shape[0] <= 64 and x.dtype == torch.float32:
        return torch.mm(weight, x.t()).t().contiguous()
    return functional.linear(x, weight, bias)


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
