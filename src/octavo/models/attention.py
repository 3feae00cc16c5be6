"""Causal grouped-query attention with rotary position embeddings.

Su et al., RoFormer, arXiv:2104.09864: (x_i, x_{i + d/2}) is rotated by the angle position * theta^(-2i/d).
Ainslie et al., GQA, arXiv:2305.13245.
"""

import functools
import math
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from octavo._typing import Array, Bool, Float, Shaped
from octavo.models.config import ModelConfig
from octavo.models.layers import Dense, RMSNorm
from octavo.models.remat import name_result
from octavo.models.sharding import TOKEN_AXES, shard_activation


class QKV(NamedTuple):
    """Queries, keys and values by head."""

    query: Float[Array, "batch length heads dim"]
    key: Float[Array, "batch length kv_heads dim"]
    value: Float[Array, "batch length kv_heads dim"]


@runtime_checkable
class Cache(Protocol):
    """Stores the keys and values of each layer, and attends to them.

    A cache is a pytree. The model calls `attend` for one layer after the other and returns the last cache.
    """

    def positions(self, tokens: Shaped[Array, "batch length"]) -> Shaped[Array, "batch length"]:
        """Default positions of tokens: after those in the cache."""
        ...

    def attend(
        self, layer: str, qkv: QKV, positions: Shaped[Array, "batch length"]
    ) -> tuple[Float[Array, "batch length heads dim"], "Cache"]:
        """Store keys and values, and attend causally to all that are stored.

        Args:
            layer: The name of the layer's parameters, such as `layers_0`.
            qkv: Queries, keys and values of the new tokens.
            positions: Positions of the new tokens, consecutive in each row.

        Returns:
            The context of each query, and the cache with the new tokens.
        """
        ...


class RotaryAngles(NamedTuple):
    """Rotary angles and the attention mask of a batch, shared by all layers."""

    cos: Float[Array, "batch length 1 half"]
    sin: Float[Array, "batch length 1 half"]
    mask: Bool[Array, "batch 1 1 query key"] | None
    """Which keys a query attends to; None with a cache, which masks by position."""
    positions: Shaped[Array, "batch length"]

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        positions: Shaped[Array, "batch length"],
        segments: Shaped[Array, "batch length"] | None,
    ) -> "RotaryAngles":
        """For tokens at these positions, with a causal mask within segments; without segments there is no mask."""
        angle = positions.astype(jnp.float32)[..., None, None] * rotary_frequencies(config)[None, None, None, :]
        if segments is None:
            return cls(jnp.cos(angle), jnp.sin(angle), None, positions)
        length = positions.shape[1]
        causal = jnp.tril(jnp.ones((1, length, length), bool))
        mask = causal & (segments[:, :, None] == segments[:, None, :])
        return cls(jnp.cos(angle), jnp.sin(angle), mask[:, None, None], positions)


def rotary_frequencies(config: ModelConfig) -> Float[Array, "half"]:
    """The rotation of each pair of values from one position to the next.

    As in Llama 3.1, `rope_scaling` divides by its factor the frequencies with fewer than `low` rotations in the
    original length, keeps those with more than `high`, and interpolates in between.
    """
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if config.rope_scaling is None:
        return frequency
    factor, low, high, length = config.rope_scaling
    rotations = frequency * (length / (2 * math.pi))
    unscaled = jnp.clip((rotations - low) / (high - low), 0, 1)
    return frequency * (unscaled + (1 - unscaled) / factor)


def rotate(x: Float[Array, "batch length heads dim"], angles: RotaryAngles) -> Float[Array, "batch length heads dim"]:
    """Rotate each pair of values by its angle."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * angles.cos - second * angles.sin, second * angles.cos + first * angles.sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """out(softmax(query key^T / sqrt(head_dim)) value) for each head."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, gain: float):
        self.heads, self.kv_heads, self.dim = config.num_query_heads, config.num_kv_heads, config.head_dim
        size, dtype, bias = config.emb_dim, config.weight_dtype, config.qkv_bias
        dense = functools.partial(Dense, size, dtype=dtype, rngs=rngs, use_bias=bias)
        if config.fused:
            self.query_key_value = dense((self.heads + 2 * self.kv_heads) * self.dim)
        else:
            self.query = dense(self.heads * self.dim)
            self.key, self.value = dense(self.kv_heads * self.dim), dense(self.kv_heads * self.dim)
        self.out = Dense(self.heads * self.dim, size, dtype, rngs=rngs, gain=gain)
        if config.qk_norm:
            self.query_norm = RMSNorm(self.dim, config.norm_eps, dtype)
            self.key_norm = RMSNorm(self.dim, config.norm_eps, dtype)
        self.fused, self.qk_norm, self.config = config.fused, config.qk_norm, config

    def __call__(
        self, x: Float[Array, "batch length size"], angles: RotaryAngles, cache: Cache | None = None, layer: str = ""
    ) -> tuple[Float[Array, "batch length size"], Cache | None]:
        query, key, value = self.project(x)
        query = shard_activation(self.config.placement, query, *TOKEN_AXES, "activation_heads", None)
        # A query attends to all keys of its row: where the length is sharded, keys and values are all-gathered.
        kv_axes = (TOKEN_AXES[0], "activation_kv_length", "activation_kv_heads", None)
        key, value = (shard_activation(self.config.placement, x, *kv_axes) for x in (key, value))
        if self.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, angles), rotate(key, angles)
        if cache is not None:
            context, cache = cache.attend(layer, QKV(query, key, value), angles.positions)
        else:
            assert angles.mask is not None
            context = attend(query, key, value, angles.mask)
        context = name_result(context, "context")
        return name_result(self.out(context.reshape(*x.shape[:2], -1)), "out_proj"), cache

    def project(self, x: Float[Array, "batch length size"]) -> QKV:
        """Queries, keys and values by head."""
        if self.fused:
            ends = (self.heads * self.dim, (self.heads + self.kv_heads) * self.dim)
            parts = jnp.split(self.query_key_value(x), ends, axis=-1)
        else:
            parts = [self.query(x), self.key(x), self.value(x)]
        names = ("query_proj", "key_proj", "value_proj")
        by_head = (*x.shape[:2], -1, self.dim)
        return QKV(*(name_result(part, name).reshape(by_head) for part, name in zip(parts, names, strict=True)))


def attend(
    query: Float[Array, "batch query heads dim"],
    key: Float[Array, "batch key kv_heads dim"],
    value: Float[Array, "batch key kv_heads dim"],
    mask: Bool[Array, "batch 1 1 query key"],
) -> Float[Array, "batch query heads dim"]:
    """Attention with a mask: softmax(query key^T / sqrt(dim)) value."""
    batch, length, heads, dim = query.shape
    kv_heads = key.shape[2]
    # Queries of a group are rows of one matrix, and heads come first: with either left to the einsum, XLA's CPU backend
    # takes about half as long again.
    rows = (query * dim**-0.5).reshape(batch, length, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, -1, dim)
    key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    scores = jnp.einsum("bhqd,bhkd->bhqk", rows, key, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, kv_heads, -1, *mask.shape[-2:])
    scores = name_result(jnp.where(mask, scores, jnp.finfo(scores.dtype).min), "attention_scores")
    # Normalized after the matmul: fewer values to divide, and none to save.
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights.astype(value.dtype).reshape(batch, kv_heads, -1, key.shape[2])
    context = jnp.einsum("bhqk,bhkd->bhqd", weights, value).reshape(batch, kv_heads, -1, length, dim)
    context = (context.astype(jnp.float32) / total).astype(value.dtype)
    return context.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, dim)
