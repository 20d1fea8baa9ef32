"""A Hugging Face ``config.json`` -> a torchtitan model: llama (tied or not), qwen3 (tied or not), qwen3_moe."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from forge_async.errors import ForgeError, ModelNotFoundError, require
from forge_async.trainer import titan_compat as titan
from forge_async.trainer.config import ParallelismConfig
from forge_async.trainer.packing import RowCosts

FAMILIES = ("llama", "qwen3", "qwen3_moe")

_NORMAL = {"weight": partial(nn.init.normal_, std=0.02), "bias": nn.init.zeros_}
_ONES = {"weight": nn.init.ones_}
_ATTENTION: dict[str, Any] = {
    "segments": titan.SegmentAttention,
    "flex": titan.TreeFlexAttention,
    "varlen": titan.VarlenAttention,
}
_EXPERTS = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), _NORMAL["weight"])


def read_hf_config(model_path: str | Path) -> dict[str, Any]:
    """The model's ``config.json``, checked to be one this trainer computes exactly.

    Raises:
        ModelNotFoundError: no such folder, or it has no ``config.json``.
        ForgeError: an unsupported family or option; the message names it and what is supported.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        raise ModelNotFoundError(
            f"model folder {folder} does not exist; prepare one with `python -m forge_async.model_zoo NAME FOLDER` "
            "or point the run at a folder in Hugging Face format"
        )
    file = folder / "config.json"
    if not file.is_file():
        raise ModelNotFoundError(
            f"model folder {folder} has no config.json; it must be a folder in Hugging Face format"
        )
    config = json.loads(file.read_text())
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ForgeError(
            f"{file}: model_type is {family!r}; the trainer supports {', '.join(FAMILIES)}. "
            "Other families need an entry in forge_async/trainer/model.py."
        )
    for option, required in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if config.get(option, required) != required:
            raise ForgeError(f"{file}: {option} is {config[option]!r}; the trainer supports only {required!r}")
    if config.get("use_sliding_window"):
        raise ForgeError(f"{file}: use_sliding_window is true; the trainer supports only full attention")
    return config


def check_parallelism(config: dict[str, Any], layout: ParallelismConfig) -> None:
    """Raise :class:`ConfigError` where a model cannot be split as ``layout`` says."""
    heads = config["num_attention_heads"]
    divided = {
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "intermediate_size": config["intermediate_size"],
    }
    for name, value in divided.items():
        require(value % layout.tp == 0, "parallelism.tp", layout.tp, f"a divisor of the model's {name} ({value})")
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    if experts and layout.tp > 1:
        require(
            layout.ep > 1,
            "parallelism.ep",
            layout.ep,
            "above 1 for a mixture of experts with tp",
            "The gradients of experts that are split inside are wrong in torchtitan 0.3.0.",
        )
    if layout.ep > 1:
        require(experts > 0, "parallelism.ep", layout.ep, f"1 for {config['model_type']}, which has no experts")
        require(
            experts % layout.ep == 0, "parallelism.ep", layout.ep, f"a divisor of the model's num_experts ({experts})"
        )


def check_reference(config: dict[str, Any], reference: dict[str, Any], path: str | Path) -> None:
    """Raise :class:`ConfigError` where the model at ``path`` cannot be the reference of a KL penalty."""
    vocabulary = config["vocab_size"]
    allowed = f"a model with the trained model's vocabulary ({vocabulary} tokens, not {reference['vocab_size']})"
    require(reference["vocab_size"] == vocabulary, "loss.kl.reference", str(path), allowed)


def model_spec(config: dict[str, Any], *, max_sequence_tokens: int, attention: str = "segments") -> titan.ModelSpec:
    """The torchtitan model that computes what ``config`` describes, with at most ``max_sequence_tokens`` positions."""
    family = config["model_type"]
    build = _llama if family == "llama" else _qwen3
    inner = _ATTENTION[attention].Config()
    return build(config, min(max_sequence_tokens, config.get("max_position_embeddings", max_sequence_tokens)), inner)


def _llama(config: dict[str, Any], positions: int, inner_attention: Any) -> titan.ModelSpec:
    head_dim = _head_dim(config)
    rope = titan.ComplexRoPE.Config(dim=head_dim, max_seq_len=positions, **_rope_settings(config, allow_llama3=True))
    layers = [
        titan.Llama3TransformerBlock.Config(
            attention_norm=_norm(config, config["hidden_size"]),
            ffn_norm=_norm(config, config["hidden_size"]),
            attention=_attention(config, rope, inner_attention),
            feed_forward=_feed_forward(config),
        )
        for _ in range(config["num_hidden_layers"])
    ]
    return titan.ModelSpec(
        name="llama3",
        flavor="hf",
        model=titan.Llama3Model.Config(layers=layers, **_shared(config)),
        parallelize_fn=titan.parallelize_llama,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=titan.Llama3StateDictAdapter,
    )


def _qwen3(config: dict[str, Any], positions: int, inner_attention: Any) -> titan.ModelSpec:
    head_dim = _head_dim(config)
    rope = titan.CosSinRoPE.Config(dim=head_dim, max_seq_len=positions, **_rope_settings(config, allow_llama3=False))
    layers = []
    for index in range(config["num_hidden_layers"]):
        mixture = _is_mixture_layer(config, index)
        layers.append(
            titan.Qwen3TransformerBlock.Config(
                attention_norm=_norm(config, config["hidden_size"]),
                ffn_norm=_norm(config, config["hidden_size"]),
                attention=_attention(config, rope, inner_attention, qk_norm=_norm(config, head_dim)),
                **({"moe": _mixture(config)} if mixture else {"feed_forward": _feed_forward(config)}),
            )
        )
    return titan.ModelSpec(
        name="qwen3",
        flavor="hf",
        model=titan.Qwen3Model.Config(layers=layers, **_shared(config)),
        parallelize_fn=titan.parallelize_qwen3,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=titan.Qwen3StateDictAdapter,
    )


def _shared(config: dict[str, Any]) -> dict[str, Any]:
    dim, vocabulary, tied = config["hidden_size"], config["vocab_size"], is_tied(config)
    return {
        "dim": dim,
        "vocab_size": vocabulary,
        "enable_weight_tying": tied,
        "tok_embeddings": titan.Embedding.Config(
            num_embeddings=vocabulary,
            embedding_dim=dim,
            param_init={"weight": titan.skip_param_init} if tied else _NORMAL,
        ),
        "norm": _norm(config, dim),
        "lm_head": titan.LogprobHead.Config(in_features=dim, out_features=vocabulary, param_init=_NORMAL),
    }


def row_costs(config: dict[str, Any]) -> RowCosts:
    """Multiplications of a pair of tokens in attention, and of a prediction, over those of a token's linear layers."""
    dim, layers, heads, head_dim = (
        config["hidden_size"],
        config["num_hidden_layers"],
        config["num_attention_heads"],
        _head_dim(config),
    )
    key_value_heads = config.get("num_key_value_heads") or heads
    mixtures = sum(_is_mixture_layer(config, index) for index in range(layers))
    attention = 2 * dim * head_dim * (heads + key_value_heads)
    dense = 3 * dim * config["intermediate_size"]
    mixture = 3 * dim * config["moe_intermediate_size"] * config["num_experts_per_tok"] if mixtures else 0
    token = layers * attention + (layers - mixtures) * dense + mixtures * mixture
    return RowCosts(pair=2 * layers * heads * head_dim / token, prediction=dim * config["vocab_size"] / token)


def is_tied(config: dict[str, Any]) -> bool:
    """Whether input and output embeddings are one tensor; Hugging Face's default differs by family."""
    return bool(config.get("tie_word_embeddings", False))


def _head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _norm(config: dict[str, Any], size: int) -> Any:
    return titan.RMSNorm.Config(normalized_shape=size, eps=config.get("rms_norm_eps", 1e-6), param_init=_ONES)


def _attention(config: dict[str, Any], rope: Any, inner_attention: Any, qk_norm: Any = None) -> Any:
    return titan.make_gqa_config(
        dim=config["hidden_size"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_dim=_head_dim(config),
        wqkv_param_init=_NORMAL,
        wo_param_init=_NORMAL,
        inner_attention=inner_attention,
        rope=rope,
        qk_norm=qk_norm,
    )


def _feed_forward(config: dict[str, Any]) -> Any:
    return titan.make_ffn_config(
        dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        w1_param_init=_NORMAL,
        w2w3_param_init=_NORMAL,
    )


def _is_mixture_layer(config: dict[str, Any], index: int) -> bool:
    if config["model_type"] != "qwen3_moe" or index in (config.get("mlp_only_layers") or []):
        return False
    return (index + 1) % config.get("decoder_sparse_step", 1) == 0


def _mixture(config: dict[str, Any]) -> Any:
    experts = config.get("num_experts") or config["num_local_experts"]
    dim, top_k = config["hidden_size"], config["num_experts_per_tok"]
    mixture = titan.make_moe_config(
        num_experts=experts,
        load_balance_coeff=None,
        router=titan.make_router_config(
            dim=dim,
            num_experts=experts,
            gate_param_init=_NORMAL,
            top_k=top_k,
            score_func="softmax",
            route_norm=bool(config.get("norm_topk_prob", False)),
        ),
        routed_experts=titan.make_routed_experts_config(
            dim=dim,
            hidden_dim=config["moe_intermediate_size"],
            num_experts=experts,
            top_k=top_k,
            param_init=_EXPERTS,
            comm_backend="standard",
        ),
    )
    mixture.router.gate = titan.replace_config(mixture.router.gate, titan.PreciseGate)
    mixture.routed_experts.inner_experts = titan.replace_config(
        mixture.routed_experts.inner_experts, titan.PreciseGroupedExperts
    )
    return mixture


def _rope_settings(config: dict[str, Any], *, allow_llama3: bool) -> dict[str, Any]:
    """torchtitan's rotary settings; Hugging Face writes ``rope_parameters`` now and wrote ``rope_theta`` before."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"theta": theta}
    if kind == "llama3" and allow_llama3:
        return {
            "theta": theta,
            "scaling": "llama",
            "scaling_factor": float(rope["factor"]),
            "low_freq_factor": float(rope["low_freq_factor"]),
            "high_freq_factor": float(rope["high_freq_factor"]),
            "original_max_position_embeddings": int(rope["original_max_position_embeddings"]),
        }
    allowed = "default or llama3" if allow_llama3 else "default"
    raise ForgeError(f"config.json: rope type is {kind!r}; for {config['model_type']} the trainer supports {allowed}")
