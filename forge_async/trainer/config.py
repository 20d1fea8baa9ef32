"""Settings of the trainer: precision, parallelism, optimizer, packing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from forge_async.errors import require
from forge_async.trainer.loss_config import LossConfig

DTYPES = ("auto", "float32", "bfloat16")
DECAYS = ("constant", "linear", "cosine")
CHECKPOINTING = ("none", "selective", "full")
ATTENTIONS = ("auto", "segments", "flex", "varlen")


@dataclass(frozen=True)
class ParallelismConfig:
    """How the model is spread over ``trainer.procs`` processes."""

    dp_shard: int = -1
    """Processes over which parameters, gradients and optimizer state are sharded (FSDP2); -1: all that are left."""
    dp_replicate: int = 1
    """Copies of the sharded model (HSDP)."""
    tp: int = 1
    """Processes over which each layer's matrices and activations are split (tensor and sequence parallel); divides the
    model's attention heads and key-value heads."""
    ep: int = 1
    """Processes over which the experts of a mixture are spread. It takes its processes from dp_shard and tp, whose
    product it divides, and divides the number of experts."""

    def __post_init__(self) -> None:
        require(self.dp_shard == -1 or self.dp_shard >= 1, "dp_shard", self.dp_shard, "-1 (all) or at least 1")
        for name in ("dp_replicate", "tp", "ep"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")

    def shards(self, procs: int) -> int:
        """``dp_shard`` with -1 resolved; 0 where ``procs`` does not fit."""
        if self.dp_shard >= 1:
            return self.dp_shard if self.dp_shard * self.dp_replicate * self.tp == procs else 0
        return 0 if procs % (self.dp_replicate * self.tp) else procs // (self.dp_replicate * self.tp)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning rate schedule."""

    lr: float = 1e-5
    """Peak learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    warmup_steps: int = 0
    """Steps over which the rate rises linearly to ``lr``."""
    decay: str = "constant"
    """Shape after the warm-up: constant, linear or cosine, over the run's remaining steps."""
    min_lr_factor: float = 0.0
    """The decay ends at ``lr`` times this."""

    def __post_init__(self) -> None:
        require(self.lr > 0 and math.isfinite(self.lr), "lr", self.lr, "above 0")
        valid = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(valid, "betas", list(self.betas), "two numbers, each at least 0 and below 1")
        require(0 < self.eps < math.inf, "eps", self.eps, "above 0, and finite")
        require(0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, "0 or more, and finite")
        require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "0 or more")
        require(self.decay in DECAYS, "decay", self.decay, f"one of {', '.join(DECAYS)}")
        require(0 <= self.min_lr_factor <= 1, "min_lr_factor", self.min_lr_factor, "between 0 and 1")

    def factor(self, step: int, total_steps: int) -> float:
        """What ``lr`` is multiplied by at ``step`` (0 is the first); steps past the end keep the last value."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps))
        left = 1 - progress if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.min_lr_factor + (1 - self.min_lr_factor) * left


@dataclass(frozen=True)
class TrainerConfig:
    """The torchtitan trainer."""

    procs: int = 1
    """Processes, laid out by ``parallelism``: by default all of them shard the model by FSDP2."""
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    micro_batch_tokens: int = 4096
    """Tokens of a packed row, the unit of one forward and backward pass; bounds activation memory, not the result."""
    max_sequence_tokens: int = 8192
    """Longest trainable sequence, and the size of the rotary table (the model's own limit where that is less)."""
    share_prompts: bool = True
    """Compute what several sequences begin with once: prompts, turns before a fork, equal first tokens. Exact, and
    cheaper the longer these are."""
    logprob_chunk: int = 256
    """Predicted tokens whose logits over the vocabulary are computed at the same time."""
    activation_checkpointing: str = "none"
    """What of the forward pass is computed again in the backward pass to save memory: ``none``; ``selective`` (all but
    attention, collectives and every second matrix product); ``full`` (each layer). No gradient changes by it."""
    compile: bool = False
    """Compile the layers by ``torch.compile``: the first steps take longer, by as much as the machine's compiler needs,
    and the others less. docs/trainer.md says where it pays."""
    dtype: str = "auto"
    """Precision of forward and backward: float32, bfloat16, or auto: bfloat16 in a run whose ``policy.dtype`` is, else
    float32. Parameters and optimizer state are float32 in all."""
    attention: str = "auto"
    """``segments``: exact on every device; ``flex``: FlexAttention, CUDA only; ``varlen``: flash attention, CUDA and
    bfloat16 only, without shared prefixes; ``auto``: flex on CUDA, segments on a CPU."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one."""

    def __post_init__(self) -> None:
        require(self.procs >= 1, "procs", self.procs, "at least 1")
        layout = self.parallelism
        shards = layout.shards(self.procs)
        if layout.dp_shard == -1:
            product = f"a multiple of dp_replicate x tp ({layout.dp_replicate} x {layout.tp})"
        else:
            product = f"dp_shard x dp_replicate x tp ({layout.dp_shard} x {layout.dp_replicate} x {layout.tp})"
        require(shards > 0, "procs", self.procs, product)
        require(
            shards * layout.tp % layout.ep == 0,
            "parallelism.ep",
            layout.ep,
            f"a divisor of dp_shard x tp ({shards} x {layout.tp})",
        )
        require(self.max_grad_norm > 0, "max_grad_norm", self.max_grad_norm, "above 0")
        require(self.micro_batch_tokens >= 1, "micro_batch_tokens", self.micro_batch_tokens, "at least 1")
        require(self.max_sequence_tokens >= 2, "max_sequence_tokens", self.max_sequence_tokens, "at least 2")
        require(self.logprob_chunk >= 1, "logprob_chunk", self.logprob_chunk, "at least 1")
        kind = self.activation_checkpointing
        require(kind in CHECKPOINTING, "activation_checkpointing", kind, f"one of {', '.join(CHECKPOINTING)}")
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        require(self.attention in ATTENTIONS, "attention", self.attention, f"one of {', '.join(ATTENTIONS)}")
        require(self.device in ("auto", "cpu", "cuda"), "device", self.device, "auto, cpu or cuda")
        flex_fits = self.attention != "flex" or self.device != "cpu"
        require(flex_fits, "attention", self.attention, "segments or auto with device cpu, which cannot train by it")
        varlen_fits = self.attention != "varlen" or (self.dtype == "bfloat16" and self.device != "cpu")
        require(varlen_fits, "attention", self.attention, "segments or auto unless dtype is bfloat16 on a CUDA device")

    @property
    def precision(self) -> str:
        """``dtype`` with ``auto`` resolved, of a trainer by itself."""
        return "float32" if self.dtype == "auto" else self.dtype

    def beside(self, policy_dtype: str) -> TrainerConfig:
        """The same with ``auto`` resolved for a run whose ``policy.dtype`` is known."""
        follows = self.dtype == "auto" and policy_dtype == "bfloat16"
        return replace(self, dtype="bfloat16" if follows else self.precision)

    def attention_on(self, device: str) -> str:
        """``attention`` with ``auto`` resolved for a kind of device."""
        if self.attention != "auto":
            return self.attention
        return "flex" if device == "cuda" else "segments"
