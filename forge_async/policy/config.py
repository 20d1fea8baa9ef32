"""What can be set about generation: the engine, the sampling of a request, and how new weights arrive."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from forge_async.errors import require
from forge_async.policy.updates import KV, MODES, RULES, UpdateRules

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class SamplingConfig:
    """How one completion is sampled. Names, meanings and defaults are those of vLLM's ``SamplingParams``.

    The order is vLLM's: min_tokens takes end tokens away, logits are divided by the temperature, then min_p, top_k and
    top_p (over what top_k has left) choose the tokens that are kept. Settings that shift single logits (penalties,
    logit_bias) do not exist here: which tokens were kept does not tell by how much, so no trainer could replay them.
    """

    temperature: float = 1.0
    """Divides the logits before the softmax; 0 is greedy decoding."""
    top_p: float = 1.0
    """Nucleus sampling: keep the likeliest tokens whose probabilities sum to this."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest one."""
    max_tokens: int = 64
    """Longest completion, tokens; it ends with finish reason ``length``."""
    min_tokens: int = 0
    """No end or stop token is sampled before this many tokens."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Token ids that end a completion, beside the model's own end tokens; the sampled id is part of the completion."""
    ignore_eos: bool = False
    """Go on past the model's end tokens (for measurements)."""
    sampling_mask: bool = True
    """Record which tokens were kept, where top_p, top_k, min_p or min_tokens leave some out, so that the trainer's
    softmax can run over the same ones. Off, the trainer's log-probs are of another distribution, and training is
    biased."""

    def __post_init__(self) -> None:
        require(0 <= self.temperature < math.inf, "temperature", self.temperature, "at least 0, and finite")
        require(
            self.temperature == 0 or self.temperature >= 0.01,
            "temperature",
            self.temperature,
            "0 (greedy) or at least 0.01",
            "Smaller values overflow the logits.",
        )
        require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        require(self.top_k >= 0, "top_k", self.top_k, "at least 0 (0 keeps every token)")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        require(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"between 0 and max_tokens ({self.max_tokens})",
        )
        require(all(i >= 0 for i in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "token ids, 0 or more")

    @property
    def restricting(self) -> dict[str, float]:
        """The settings, with their values, by which some tokens cannot be sampled."""
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_tokens": 0}
        return {name: getattr(self, name) for name, value in neutral.items() if getattr(self, name) != value}

    @property
    def records_mask(self) -> bool:
        """Whether completions come with a sampling mask. Greedy ones do not: they cannot be trained on."""
        return self.sampling_mask and self.temperature > 0 and bool(self.restricting)

    def unrestricted(self) -> SamplingConfig:
        """The same, with every token kept."""
        return replace(self, top_p=1.0, top_k=0, min_p=0.0, min_tokens=0)


@dataclass(frozen=True)
class UpdateConfig:
    """What happens to running requests when new weights arrive."""

    mode: str = "never_stop"
    """``never_stop``: weights are replaced between two forward passes and every request goes on. ``abort_resume``:
    running requests are submitted again, prompt and generated tokens, and go on with keys and values of the new
    weights. ``abort_retry``: they start over. ``drain``: they end first, and new ones wait for the new weights.
    ``blocking``: as drain, and nothing is generated from when the trainer takes a batch until its version is live."""
    kv: str = "keep"
    """What becomes of the running requests' keys and values in mode never_stop: ``keep`` goes on with those of the
    older weights, ``recompute`` computes them anew with the new weights (exact, and costs one prefill per running
    request). The other modes never mix keys and values."""
    swap: str = "auto"
    """How a new version becomes live. ``copy``: parameters are overwritten in place, between two forward passes.
    ``flip``: a second set is filled beside generation and parameters are pointed at it: a pause of milliseconds for
    twice the weights' memory; not with CUDA graphs. ``auto``: copy with CUDA graphs, else flip."""
    layers: str = "auto"
    """How CPU engines hold matrices. ``packed``: in the blocks that oneDNN's kernels read, which is faster, and dearer
    to update. ``live``: as a checkpoint does. ``auto``: whichever costs less at the measured time between updates."""
    pull_nice: int = 11
    """Added to the nice value of the thread that prepares a new version, wherever a core of the run is idle. Where all
    are busy it shares one with an engine: 11 leaves it 8% of that core, 0 leaves it half (the new version is live
    sooner, and tokens or the train step are slower meanwhile)."""
    timeout_s: float = 300.0
    """A replica that has not taken a new version within this many seconds hangs: it is killed and respawned. In the
    modes drain and blocking the requests that run must end within it."""

    def __post_init__(self) -> None:
        require(self.mode in MODES, "mode", self.mode, "one of " + ", ".join(MODES))
        require(self.kv in KV, "kv", self.kv, "one of " + ", ".join(KV))
        require(
            (self.mode, self.kv) in RULES,
            "kv",
            self.kv,
            f"'keep', its default, with mode {self.mode!r}",
            "Only never_stop has a choice about keys and values.",
        )
        require(self.swap in ("auto", "copy", "flip"), "swap", self.swap, "'auto', 'copy' or 'flip'")
        require(self.layers in ("auto", "live", "packed"), "layers", self.layers, "'auto', 'live' or 'packed'")
        require(0 <= self.pull_nice <= 19, "pull_nice", self.pull_nice, "0 to 19")
        require(self.timeout_s > 0, "timeout_s", self.timeout_s, "above 0 (seconds)")

    @property
    def rules(self) -> UpdateRules:
        return RULES[self.mode, self.kv]


@dataclass(frozen=True)
class PolicyConfig:
    """One generator replica's engine, and how many replicas there are."""

    num_replicas: int = 1
    """Engines; requests go to the least loaded."""
    tensor_parallel_size: int = 1
    """Processes of each engine, over which vLLM splits every layer; divides the model's attention heads."""
    dtype: str = "float32"
    """Of weights, activations and KV cache: float32, bfloat16 or float16. On CPUs without AVX-512 or AMX bfloat16 is
    several times slower than float32."""
    max_model_len: int = 1024
    """Longest prompt and completion together, tokens."""
    max_num_seqs: int = 64
    """Requests decoded at once; more wait in a queue."""
    max_num_batched_tokens: int = 2048
    """Tokens of one forward pass; longer prefills are split over several."""
    block_size: int = 32
    """Tokens per KV-cache block: a prefix is shared between requests in whole blocks only."""
    kv_cache_gib: float = 1.0
    """KV-cache memory per replica, GiB; its processes share it."""
    enforce_eager: bool | None = None
    """Run without compilation and CUDA graphs; None: eager on CPU, compiled on GPU."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Used for requests which bring no sampling parameters of their own."""
    update: UpdateConfig = field(default_factory=UpdateConfig)

    def __post_init__(self) -> None:
        require(self.num_replicas >= 1, "num_replicas", self.num_replicas, "at least 1")
        require(self.tensor_parallel_size >= 1, "tensor_parallel_size", self.tensor_parallel_size, "at least 1")
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        require(self.max_model_len >= 2, "max_model_len", self.max_model_len, "at least 2")
        require(self.max_num_seqs >= 1, "max_num_seqs", self.max_num_seqs, "at least 1")
        require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            f"at least max_num_seqs ({self.max_num_seqs})",
            "Every running request needs one token in each forward pass.",
        )
        require(self.block_size in (32, 64, 128), "block_size", self.block_size, "32, 64 or 128 (tokens)")
        require(
            self.enforce_eager is not False or self.update.swap != "flip",
            "update.swap",
            self.update.swap,
            "'copy' or 'auto' with enforce_eager=false",
            "CUDA graphs read parameters at fixed addresses.",
        )
        require(0 < self.kv_cache_gib < math.inf, "kv_cache_gib", self.kv_cache_gib, "greater than 0, and finite")
        require(
            self.sampling.max_tokens < self.max_model_len,
            "sampling.max_tokens",
            self.sampling.max_tokens,
            f"less than max_model_len ({self.max_model_len})",
            "Prompt and completion together must fit max_model_len.",
        )
