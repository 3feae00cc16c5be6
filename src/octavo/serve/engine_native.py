"""Decoding with one CPU kernel call per layer: see `octavo.kernels.decode_layer`.

The model's own code, which also runs prefill, is the reference, and is used if `unsupported_reason` returns a reason.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from octavo import kernels
from octavo._typing import Array, Float, Shaped
from octavo.models import ModelConfig, layer_groups
from octavo.models.attention import RotaryAngles
from octavo.ops import dot_general, embedding_lookup
from octavo.ops.lowerings import cpu_ffi
from octavo.qarray import QArray
from octavo.serve.cache import KVCache
from octavo.serve.cache_layers import PositionLayer

_MATRICES = (("self_attention", "query_key_value"), ("self_attention", "out"), ("mlp", "wi"), ("mlp", "wo"))


def unsupported_reason(config: ModelConfig, params: Any, cache: KVCache, rules: Any = ()) -> str | None:
    """Why the kernels cannot decode this model; None if they can."""
    if not kernels.available():
        return kernels.status()
    if jax.default_backend() != "cpu":
        return f"the kernel runs on CPUs, not on {jax.default_backend()}"
    if rules:
        return "matmuls are quantized by rules"
    if config.num_experts > 1 or not config.fused:
        return "the kernel needs fused weights, and has no experts"
    if variants := config.variants():
        return f"the kernel does not know {', '.join(variants)}"
    if config.activation != "silu" or config.dtype != "float32":
        return f"the kernel computes silu in float32, not {config.activation} in {config.dtype}"
    kv = cache.config
    is_int8 = kv.keys == kv.values == "int8" and kv.axis == "dkv"
    if not is_int8 and (kv.keys is not None or kv.values is not None or kv.dtype != "float32"):
        return "the kernel keeps keys and values in float32, or in int8 with a scale for each head"
    for group in layer_groups(config):
        for part, name in _MATRICES:
            q = params["decoder"][group.name][part][name]["kernel"]
            reason = cpu_ffi.unsupported_matrix(q) if isinstance(q, QArray) else "the kernel takes quantized weights"
            if reason is not None:
                return f"{group.name}/{part}/{name}: {reason}"
    return None


def decode(
    config: ModelConfig, params: Any, tokens: Shaped[Array, "slots"], cache: KVCache
) -> tuple[Float[Array, "slots vocab"], KVCache]:
    """The logits after the last token of each slot, and the cache with those tokens added."""
    positions = cache.lengths
    angles = RotaryAngles.of(config, positions[:, None], None, max_length=cache.max_length)
    cos, sin = (angle.reshape(positions.shape[0], -1) for angle in (angles.cos, angles.sin))
    x = embedding_lookup(params["token_embedder"]["embedding"].astype(jnp.float32), tokens)
    layers = dict(cache.layers)
    for group in layer_groups(config):
        layer = layers[group.name]
        assert isinstance(layer, PositionLayer)
        scales = None
        if layer.keys.scale is not None and layer.values.scale is not None:
            scales = kernels.CacheScales(layer.keys.scale, layer.values.scale)
        x, keys, values, scales = kernels.decode_layer(
            *(x, cos, sin, positions, layer.keys.codes, layer.values.codes),
            _weights(params["decoder"][group.name]),
            scales,
            heads=config.num_query_heads,
            epsilon=config.norm_eps,
            limit=cache.max_length,
        )
        key_scale, value_scale = scales or (None, None)
        layers[group.name] = PositionLayer(
            dataclasses.replace(layer.keys, codes=keys, scale=key_scale),
            dataclasses.replace(layer.values, codes=values, scale=value_scale),
        )
    return _logits(config, params, x), dataclasses.replace(cache, layers=layers, lengths=positions + 1)


def _weights(params: Any) -> kernels.LayerWeights:
    attention = params["self_attention"]
    wide = lambda tree, leaf: tree[leaf].astype(jnp.float32) if leaf in tree else None  # noqa: E731
    return kernels.LayerWeights(
        params["pre_self_attention_layer_norm"]["scale"].astype(jnp.float32),
        cpu_ffi.matrix(attention["query_key_value"]["kernel"]),
        cpu_ffi.matrix(attention["out"]["kernel"]),
        params["post_self_attention_layer_norm"]["scale"].astype(jnp.float32),
        cpu_ffi.matrix(params["mlp"]["wi"]["kernel"]),
        cpu_ffi.matrix(params["mlp"]["wo"]["kernel"]),
        bias=wide(attention["query_key_value"], "bias"),
        query_norm=wide(attention.get("query_norm", {}), "scale"),
        key_norm=wide(attention.get("key_norm", {}), "scale"),
    )


def _logits(config: ModelConfig, params: Any, x: Float[Array, "slots size"]) -> Float[Array, "slots vocab"]:
    scale = params["decoder"]["decoder_norm"]["scale"].astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + config.norm_eps)
    x = x * jnp.broadcast_to(scale, x.shape)
    head = params["token_embedder"]["embedding"] if config.tied_logits else params["decoder"]["logits_dense"]["kernel"]
    return dot_general(x, head.astype(jnp.float32), (((1,), (1 if config.tied_logits else 0,)), ((), ())))
