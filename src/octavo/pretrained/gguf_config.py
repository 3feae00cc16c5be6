"""The metadata of GGUF files: to and from `ModelConfig`."""

import math
from typing import Any

import numpy as np

from octavo._names import did_you_mean
from octavo.files.gguf import Gguf
from octavo.models import ModelConfig, RopeScaling
from octavo.pretrained.architectures import ARCHITECTURES, Architecture, architecture_of
from octavo.pretrained.fields import Fields, check_layers
from octavo.pretrained.gguf_latent import READ, has_sigmoid, latent_metadata, read_latent
from octavo.pretrained.layer_config import READ as LAYERS_READ
from octavo.pretrained.layer_config import layer_metadata, read_gguf_layers
from octavo.pretrained.names import GGUF

ROPE_TABLES = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors by which rotary frequencies are divided."""
_UNROTATED = 1e30
"""The divisor of frequencies that are not rotated, by which Gemma 4's files mark them."""
_INERT = ("context_length", "vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "attention.value_length")
_INERT += ("expert_group_count", "expert_group_used_count", "interleave_moe_layer_step", "attention.output_scale")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "use_parallel_residual": (True, False),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.output_scale": (1.0,),
    "logit_scale": (1.0,),
    "residual_scale": (1.0,),
    "embedding_scale": (1.0,),
    "attention.scale": (None,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "expert_gating_func": (1,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_group_count": (1,),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "attention.shared_kv_layers": (0,),
}
_WIDE_HEADS = {("gemma2", 46), ("gemma3", 62)}
"""The models of 27 billion parameters, by their layers: scores are scaled by the width of a head in the embedding."""


def model_config(file: Gguf) -> tuple[str, ModelConfig]:
    """The name of the architecture and the model that the metadata of a file describes."""
    kind = file.metadata.get("general.architecture")
    known = {architecture.gguf for architecture in ARCHITECTURES.values() if architecture.gguf}
    if kind not in known:
        near = did_you_mean(str(kind), known, most=1, cutoff=0.9)
        raise ValueError(
            f"{file.path}: architecture {kind!r} is not supported: {near}Known: {', '.join(sorted(known))}"
        )
    fields = Fields(file.metadata, file.path, f"{kind}.")
    has_experts = fields.int("expert_count", 0, least=0) > 1
    name = next(
        (n for n, a in ARCHITECTURES.items() if a.gguf == kind and a.has_experts == has_experts),
        next(n for n, a in ARCHITECTURES.items() if a.gguf == kind),
    )
    if kind == "deepseek2" and has_sigmoid(fields):
        name = "deepseek_v3"
    if ARCHITECTURES[name].has_experts != has_experts:
        raise ValueError(f"{file.path}: {kind}.expert_count={fields.get('expert_count', 0)} is not supported")
    config = _read(file, fields, ARCHITECTURES[name])
    read = READ if config.kv_lora_rank else LAYERS_READ if "layer_embed_dim" in ARCHITECTURES[name].varied else ()
    fields.check_neutral({key: allowed for key, allowed in _NEUTRAL.items() if key not in read})
    unused = fields.unused(_INERT)
    if unused:
        raise ValueError(
            f"{file.path} has {unused[0]}={file.metadata[unused[0]]!r:.50}, which Octavo does not know: it may change "
            "what the model computes, and is not supported"
        )
    return name, config


def _read(file: Gguf, fields: Fields, architecture: Architecture) -> ModelConfig:
    names = set(file.names())
    layers, size = fields.int("block_count"), fields.int("embedding_length")
    check_layers(file.path, f"{fields.prefix}block_count", layers, names, GGUF.layer)
    heads, changes = fields.int("attention.head_count"), {}
    if "layer_embed_dim" in architecture.varied:
        changes |= read_gguf_layers(file, fields, layers)
    head_dim = changes.pop("head_dim", None) or fields.int("attention.key_length", max(size // heads, 1))
    kv_heads = changes.pop("num_kv_heads", None) or fields.int("attention.head_count_kv", heads)
    is_latent = "kv_lora_rank" in architecture.varied
    length = (changes.get("full_head_dim") or head_dim) if changes else head_dim
    if fields.int("attention.value_length", length) != length and not is_latent:
        raise ValueError(f"{file.path} has values of another width than keys, which is not supported")
    if is_latent:
        changes |= read_latent(fields)
        head_dim = changes.pop("head_dim")
    elif architecture.has_experts:
        changes |= _experts(fields)
    elif "mlp_dim" not in changes:
        changes["mlp_dim"] = fields.int("feed_forward_length")
    if architecture.fixed.get("rotary_dim") == 0:
        fields.get("rope.dimension_count", None)
    else:
        rotary = fields.int("rope.dimension_count", length)
        changes |= {"rotary_dim": None if rotary == length else rotary, "rope_scaling": _rope(file, fields, rotary)}
    if "learned_positions" in architecture.varied:
        changes["learned_positions"] = file.info("position_embd.weight").shape[0]
    changes = {**_window(fields, architecture), **changes}
    if is_latent and changes["rope_scaling"] is not None:
        changes["rope_scaling"] = changes["rope_scaling"].replace(magnitude=1.0)
    if "attention_softcap" in architecture.varied:
        changes["attention_softcap"] = _decimal(fields.float("attn_logit_softcapping", 0.0))
        if (architecture.gguf, layers) in _WIDE_HEADS:
            changes["attention_scale"] = (size / heads) ** -0.5
    if "logits_softcap" in architecture.varied:
        changes["logits_softcap"] = _decimal(fields.float("final_logit_softcapping", 0.0))
    epsilon = "layer_norm_epsilon" if architecture.fixed.get("norm") == "layer" else "layer_norm_rms_epsilon"
    for field, name in (("qkv_bias", "attn_q"), ("out_bias", "attn_output"), ("mlp_bias", "ffn_down")):
        changes[field] = f"blk.0.{name}.bias" in names
    changes["qk_norm"] = "blk.0.attn_q_norm.weight" in names
    changes["activation"] = "gelu" if architecture.scaled_embedding or architecture.gguf == "gpt2" else "silu"
    return ModelConfig(
        vocab_size=file.info("token_embd.weight").shape[0],
        emb_dim=size,
        num_layers=layers,
        num_query_heads=heads,
        num_kv_heads=heads if is_latent else kv_heads,
        head_dim=head_dim,
        norm_eps=_decimal(fields.float(f"attention.{epsilon}")),
        rope_theta=_decimal(fields.float("rope.freq_base", 10_000.0)),
        tied_logits="output.weight" not in names,
        embedding_scale=size**0.5 if architecture.scaled_embedding else 1.0,
        scan_layers=False,
        **{**changes, **architecture.fixed},
    )


def _experts(fields: Fields) -> dict[str, Any]:
    feed = fields.int("feed_forward_length", None)
    hidden = fields.int("expert_feed_forward_length", feed) or fields.int("expert_feed_forward_length")
    # Files of Qwen2-MoE before this key have the width of shared experts as that of MLPs.
    shared = fields.int("expert_shared_feed_forward_length", 0, least=0)
    if shared % hidden:
        raise ValueError(f"{fields.path}: shared experts of width {shared} are no multiple of {hidden}, one expert's")
    fields.get("expert_shared_count", None)
    return {
        "num_experts": fields.int("expert_count"),
        "experts_per_token": fields.int("expert_used_count"),
        "moe_mlp_dim": hidden,
        "mlp_dim": hidden,
        "shared_experts": shared // hidden,
        "normalize_router": fields.flag("expert_weights_norm", fields.prefix != "qwen2moe."),
    }


def _window(fields: Fields, architecture: Architecture) -> dict[str, Any]:
    window = fields.int("attention.sliding_window", 0, least=0)
    local, pattern = fields.float("rope.freq_base_swa", None), fields.get("attention.sliding_window_pattern", None)
    if not window:
        return {}
    sliding = architecture.sliding
    if isinstance(pattern, int) and pattern > 0:
        sliding = (True,) * (pattern - 1) + (False,)
    elif isinstance(pattern, (list, tuple)) or hasattr(pattern, "tolist"):
        sliding = tuple(map(bool, pattern))
    if "rope_local_base_freq" in architecture.defaults:
        local = _decimal(local or architecture.defaults["rope_local_base_freq"])
    return {"sliding_window": window, "sliding_layers": sliding, "sliding_rope_theta": local}


def _rope(file: Gguf, fields: Fields, rotary: int) -> RopeScaling | None:
    kind = fields.get("rope.scaling.type", "none")
    linear = fields.float("rope.scale_linear", 1.0)  # an old name
    factor = _decimal(fields.float("rope.scaling.factor", linear))
    length = fields.int("rope.scaling.original_context_length", fields.int("context_length", 0, least=0), least=0)
    attention = _decimal(fields.float("rope.scaling.attn_factor", 1.0))
    slow, fast = (fields.float(f"rope.scaling.yarn_beta_{name}", x) for name, x in (("slow", 1.0), ("fast", 32.0)))
    if kind in ("none", "longrope") and linear != 1:
        kind = "linear"
    tables = {}
    for name in set(ROPE_TABLES) & set(file.names()):
        table = file.read(name).astype(np.float64).reshape(-1)
        if len(table) != rotary // 2 or not (np.isfinite(table) & (table > 0)).all():
            raise ValueError(f"{file.path}: {name} is not a table of {rotary // 2} positive numbers")
        tables[name] = tuple(map(_decimal, table.tolist()))
    if tables and kind not in ("none", "longrope"):
        raise ValueError(f"{file.path} has {min(tables)} and rope.scaling.type={kind!r}: only one is supported")
    if tables:
        short = tables.get(ROPE_TABLES[0]) or tables.get(ROPE_TABLES[1]) or ()
        long = tables.get(ROPE_TABLES[2], ())
        if set(short) | set(long) == {1.0} and attention == 1:
            return None
        if set(short) == {1.0, _UNROTATED} and sorted(short) == list(short) and not long:
            return RopeScaling(kind="proportional", part=short.count(1.0) / len(short))
        return RopeScaling(kind="longrope", short=short, long=long, length=length if long else 0, magnitude=attention)
    if kind == "none" or (kind == "linear" and factor == 1):
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind == "yarn":
        magnitude = attention * (1 + 0.1 * math.log(factor) if factor > 1 else 1)
        exact = fields.prefix != "gpt-oss."
        bounds = {"low": slow, "high": fast, "length": length, "truncate": exact}
        return RopeScaling(kind="yarn", factor=factor, magnitude=magnitude, **bounds)
    raise ValueError(f"{file.path}: rope.scaling.type {kind!r} is not supported; known: none, linear, yarn")


def _decimal(value: float) -> float:
    """A float32 as the shortest decimal that rounds to it, such as 1e-5.

    >>> _decimal(9.999999747378752e-06)
    1e-05
    """
    return float(str(np.float32(value)))


def metadata(config: ModelConfig, max_length: int) -> tuple[str, dict[str, Any], dict[str, np.ndarray]]:
    """The architecture of a model, its keys in a GGUF file, and its tables of rotary frequencies."""
    name = architecture_of(config)
    architecture = ARCHITECTURES[name]
    if not architecture.gguf or (config.sliding_window and not _pattern_is_known(config, architecture)):
        raise ValueError(f"GGUF files have no {name} with these sliding windows: write safetensors instead")
    gelu = architecture.scaled_embedding or name == "gpt2"
    wanted = architecture.fixed.get("activation", "gelu" if gelu else "silu")
    if config.activation != wanted:
        raise ValueError(
            f"llama.cpp runs such models with {wanted} only, not {config.activation}: write safetensors instead"
        )
    if architecture.gguf == "qwen3moe" and not config.normalize_router:
        raise ValueError("llama.cpp normalizes the router of such models: write safetensors instead")
    scale = config.emb_dim / config.num_query_heads if (architecture.gguf, config.num_layers) in _WIDE_HEADS else None
    wanted_scale = None if scale is None else scale**-0.5
    if config.attention_scale != architecture.fixed.get("attention_scale", wanted_scale) and not config.kv_lora_rank:
        raise ValueError("GGUF files have no place for attention_scale: write safetensors instead")
    epsilon = "layer_norm_epsilon" if config.norm == "layer" else "layer_norm_rms_epsilon"
    found: dict[str, Any] = {
        "context_length": config.learned_positions or max_length,
        "embedding_length": config.emb_dim,
        "block_count": config.num_layers,
        "feed_forward_length": config.moe_mlp_dim if architecture.has_experts else config.mlp_dim,
        "attention.head_count": config.num_query_heads,
        "attention.head_count_kv": config.num_kv_heads,
        f"attention.{epsilon}": float(config.norm_eps),
        "vocab_size": config.vocab_size,
    }
    if config.rotated:
        found |= {"rope.dimension_count": config.rotated, "rope.freq_base": float(config.rope_theta)}
        found |= {f"attention.{kind}_length": config.head_dim for kind in ("key", "value")}
    if architecture.has_experts:
        found |= {"expert_count": config.num_experts, "expert_used_count": config.experts_per_token}
        found["expert_feed_forward_length"] = config.moe_mlp_dim
        if config.shared_experts:
            found["expert_shared_feed_forward_length"] = config.shared_experts * config.moe_mlp_dim
        if architecture.gguf == "qwen2moe":
            found["expert_weights_norm"] = config.normalize_router
    if config.kv_lora_rank:
        found |= latent_metadata(config)
    if "layer_embed_dim" in architecture.varied:
        found |= layer_metadata(config)
    if config.sliding_window:
        found["attention.sliding_window"] = config.sliding_window
    if "logits_softcap" in architecture.varied:
        caps = {"attn_logit_softcapping": config.attention_softcap, "final_logit_softcapping": config.logits_softcap}
        found |= {key: cap for key, cap in caps.items() if cap}
    keys, tables = _rope_metadata(config)
    return architecture.gguf, {**found, **keys}, tables


def _pattern_is_known(config: ModelConfig, architecture: Architecture) -> bool:
    """Whether readers of a file know which layers have a window, and their rotary frequencies."""
    if "layer_embed_dim" in architecture.varied:  # the pattern is written
        return True
    theta = architecture.defaults.get("rope_local_base_freq")
    same = all(
        config.is_sliding(i) == architecture.sliding[i % len(architecture.sliding)] for i in range(config.num_layers)
    )
    return architecture.gguf != "llama" and config.sliding_rope_theta == theta and same


def _rope_metadata(config: ModelConfig) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    rope, key = config.rope, "rope.scaling."
    if rope is None:
        return {}, {}
    if rope.kind == "linear":
        return {f"{key}type": "linear", f"{key}factor": float(rope.factor)}, {}
    if rope.kind == "yarn":
        usual = 1 if config.kv_lora_rank else 1 + 0.1 * math.log(max(rope.factor, 1.0))
        attention = rope.magnitude / usual
        found = {f"{key}type": "yarn", f"{key}factor": float(rope.factor), f"{key}original_context_length": rope.length}
        found |= {f"{key}attn_factor": attention} if abs(attention - 1) > 1e-6 else {}
        found |= {f"{key}yarn_beta_slow": rope.low, f"{key}yarn_beta_fast": rope.high}
        return found, {}
    if rope.kind == "proportional":
        multipliers = rope.multipliers(config.rope_theta, config.full.head_dim, 0)
        return {}, {ROPE_TABLES[0]: np.where(multipliers == 0, _UNROTATED, 1.0).astype(np.float32)}
    if rope.kind == "dynamic":
        raise ValueError("GGUF files have no rope_scaling of kind 'dynamic': write safetensors instead")
    as_table = lambda values: np.asarray(values, np.float32)  # noqa: E731
    if rope.kind == "llama3":
        return {}, {ROPE_TABLES[0]: 1 / rope.multipliers(config.rope_theta, config.rotated, 0)}
    found = {f"{key}attn_factor": rope.magnitude} if rope.magnitude != 1 else {}
    if not rope.long:
        return found, {ROPE_TABLES[0]: as_table(rope.short)}
    found |= {f"{key}type": "longrope", f"{key}original_context_length": rope.length}
    return found, {ROPE_TABLES[1]: as_table(rope.short), ROPE_TABLES[2]: as_table(rope.long)}
