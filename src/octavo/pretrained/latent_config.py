"""The keys of DeepSeek's models in config.json: latent attention, and the routers of its experts."""

import math
from typing import Any

from octavo.models import ModelConfig, RopeScaling
from octavo.pretrained.fields import Fields

_ROUTERS = {"greedy": "softmax", "group_limited_greedy": "softmax", "noaux_tc": "sigmoid"}
"""The scores that experts are chosen by, for each `topk_method`."""


def read_latent(fields: Fields, heads: int) -> dict[str, Any]:
    """The fields of latent attention."""
    rotary = fields.int("qk_rope_head_dim")
    width = fields.int("qk_nope_head_dim") + rotary
    for key, value in {"num_key_value_heads": heads, "qk_head_dim": width}.items():
        if fields.int(key, value) != value:
            raise ValueError(f"{fields.path}: {key} is {fields.get(key)}, but other keys make it {value}")
    fields.get("head_dim", None)  # of rotary embeddings, in files of transformers
    scale = width**-0.5 * _score_scale(fields)
    return {
        "head_dim": width,
        "rotary_dim": rotary,
        "rope_interleaved": fields.flag("rope_interleave", True),
        "kv_lora_rank": fields.int("kv_lora_rank"),
        "q_lora_rank": fields.int("q_lora_rank", 0),
        "v_head_dim": fields.int("v_head_dim"),
        "attention_scale": None if scale == width**-0.5 else scale,
    }


def _score_scale(fields: Fields) -> float:
    """What yarn multiplies scores by: the square of its magnitude by `mscale_all_dim`."""
    rope = {**(fields.get("rope_scaling", None) or {}), **(fields.get("rope_parameters", None) or {})}
    found = Fields(rope, fields.path)
    factor, by_dim = found.float("factor", 1.0), found.float("mscale_all_dim", 0.0)
    return magnitude(factor, by_dim) ** 2


def magnitude(factor: float, scale: float) -> float:
    """The magnitude of yarn for a factor, and for an `mscale` of 1 or another one."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1


def read_experts(fields: Fields, scores: str) -> dict[str, Any]:
    """The fields of experts and their router, for models with softmax or sigmoid scores."""
    method = fields.get("topk_method")
    given = fields.get("scoring_func", scores)
    if _ROUTERS.get(method) != scores or given != scores:
        raise ValueError(f"{fields.path}: topk_method={method!r} with scoring_func={given!r} is not supported here")
    normalize = fields.flag("norm_topk_prob")
    if normalize and scores == "softmax":
        raise ValueError(
            f"{fields.path}: norm_topk_prob=True of softmax scores is not supported: programs differ on it"
        )
    if method == "greedy":
        fields.get("n_group", None), fields.get("topk_group", None)
        groups, top_groups = 1, 1
    else:
        groups, top_groups = fields.int("n_group"), fields.int("topk_group")
    return {
        "num_experts": fields.int("num_experts"),
        "experts_per_token": fields.int("num_experts_per_tok"),
        "mlp_dim": fields.int("intermediate_size"),
        "moe_mlp_dim": fields.int("moe_intermediate_size"),
        "shared_experts": fields.int("n_shared_experts", 0, least=0),
        "first_dense_layers": fields.int("first_k_dense_replace", least=0),
        "normalize_router": normalize,
        "router_groups": groups,
        "router_top_groups": top_groups,
        "router_scale": fields.float("routed_scaling_factor"),
    }


def describe_latent(config: ModelConfig) -> dict[str, Any]:
    """The keys of latent attention and of experts."""
    is_grouped = config.router_groups > 1
    method = "noaux_tc" if config.router_bias else "group_limited_greedy" if is_grouped else "greedy"
    return {
        "head_dim": config.rotated,
        "qk_head_dim": config.head_dim,
        "qk_nope_head_dim": config.head_dim - config.rotated,
        "qk_rope_head_dim": config.rotated,
        "rope_interleave": config.rope_interleaved,
        "kv_lora_rank": config.kv_lora_rank,
        "q_lora_rank": config.q_lora_rank or None,
        "v_head_dim": config.v_head_dim,
        "intermediate_size": config.mlp_dim,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.moe_mlp_dim,
        "n_shared_experts": config.shared_experts,
        "first_k_dense_replace": config.first_dense_layers,
        "norm_topk_prob": config.normalize_router,
        "n_group": config.router_groups,
        "topk_group": config.router_top_groups,
        "routed_scaling_factor": config.router_scale,
        "topk_method": method,
        "scoring_func": config.router_scores,
        "num_nextn_predict_layers": 0,
    }


def describe_scale(config: ModelConfig, rope: RopeScaling | None) -> dict[str, float]:
    """The keys of yarn from which the scale of scores is computed."""
    if config.attention_scale is None:
        return {}
    squared = config.attention_scale * config.head_dim**0.5
    if rope is None or rope.kind != "yarn" or rope.factor <= 1 or squared <= 0:
        raise ValueError("files of DeepSeek have a scale of scores by yarn only: use Octavo's own format instead")
    log = 0.1 * math.log(rope.factor)
    # The decimals of a config.json come back, and with them the bits of the scale.
    by_dim = round((squared**0.5 - 1) / log, 12)
    return {"mscale": round((rope.magnitude * (by_dim * log + 1) - 1) / log, 12), "mscale_all_dim": by_dim}
