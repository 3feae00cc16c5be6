"""Causal attention in which groups of query heads share a key and value head, with rotary positions.

Su et al., RoFormer, arXiv:2104.09864: (x_i, x_{i + d/2}) is turned by the angle position * theta^(-2i/d).
Ainslie et al., GQA, arXiv:2305.13245.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from octavo._typing import Array, Bool, Float, Shaped
from octavo.models.cached import Cache
from octavo.models.config import ModelConfig
from octavo.models.layers import Dense, RMSNorm
from octavo.models.placing import ROWS, place
from octavo.models.remat import named


class Places(NamedTuple):
    """Where the tokens of a batch stand, as attention needs it; the same for all layers."""

    cos: Float[Array, "batch length 1 half"]
    sin: Float[Array, "batch length 1 half"]
    mask: Bool[Array, "batch 1 1 query key"] | None
    """Which keys a query sees; None where a cache knows that."""
    positions: Shaped[Array, "batch length"]

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        positions: Shaped[Array, "batch length"],
        segments: Shaped[Array, "batch length"] | None,
    ) -> "Places":
        """Of tokens at these positions, each of which sees what came before it in its own segment.

        Without segments, what a token sees is left to a cache.
        """
        angle = positions.astype(jnp.float32)[..., None, None] * speeds(config)[None, None, None, :]
        if segments is None:
            return cls(jnp.cos(angle), jnp.sin(angle), None, positions)
        length = positions.shape[1]
        causal = jnp.tril(jnp.ones((1, length, length), bool))
        mask = causal & (segments[:, :, None] == segments[:, None, :])
        return cls(jnp.cos(angle), jnp.sin(angle), mask[:, None, None], positions)


def speeds(config: ModelConfig) -> Float[Array, "half"]:
    """By how much each pair of values is turned from one position to the next.

    `rope_scaling` slows those down, by its factor, that turn less than `low` times in the original length, leaves alone
    those that turn more than `high` times, and blends between the two: Llama 3.1.
    """
    half = config.head_dim // 2
    speed = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if config.rope_scaling is None:
        return speed
    factor, low, high, length = config.rope_scaling
    turns = speed * (length / (2 * math.pi))
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return speed * (kept + (1 - kept) / factor)


def rotate(x: Float[Array, "batch length heads dim"], places: Places) -> Float[Array, "batch length heads dim"]:
    """Turn each pair of values by its token's position."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * places.cos - second * places.sin, second * places.cos + first * places.sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """out(softmax(query key^T / sqrt(head_dim)) value), a head at a time."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, gain: float):
        self.heads, self.kv_heads, self.dim = config.num_query_heads, config.num_kv_heads, config.head_dim
        size, dtype, bias = config.emb_dim, config.weight_dtype, config.qkv_bias
        if config.fused:
            wide = (self.heads + 2 * self.kv_heads) * self.dim
            self.query_key_value = Dense(size, wide, dtype, rngs=rngs, use_bias=bias)
        else:
            self.query = Dense(size, self.heads * self.dim, dtype, rngs=rngs, use_bias=bias)
            self.key = Dense(size, self.kv_heads * self.dim, dtype, rngs=rngs, use_bias=bias)
            self.value = Dense(size, self.kv_heads * self.dim, dtype, rngs=rngs, use_bias=bias)
        self.out = Dense(self.heads * self.dim, size, dtype, rngs=rngs, gain=gain)
        if config.qk_norm:
            self.query_norm = RMSNorm(self.dim, config.norm_eps, dtype)
            self.key_norm = RMSNorm(self.dim, config.norm_eps, dtype)
        self.fused, self.qk_norm, self.config = config.fused, config.qk_norm, config

    def __call__(
        self, x: Float[Array, "batch length size"], places: Places, cache: Cache | None = None, layer: str = ""
    ) -> tuple[Float[Array, "batch length size"], Cache | None]:
        query, key, value = self.projected(x)
        query = place(self.config, query, *ROWS, "activation_heads", None)
        # Every query may see every key of its row: where lengths are cut, keys and values are gathered.
        kept = (ROWS[0], "activation_kv_length", "activation_kv_heads", None)
        key, value = place(self.config, key, *kept), place(self.config, value, *kept)
        if self.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, places), rotate(key, places)
        if cache is not None:
            context, cache = cache.attend(layer, query, key, value, places.positions)
        else:
            assert places.mask is not None
            context = attend(query, key, value, places.mask)
        context = named(context, "context")
        return named(self.out(context.reshape(*x.shape[:2], -1)), "out_proj"), cache

    def projected(self, x: Float[Array, "batch length size"]) -> list[Float[Array, "batch length _heads dim"]]:
        """Queries, keys and values by head."""
        if self.fused:
            ends = (self.heads * self.dim, (self.heads + self.kv_heads) * self.dim)
            parts = jnp.split(self.query_key_value(x), ends, axis=-1)
        else:
            parts = [self.query(x), self.key(x), self.value(x)]
        names = ("query_proj", "key_proj", "value_proj")
        by_head = (*x.shape[:2], -1, self.dim)
        return [named(part, name).reshape(by_head) for part, name in zip(parts, names, strict=True)]


def attend(
    query: Float[Array, "batch query heads dim"],
    key: Float[Array, "batch key kv_heads dim"],
    value: Float[Array, "batch key kv_heads dim"],
    mask: Bool[Array, "batch 1 1 query key"],
) -> Float[Array, "batch query heads dim"]:
    """Each query's mean of the values that it sees, weighted by the softmax of its likeness to their keys."""
    batch, length, heads, dim = query.shape
    kv_heads = key.shape[2]
    # The queries that share a key are rows of one matrix, and heads come first: with either left to the einsum, XLA's
    # CPU backend takes about half as long again.
    rows = (query * dim**-0.5).reshape(batch, length, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, -1, dim)
    key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    scores = jnp.einsum("bhqd,bhkd->bhqk", rows, key, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, kv_heads, -1, *mask.shape[-2:])
    scores = named(jnp.where(mask, scores, jnp.finfo(scores.dtype).min), "attention_scores")
    # The softmax is divided by its sum only after the product: fewer values to divide, and none to keep.
    parts = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    whole = jnp.sum(parts, axis=-1, keepdims=True)
    parts = parts.astype(value.dtype).reshape(batch, kv_heads, -1, key.shape[2])
    context = jnp.einsum("bhqk,bhkd->bhqd", parts, value).reshape(batch, kv_heads, -1, length, dim)
    context = (context.astype(jnp.float32) / whole).astype(value.dtype)
    return context.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, dim)
