"""config.json of Hugging Face models: to and from `ModelConfig`."""

import math
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

from octavo._names import did_you_mean, unknown_name
from octavo.models import ModelConfig, RopeScaling
from octavo.pretrained.architectures import ARCHITECTURES, Architecture, architecture_of
from octavo.pretrained.fields import Fields
from octavo.pretrained.latent_config import describe_latent, describe_scale, magnitude, read_experts, read_latent
from octavo.pretrained.layer_config import describe_layers, read_layers

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu_fast": "gelu"}
_ACTIVATIONS |= {"gelu": "gelu_exact", "relu": "relu", "relu2": "relu2"}
_WRITTEN = {"gelu": "gelu_pytorch_tanh", "gelu_exact": "gelu", "swiglu_clamped": "silu"}

_INERT = [
    "architectures",
    "attention_dropout",
    "attn_pdrop",
    "auto_map",
    "bos_token_id",
    "cache_implementation",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "max_length",
    "model_type",
    "n_ctx",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "quantization_config",
    "reorder_and_upcast_attn",
    "resid_pdrop",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sep_token_id",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "use_cache",
    "vocab_size",
    "hidden_dropout",
    "max_window_layers",
    "initial_context_length",
    "embd_layer_norm",
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "experts_per_token",
    "aux_loss_alpha",
    "ep_size",
    "num_nextn_predict_layers",
    "seq_aux",
]
_INERT += [f"summary_{name}" for name in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")]
"""Keys that do not change what a model computes, or are checked otherwise."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_multiplier", "residual_multiplier", "embedding_multiplier", "logits_scaling"), (1.0,)),
    **dict.fromkeys(("add_cross_attention", "scale_attn_by_inverse_layer_idx", "is_encoder_decoder"), (False,)),
    **dict.fromkeys(("use_bidirectional_attention", "alibi", "parallel_attn", "new_decoder_architecture"), (False,)),
    **dict.fromkeys(("clip_qkv", "logit_scale", "attention_chunk_size", "no_rope_layers"), (None,)),
    "scale_attn_weights": (True,),
    "position_embedding_type": ("absolute", "rope", "rotary"),
    "swiglu_alpha": (1.702,),
    "swiglu_limit": (7.0,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "n_group": (1,),
    "moe_layer_freq": (1,),
    "enable_moe_block": (False,),
}
"""Keys of computations that are not supported, with the values that turn them off."""


def model_config(described: dict[str, Any], directory: Path, names: Collection[str]) -> ModelConfig:
    """The model that a config.json describes."""
    path = directory / "config.json"
    if not isinstance(described, dict):
        raise ValueError(f"{path} is not an object of JSON")
    kind = described.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        near = did_you_mean(str(kind), ARCHITECTURES, most=1, cutoff=0.9)
        raise ValueError(
            f"{path}: model_type {kind!r} is not supported: {near}Known: {', '.join(sorted(ARCHITECTURES))}"
        )
    architecture = ARCHITECTURES[kind]
    values = {**architecture.defaults, **{k: v for k, v in described.items() if v is not None}}
    for key, other in architecture.keys.items():
        values |= {key: described[other]} if described.get(other) is not None else {}
    fields = Fields(values, path)
    for other in architecture.keys.values():
        fields.get(other, None)
    config = _read(fields, architecture, kind, set(names))
    read = ("n_group",) if "router_groups" in architecture.varied else ()
    fields.check_neutral({key: allowed for key, allowed in _NEUTRAL.items() if key not in read})
    warn_unknown(fields)
    return config


def warn_unknown(fields: Fields, *inert: str) -> None:
    """Warn of keys that were not used and may change what a model computes; `inert` are further ones that do not."""
    unused = fields.unused((*_INERT, *inert))
    unknown = [key for key in unused if not key.startswith("_") and _may_matter(fields.values[key])]
    if unknown:
        warnings.warn(f"{fields.path}: {', '.join(unknown)} are not known here, and have no effect", stacklevel=3)


def _may_matter(value: Any) -> bool:
    return not isinstance(value, str) and value not in (None, False, [], {})


def read_activation(fields: Fields, default: str) -> str:
    """The name of an activation in `ACTIVATIONS`."""
    activation = fields.get("hidden_act", default)
    if activation not in _ACTIVATIONS:
        raise ValueError(f"{fields.path}: hidden_act {activation!r}: {unknown_name(activation, tuple(_ACTIVATIONS))}")
    return _ACTIVATIONS[activation]


def _read(fields: Fields, architecture: Architecture, kind: str, names: set[str]) -> ModelConfig:
    heads, size, layers = (fields.int(k) for k in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    own = "qk_rope_head_dim" if "kv_lora_rank" in architecture.varied else "head_dim"
    head_dim = fields.int(own, None) or max(size // heads, 1)
    length = fields.int("max_position_embeddings", 2048)
    changes: dict[str, Any] = {"activation": read_activation(fields, "silu")}
    changes |= _window(fields, architecture, kind, layers)
    changes |= read_rope(fields, head_dim, length, sliding=bool(changes.get("sliding_window")))
    if "layer_embed_dim" in architecture.varied:
        changes |= read_layers(fields, changes.get("sliding_layers", (False,)), layers)
    if "kv_lora_rank" in architecture.varied:
        scores = architecture.fixed.get("router_scores", "softmax")
        changes |= {**read_latent(fields, heads), **read_experts(fields, scores)}
        head_dim = changes.pop("head_dim")
    elif architecture.has_experts:
        changes |= _experts(fields)
    else:
        changes["mlp_dim"] = fields.int("intermediate_size", 4 * size if kind == "gpt2" else None)
        if changes["mlp_dim"] is None:
            fields.get("intermediate_size")
    if "learned_positions" in architecture.varied:
        changes["learned_positions"] = length
    for field, ending in (("qkv_bias", "q_proj.bias"), ("out_bias", "o_proj.bias"), ("mlp_bias", "down_proj.bias")):
        changes[field] = any(name.endswith(ending) for name in names)
    for key in ("attention_bias", "mlp_bias", "qkv_bias"):  # what they say is seen in the tensors
        fields.flag(key)
    changes["qk_norm"] = any(name.endswith("q_norm.weight") for name in names)
    if "attention_softcap" in architecture.varied:
        changes["attention_scale"] = fields.float("query_pre_attn_scalar") ** -0.5
        changes["attention_softcap"] = fields.float("attn_logit_softcapping", 0.0)
        if changes["attention_scale"] == head_dim**-0.5:
            changes["attention_scale"] = None
    if "logits_softcap" in architecture.varied:
        changes["logits_softcap"] = fields.float("final_logit_softcapping", 0.0)
    return ModelConfig(
        vocab_size=fields.int("vocab_size"),
        emb_dim=size,
        num_layers=layers,
        num_query_heads=heads,
        num_kv_heads=fields.int("num_key_value_heads", heads),
        head_dim=head_dim,
        norm_eps=fields.float("rms_norm_eps", 1e-6),
        tied_logits=_tied(fields, names),
        embedding_scale=size**0.5 if architecture.scaled_embedding else 1.0,
        scan_layers=False,
        **{**changes, **architecture.fixed},
    )


def _tied(fields: Fields, names: set[str]) -> bool:
    has_head = "lm_head.weight" in names
    tied = fields.flag("tie_word_embeddings", not has_head)
    if not tied and not has_head:
        raise ValueError(f"{fields.path}: tie_word_embeddings is false, but there is no tensor 'lm_head.weight'")
    return tied


def _window(fields: Fields, architecture: Architecture, kind: str, layers: int) -> dict[str, Any]:
    window = fields.int("sliding_window", 0, least=0)
    pattern = read_layer_types(fields, layers)
    used = fields.flag("use_sliding_window", not kind.startswith("qwen"))
    if not used or not window or "sliding_window" not in architecture.varied:
        return {}
    if pattern is None:
        every = fields.int("sliding_window_pattern", 0, least=0) or fields.int("_sliding_window_pattern", 0, least=0)
        pattern = (True,) * (every - 1) + (False,) if every else architecture.sliding
        if kind.startswith("qwen"):
            first = fields.int("max_window_layers", 28, least=0)
            pattern = tuple(layer >= first for layer in range(layers))
    if not any(pattern):
        return {}
    return {"sliding_window": window, "sliding_layers": (True,) if all(pattern) else pattern}


def read_layer_types(fields: Fields, layers: int) -> tuple[bool, ...] | None:
    """Which layers have a sliding window, by `layer_types`; None without it."""
    types = fields.get("layer_types", None)
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers:
        raise ValueError(f"{fields.path}: layer_types has an entry for each of the {layers} layers, got {types!r:.50}")
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown:
        raise ValueError(f"{fields.path}: layer_types {sorted(map(str, unknown))[0]!r} is not supported")
    return tuple(kind == "sliding_attention" for kind in types)


def _experts(fields: Fields) -> dict[str, Any]:
    # Newer files of Qwen3 have the key of Mixtral.
    local = fields.int("num_local_experts", None)
    count = fields.int("num_experts", local) or fields.int("num_experts")
    hidden = fields.int("moe_intermediate_size")
    fields.get("intermediate_size", None)
    shared = fields.int("shared_expert_intermediate_size", 0, least=0)
    if shared % hidden:
        raise ValueError(f"{fields.path}: shared experts of width {shared} are no multiple of {hidden}, one expert's")
    return {
        "num_experts": count,
        "experts_per_token": fields.int("num_experts_per_tok"),
        "moe_mlp_dim": hidden,
        "mlp_dim": hidden,
        "shared_experts": shared // hidden,
        "normalize_router": fields.flag("norm_topk_prob"),
    }


def read_rope(fields: Fields, head_dim: int, length: int, *, sliding: bool) -> dict[str, Any]:
    """The fields of rotary embeddings, of old and new forms of config.json."""
    old, new = fields.get("rope_scaling", None) or {}, fields.get("rope_parameters", None) or {}
    theta, local = fields.float("rope_theta", 10_000.0), fields.float("rope_local_base_freq", None)
    found = {**old, **new} if isinstance(old, dict) and isinstance(new, dict) else None
    if found is None:
        raise ValueError(f"{fields.path}: rope_scaling and rope_parameters are objects")
    if isinstance(found.get("full_attention"), dict):
        inner = found.get("sliding_attention")
        if inner is not None and (not isinstance(inner, dict) or inner.get("rope_type", "default") != "default"):
            raise ValueError(f"{fields.path}: scaled RoPE in layers with a sliding window is not supported")
        local = inner.get("rope_theta", local) if inner else local
        found = found["full_attention"]
    rope = Fields(found, fields.path, "")
    partial = rope.float("partial_rotary_factor", None) or fields.float("partial_rotary_factor", 1.0)
    fields.get("partial_rotary_factor", None)
    is_proportional = found.get("rope_type") == "proportional"
    rotary = head_dim if is_proportional else int(head_dim * partial)
    original = fields.int("original_max_position_embeddings", None)
    return {
        "rope_theta": rope.float("rope_theta", theta),
        "sliding_rope_theta": float(local) if local is not None and sliding else None,
        "rotary_dim": None if rotary == head_dim else rotary,
        "rope_scaling": _scaling(rope, length, original),
    }


def _scaling(rope: Fields, length: int, outer: int | None) -> RopeScaling | None:
    kind = rope.get("rope_type", None) or rope.get("type", "default")
    original = rope.int("original_max_position_embeddings", None) or outer or length
    rope.get("rope_theta", None)
    found = None
    if kind == "su":  # the name of longrope in early files of Phi-3
        kind = "longrope"
    if kind in ("linear", "dynamic"):
        found = RopeScaling(kind=kind, factor=rope.float("factor"), length=length if kind == "dynamic" else 0)
    elif kind == "llama3":
        low, high = rope.float("low_freq_factor"), rope.float("high_freq_factor")
        found = RopeScaling(kind=kind, factor=rope.float("factor"), low=low, high=high, length=original)
    elif kind == "yarn":
        factor = rope.float("factor")
        mscales = [rope.float(key, 0.0) for key in ("mscale", "mscale_all_dim")]
        plain = [magnitude(factor, scale) for scale in (*mscales, 1.0)]
        found = RopeScaling(
            kind=kind,
            factor=factor,
            length=original,
            low=rope.float("beta_slow", 1.0),
            high=rope.float("beta_fast", 32.0),
            magnitude=rope.float("attention_factor", plain[0] / plain[1] if all(mscales) else plain[2]),
            truncate=rope.flag("truncate", True),
        )
    elif kind == "longrope":
        factor = max(length / original, 1.0) if outer or original != length else rope.float("factor", 1.0)
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        found = RopeScaling(
            kind=kind,
            length=original,
            magnitude=rope.float("attention_factor", attention),
            short=rope.floats("short_factor"),
            long=rope.floats("long_factor"),
        )
        rope.get("factor", None)
    elif kind == "proportional":
        part = rope.float("partial_rotary_factor", 1.0)
        found = RopeScaling(kind=kind, factor=rope.float("factor", 1.0), part=part)
    elif kind != "default":
        known = "default, dynamic, linear, llama3, longrope, proportional, yarn"
        raise ValueError(f"{rope.path}: RoPE scaling {kind!r} is not supported; known: {known}")
    unused = [key for key in rope.unused(("finetuned",)) if kind != "default" and rope.values[key] is not None]
    if unused:
        raise ValueError(f"{rope.path}: {unused[0]!r} of RoPE scaling {kind!r} is not supported")
    return found


def describe(config: ModelConfig, max_length: int, dtype: str) -> dict[str, Any]:
    """The config.json of a model."""
    kind = architecture_of(config)
    architecture = ARCHITECTURES[kind]
    found: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.emb_dim,
        "intermediate_size": config.moe_mlp_dim if architecture.has_experts else config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": _WRITTEN.get(config.activation, config.activation),
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.learned_positions or max_length,
    }
    if kind == "llama":
        found |= {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    if kind == "gpt_oss":
        found["attention_bias"] = True
    if config.rotary_dim and not config.kv_lora_rank:
        found["partial_rotary_factor"] = config.rotary_dim / config.head_dim
    if "layer_embed_dim" in architecture.varied:
        found |= describe_layers(config)
    elif config.rope is not None:
        found |= _describe_rope(config.rope)
    if "sliding_window" in architecture.varied:
        found |= _describe_window(config, kind)
    if config.kv_lora_rank:
        found |= describe_latent(config)
        if scale := describe_scale(config, config.rope):
            found["rope_scaling"] = {**found["rope_scaling"], **scale}
            del found["rope_scaling"]["attention_factor"]
    elif architecture.has_experts:
        key = "num_experts" if kind.startswith("qwen") else "num_local_experts"
        found |= {key: config.num_experts, "num_experts_per_tok": config.experts_per_token}
        found |= {"moe_intermediate_size": config.moe_mlp_dim, "norm_topk_prob": config.normalize_router}
        if config.shared_experts:
            found["shared_expert_intermediate_size"] = config.shared_experts * config.moe_mlp_dim
    if "attention_softcap" in architecture.varied:
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        found["query_pre_attn_scalar"] = round(scale**-2, 6)
        found["attn_logit_softcapping"] = config.attention_softcap or None
    if "logits_softcap" in architecture.varied:
        found["final_logit_softcapping"] = config.logits_softcap or None
    renamed = {architecture.keys.get(key, key): value for key, value in found.items()}
    return {
        "architectures": [architecture.huggingface],
        "model_type": kind,
        **renamed,
        "tie_word_embeddings": config.tied_logits,
        "torch_dtype": dtype,
    }


def _describe_window(config: ModelConfig, kind: str) -> dict[str, Any]:
    if not config.sliding_window:
        return {"sliding_window": None} | ({"use_sliding_window": False} if kind.startswith("qwen") else {})
    kinds = [("full", "sliding")[config.is_sliding(i)] + "_attention" for i in range(config.num_layers)]
    found: dict[str, Any] = {"sliding_window": config.sliding_window, "layer_types": kinds}
    if kind.startswith("qwen"):
        first = next((i for i, name in enumerate(kinds) if name.startswith("sliding")), config.num_layers)
        found |= {"use_sliding_window": True, "max_window_layers": first}
    if config.sliding_rope_theta is not None:
        found["rope_local_base_freq"] = config.sliding_rope_theta
    return found


def _describe_rope(rope: RopeScaling) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind == "proportional":
        raise ValueError("RoPE scaling 'proportional' is for files of Gemma 4: use Octavo's own format instead")
    if rope.kind != "longrope":
        found["factor"] = rope.factor
    if rope.kind == "llama3":
        found |= {"low_freq_factor": rope.low, "high_freq_factor": rope.high}
    if rope.kind == "yarn":
        found |= {"beta_slow": rope.low, "beta_fast": rope.high, "truncate": rope.truncate}
    if rope.kind == "longrope":
        found |= {"short_factor": list(rope.short), "long_factor": list(rope.long or rope.short)}
    if rope.kind in ("yarn", "longrope"):
        found["attention_factor"] = rope.magnitude
    outer: dict[str, Any] = {}
    if rope.kind in ("llama3", "yarn", "longrope"):
        length = rope.length or 1
        found["original_max_position_embeddings"] = length
        outer = {"original_max_position_embeddings": length} if rope.kind == "longrope" else {}
    return {"rope_scaling": found, **outer}
