"""Latent attention and its routers in GGUF files, the architecture `deepseek2`.

Files of 2025 and later have W_kvb of latent attention as two tensors, one of keys [heads, rank, nope] and one of values
[heads, value_dim, rank], and describe the heads of the multiplied-out form; files before, and those that are written
here, have it as one. llama.cpp reads both.
"""

from typing import Any

import numpy as np

from octavo.files.gguf import Gguf
from octavo.models import ModelConfig
from octavo.pretrained.fields import Fields
from octavo.pretrained.latent_config import describe_scale, magnitude

_JOINED, _SPLIT = "attn_kv_b.weight", ("attn_k_b.weight", "attn_v_b.weight")
READ = ("rope.scaling.yarn_log_multiplier", "expert_gating_func", "expert_weights_scale", "expert_group_count")
READ += ("leading_dense_block_count",)
"""The keys that other architectures may have only with values that turn them off."""
_SIGMOID = 2


def has_sigmoid(fields: Fields) -> bool:
    """Whether the scores of the router are sigmoids, as in DeepSeek-V3."""
    return fields.int("expert_gating_func", 1, least=0) == _SIGMOID


def read_latent(fields: Fields) -> dict[str, Any]:
    """The fields of latent attention and of experts."""
    width, value = fields.int("attention.key_length"), fields.int("attention.value_length")
    width, value = fields.int("attention.key_length_mla", width), fields.int("attention.value_length_mla", value)
    rotary, shared = fields.int("rope.dimension_count"), fields.int("expert_shared_count", 0, least=0)
    hidden = fields.int("expert_feed_forward_length")
    fields.int("expert_shared_feed_forward_length", shared * hidden, least=0)
    if fields.flag("expert_weights_norm") and not has_sigmoid(fields):
        raise ValueError(f"{fields.path}: expert_weights_norm=True of softmax scores is not supported")
    return {
        "head_dim": width,
        "rotary_dim": rotary,
        "rope_interleaved": True,
        "kv_lora_rank": fields.int("attention.kv_lora_rank"),
        "q_lora_rank": fields.int("attention.q_lora_rank", 0, least=0),
        "v_head_dim": value,
        "num_experts": fields.int("expert_count"),
        "experts_per_token": fields.int("expert_used_count"),
        "mlp_dim": fields.int("feed_forward_length"),
        "moe_mlp_dim": hidden,
        "shared_experts": shared,
        "first_dense_layers": fields.int("leading_dense_block_count", 0, least=0),
        "normalize_router": fields.flag("expert_weights_norm", False),
        "router_groups": fields.int("expert_group_count", 1),
        "router_top_groups": fields.int("expert_group_used_count", 1),
        "router_scale": _decimal(fields.float("expert_weights_scale", 0.0)) or 1.0,
        **_read_scale(fields, width),
    }


def _read_scale(fields: Fields, width: int) -> dict[str, Any]:
    """The scale of scores, which yarn multiplies in these models, and not the cosines and sines."""
    log, factor = (_decimal(fields.float(f"rope.scaling.{key}", 0.0)) for key in ("yarn_log_multiplier", "factor"))
    if fields.float("rope.scaling.attn_factor", 1.0) != 1:
        raise ValueError(f"{fields.path}: rope.scaling.attn_factor of latent attention is not supported, only 1.0")
    if not log or factor <= 1:
        return {}
    return {"attention_scale": width**-0.5 * magnitude(factor, round(log * 10, 8)) ** 2}


def _decimal(value: float) -> float:
    """A float32 as the shortest decimal that rounds to it."""
    return float(str(np.float32(value)))


def latent_metadata(config: ModelConfig) -> dict[str, Any]:
    """The keys of latent attention and of experts."""
    scale, rope = describe_scale(config, config.rope), config.rope
    if not config.rope_interleaved or (rope is not None and abs(rope.magnitude - 1) > 1e-6):
        what = "yarn that multiplies cosines" if config.rope_interleaved else "rope_interleaved=False"
        raise ValueError(f"GGUF files have no latent attention with {what}: write safetensors instead")
    found: dict[str, Any] = {
        "feed_forward_length": config.mlp_dim,
        "leading_dense_block_count": config.first_dense_layers,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.v_head_dim,
        "expert_shared_count": config.shared_experts,
        "expert_weights_scale": float(config.router_scale),
        "expert_weights_norm": config.normalize_router,
        "expert_gating_func": _SIGMOID if config.router_scores == "sigmoid" else 1,
        "expert_group_count": config.router_groups,
        "expert_group_used_count": config.router_top_groups,
    }
    if config.q_lora_rank:
        found["attention.q_lora_rank"] = config.q_lora_rank
    if scale:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * scale["mscale_all_dim"]
    return found


class GgufTensors:
    """The tensors of a file, those of W_kvb as one where they are split."""

    def __init__(self, file: Gguf):
        self.file = file
        self._split = {
            name.removesuffix(_SPLIT[0]) + _JOINED: (name, name.removesuffix(_SPLIT[0]) + _SPLIT[1])
            for name in file.names()
            if name.endswith(_SPLIT[0])
        }

    @property
    def parts(self) -> list[str]:
        """The tensors that are joined."""
        return [part for parts in self._split.values() for part in parts]

    def info(self, name: str) -> tuple[tuple[int, ...], str, str]:
        """Shape, dtype and storage."""
        if name not in self._split:
            return self.file.info(name).shape, "float32", self.file.info(name).kind
        (heads, rank, plain), (_, value, _) = (self.file.info(part).shape for part in self._split[name])
        return (heads * (plain + value), rank), "float32", self.file.info(self._split[name][0]).kind

    def load(self, name: str, *, exact: bool = True) -> Any:
        """The values, or codes: see `Gguf.read_quantized`."""
        if name not in self._split:
            quantized = self.file.read_quantized(name, exact=exact)
            return self.file.read(name) if quantized is None else quantized
        keys, values = (self.file.read(part) for part in self._split[name])
        both = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
        return both.reshape(-1, both.shape[-1])
