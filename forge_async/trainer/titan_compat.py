"""Every seam to torchtitan 0.3.0: patches, replaced modules and private symbols. Import torchtitan only after this.

What is here and why (each is covered by a test of ``tests/trainer/test_model.py`` or ``test_layouts.py``):

- ``torch._utils._get_available_device_type`` is made to answer ``"cpu"`` where there is no accelerator; torchtitan's
  module-level device lookup fails on ``None`` there.
- :class:`SegmentAttention` replaces flex and varlen attention, which do not train on CPU; :class:`TreeFlexAttention`
  replaces torchtitan's flex attention, which is compiled for rows of one length.
- :class:`LogprobHead` replaces the output layer, so that full logits are never kept and the projection still runs
  inside the FSDP-managed module).
- :class:`PreciseGroupedExperts` and :class:`PreciseGate` replace the MoE parts that cast to bfloat16 or rely on a
  float32 autocast, which CPU does not have.
- :func:`keep_tied` ties embeddings between tensor parallelism and FSDP.
- gloo has no pre-multiplied sum: FSDP modules are told to use plain sums (:func:`use_plain_sums`).
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch._utils
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

if not torch.cuda.is_available():
    torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CommConfig, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as distributed_utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import VarlenAttention, create_varlen_metadata_for_document
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module
from torchtitan.tools import utils as titan_utils

from forge_async.trainer.logprobs import Predictions, VocabularySplit, at_least_float32, selected_logprobs
from forge_async.trainer.segments import AttentionLayout, segment_attention

__all__ = [
    "CommConfig",
    "CompileConfig",
    "ComplexRoPE",
    "CosSinRoPE",
    "DebugConfig",
    "Embedding",
    "GroupedExperts",
    "LRSchedulersContainer",
    "Linear",
    "Llama3Model",
    "Llama3StateDictAdapter",
    "Llama3TransformerBlock",
    "LogprobHead",
    "ModelSpec",
    "ParallelDims",
    "ParallelismConfig",
    "PreciseGate",
    "PreciseGroupedExperts",
    "Qwen3Model",
    "Qwen3StateDictAdapter",
    "Qwen3TransformerBlock",
    "RMSNorm",
    "SegmentAttention",
    "TrainingConfig",
    "TreeFlexAttention",
    "VarlenAttention",
    "checkpointing",
    "compile_layers",
    "create_varlen_metadata_for_document",
    "default_adamw",
    "distributed_utils",
    "keep_tied",
    "make_ffn_config",
    "make_gqa_config",
    "make_moe_config",
    "make_routed_experts_config",
    "make_router_config",
    "parallelize_llama",
    "parallelize_qwen3",
    "plain_name",
    "quiet_titan",
    "replace_config",
    "skip_param_init",
    "titan_utils",
    "tree_block_mask",
    "use_plain_sums",
]


class SegmentAttention(Module):
    """Inner attention over the segments of a packed row; ``attention_masks`` is an :class:`AttentionLayout`.

    The argument names must be ``q_BLNH``, ``k_BLNH``, ``v_BLNH``: torchtitan's sharding configs key on them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    @torch.compiler.disable(reason="every row has a layout of its own")
    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: AttentionLayout,
        scale: float | None = None,
        enable_gqa: bool = False,
        **unused: Any,
    ) -> torch.Tensor:
        return segment_attention(q_BLNH, k_BLNH, v_BLNH, attention_masks, scale)


class TreeFlexAttention(Module):
    """FlexAttention over the segments of a packed row; ``attention_masks`` is a :class:`BlockMask`.

    torchtitan's own compiles with autotuning, for one shape: rows differ in length. Where there is no compiler for it
    (on a CPU, which has no backward pass of it either) it computes all scores.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    _compiled: ClassVar[Any] = torch.compile(flex_attention, dynamic=True)

    def __init__(self, config: Config) -> None:
        super().__init__()

    @torch.compiler.disable(recursive=False, reason="compiled on its own")
    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: BlockMask,
        scale: float | None = None,
        enable_gqa: bool = False,
        **unused: Any,
    ) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        attend = flex_attention if q.device.type == "cpu" else TreeFlexAttention._compiled
        return attend(q, k, v, block_mask=attention_masks, scale=scale, enable_gqa=enable_gqa).transpose(1, 2)


def tree_block_mask(until_T: torch.Tensor) -> BlockMask:
    """The mask by which key k is seen by queries k to before ``until_T[k]``; see ``segments.seen_until``."""

    def seen(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < until_T[key])

    count = len(until_T)
    return create_block_mask(seen, None, None, count, count, device=until_T.device)


class LogprobHead(Linear):
    """Output projection that returns the log-probs and entropies a row asks for instead of its logits.

    While ``predictions`` is set, ``forward`` takes hidden states [1, T, D] and returns float32 [2, K]: log-probs and
    entropies. Otherwise it returns logits, in float32 also of bfloat16. With tensor parallelism each rank holds some
    rows of the vocabulary, hidden states come in whole, and every rank returns the same plain tensor.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.predictions: Predictions | None = None

    def parallelize(self, parallel_dims: Any) -> None:
        """Shard as declared, but leave the output alone: torchtitan takes it for a slice of the logits."""
        declared = getattr(self, "_sharding_config", None)
        if declared is not None:
            undeclared = dataclasses.replace(declared, out_src_shardings=None, out_dst_shardings=None)
            setattr(self, "_sharding_config", undeclared)  # noqa: B010 (torchtitan's type is not importable here)
        super().parallelize(parallel_dims)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.predictions is None:
            return F.linear(at_least_float32(input), at_least_float32(self.weight))
        hidden, weight, split = input, self.weight, None
        if isinstance(weight, DTensor):
            mesh = weight.device_mesh
            _, (start, _) = compute_local_shape_and_global_offset(weight.shape, mesh, weight.placements)
            split = VocabularySplit(mesh.get_group("tp"), start)
            hidden = input.to_local(grad_placements=[Partial()])
            weight = weight.to_local()
        hidden_KD = hidden[0].index_select(0, self.predictions.source_K)
        return selected_logprobs(hidden_KD, weight, self.predictions, split)


class PreciseGroupedExperts(GroupedExperts):
    """Grouped experts in the dtype of their input; the stock class casts everything to bfloat16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        def local(weight: torch.Tensor) -> torch.Tensor:
            plain = weight.to_local() if hasattr(weight, "to_local") else weight
            return plain.to(x_RD.dtype).transpose(-2, -1)

        offsets_E = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        gate_RF = self._grouped_mm(A=x_RD, B_t=local(self.w1_EFD), offs=offsets_E)
        up_RF = self._grouped_mm(A=x_RD, B_t=local(self.w3_EFD), offs=offsets_E)
        return self._grouped_mm(A=F.silu(gate_RF) * up_RF, B_t=local(self.w2_EDF), offs=offsets_E)


class PreciseGate(Linear):
    """Router gate in float32 without autocast, which knows no float32 target on CPU."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        with torch.autocast(device_type=input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float(), bias)


def replace_config(config: Any, new_class: Any) -> Any:
    """The same settings as ``config`` under ``new_class.Config``."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
    return new_class.Config(**fields)


def keep_tied(model: Any) -> None:
    """Tied embeddings stay one parameter when tensor parallelism splits them.

    torchtitan ties them again only after FSDP has taken them for two; of an uneven split each half of FSDP then pads a
    copy of its own, and only one of them is trained.
    """
    if not model.enable_weight_tying:
        return
    parallelize = model.parallelize

    def parallelize_and_tie(parallel_dims: Any) -> None:
        parallelize(parallel_dims)
        model.tok_embeddings.weight = model.lm_head.weight

    model.parallelize = parallelize_and_tie


def checkpointing(kind: str) -> Any:
    """torchtitan's config of ``trainer.activation_checkpointing``; None for ``none``. Nothing is drawn at random."""
    policies = {"selective": SelectiveAC, "full": FullAC}
    return policies[kind].Config(preserve_rng_state=False) if kind in policies else None


def compile_layers(model: Any) -> None:
    """Compile each transformer layer but its attention, for rows of any length; what is called first compiles.

    torchtitan's own wants each layer as one graph, and one for every length.
    """
    for layer in model.layers.values():
        layer.compile(dynamic=True)


def plain_name(name: str) -> str:
    """A parameter's name without what checkpointing puts into it."""
    return name.replace("_checkpoint_wrapped_module.", "")


def use_plain_sums(model: nn.Module) -> None:
    """Make FSDP's gradient reduction a plain sum over ranks; gloo has no other."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def quiet_titan() -> None:
    """Leave progress messages, and warnings about what is intended here, out of the console."""
    logging.getLogger().setLevel(max(logging.getLogger().level, logging.WARNING))
    # Norms and exports over two mesh dimensions are gathered one dimension at a time, a few times per step.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # The router asks for float32 autocast, which CPU lacks: PreciseGate does without.
    warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")
    # A trainer of one process has no process group, and saves alone on purpose.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    # Initial values drawn on split parameters are replaced by the model's own.
    warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support")
