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
from octavo.serve.cache import KVCache, KVConfig
from octavo.serve.cache_layers import PositionLayer

_MATRICES = (("self_attention", "query_key_value"), ("self_attention", "out"), ("mlp", "wi"), ("mlp", "wo"))


def unsupported_reason(config: ModelConfig, params: Any, kv: KVConfig, rules: Any = ()) -> str | None:
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
    config: ModelConfig, params: Any, tokens: Shaped[Array, "slots length"], cache: KVCache
) -> tuple[Float[Array, "slots length vocab"], KVCache]:
    """The logits after each of the new tokens of every slot, and the cache with those tokens added.

    Those of several tokens are those of one after the other, bit for bit.
    """
    slots, length = tokens.shape
    positions = cache.lengths[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    angles = RotaryAngles.of(config, positions, None, max_length=cache.max_length)
    cos, sin = (angle.reshape(positions.size, -1) for angle in (angles.cos, angles.sin))
    x = embedding_lookup(params["token_embedder"]["embedding"].astype(jnp.float32), tokens.reshape(-1))
    layers = dict(cache.layers)
    for group in layer_groups(config):
        layer = layers[group.name]
        assert isinstance(layer, PositionLayer)
        scales = None
        if layer.keys.scale is not None and layer.values.scale is not None:
            scales = kernels.CacheScales(layer.keys.scale, layer.values.scale)
        x, keys, values, scales = kernels.decode_layer(
            *(x, cos, sin, positions.reshape(-1), layer.keys.codes, layer.values.codes),
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
    logits = _logits(config, params, x.reshape(slots, length, -1))
    return logits, dataclasses.replace(cache, layers=layers, lengths=cache.lengths + length)


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


def _logits(
    config: ModelConfig, params: Any, x: Float[Array, "slots length size"]
) -> Float[Array, "slots length vocab"]:
    """Logits of the last layer's output.

    XLA's sums depend on the number of rows, so it computes one token of each slot at a time. A kernel's do not.
    """
    scale = params["decoder"]["decoder_norm"]["scale"].astype(jnp.float32)
    head = params["token_embedder"]["embedding"] if config.tied_logits else params["decoder"]["logits_dense"]["kernel"]
    head, dims = head.astype(jnp.float32), (((1,), (1 if config.tied_logits else 0,)), ((), ()))

    def norm(x: Array) -> Array:
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + config.norm_eps)
        return x * jnp.broadcast_to(scale, x.shape)

    (slots, length, size), of_kernel = x.shape, isinstance(head, QArray) and _is_by_kernel(head, x.shape)
    if length == 1 or not of_kernel:
        logits = [dot_general(norm(x[:, i]), head, dims) for i in range(length)]
        return jnp.stack(logits, axis=1)
    rows = jnp.stack([norm(x[:, i]) for i in range(length)], axis=1)
    return dot_general(rows.reshape(slots * length, size), head, dims).reshape(slots, length, -1)


def _is_by_kernel(head: QArray, shape: tuple[int, ...]) -> bool:
    """Whether a kernel multiplies all rows at once; packed codes of a tied head are summed differently for one row."""
    rows = shape[0] * shape[1]
    return head.qtype.bits == 8 and head.size >= cpu_ffi.FEWEST_WEIGHTS and rows <= cpu_ffi.MOST_FLOAT_ROWS
