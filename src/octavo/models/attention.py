"""Causal grouped-query attention with rotary position embeddings.

Su et al., RoFormer, arXiv:2104.09864: (x_i, x_{i + d/2}) is rotated by the angle position * theta^(-2i/d).
Ainslie et al., GQA, arXiv:2305.13245.
"""

import functools
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from octavo._typing import Array, Bool, Float, Shaped
from octavo.models.config import ModelConfig
from octavo.models.layers import NORMS, Dense, rms
from octavo.models.remat import name_result
from octavo.models.sharding import TOKEN_AXES, shard_activation
from octavo.ops.hadamard import walsh_hadamard


class QKV(NamedTuple):
    """Queries, keys and values by head."""

    query: Float[Array, "batch length heads dim"]
    key: Float[Array, "batch length kv_heads dim"] | None
    value: Float[Array, "batch length kv_heads value_dim"] | None
    """None, as keys, in layers that attend to those of another one."""

    @property
    def stored(self) -> tuple[Array, Array]:
        """Keys and values of a layer that has its own."""
        assert self.key is not None
        assert self.value is not None
        return self.key, self.value


class AttentionOptions(NamedTuple):
    """What the attention of a layer has in addition to queries, keys and values."""

    window: int = 0
    """How many of the last positions a query attends to, its own included; 0 for all."""
    softcap: float = 0.0
    """Scores s become softcap * tanh(s / softcap); 0 for no cap."""
    sinks: Float[Array, "heads"] | None = None
    """A score of each head that takes part in the softmax without a value."""

    def cap(self, scores: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """The capped scores."""
        return self.softcap * jnp.tanh(scores / self.softcap) if self.softcap else scores


_PLAIN = AttentionOptions()


@runtime_checkable
class Cache(Protocol):
    """Stores the keys and values of each layer, and attends to them.

    A cache is a pytree. The model calls `attend` for one layer after the other and returns the last cache.
    """

    def positions(self, tokens: Shaped[Array, "batch length"]) -> Shaped[Array, "batch length"]:
        """Default positions of tokens: after those in the cache."""
        ...

    def attend(
        self, layer: str, qkv: QKV, positions: Shaped[Array, "batch length"], options: AttentionOptions = _PLAIN
    ) -> tuple[Float[Array, "batch length heads value_dim"], "Cache"]:
        """Store keys and values, and attend causally to all that are stored.

        Args:
            layer: The name of the parameters of the layer whose keys and values these are, such as `layers_0`.
            qkv: Queries, keys and values of the new tokens; without keys and values, the layer has stored them already.
            positions: Positions of the new tokens, consecutive in each row.
            options: A window, a cap of scores, sinks.

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

    window: int = 0
    """How many of the last positions a query attends to; 0 for all."""

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        positions: Shaped[Array, "batch length"],
        segments: Shaped[Array, "batch length"] | None,
        *,
        sliding: bool = False,
        max_length: int = 0,
    ) -> "RotaryAngles":
        """For tokens at these positions, with a causal mask within segments; without segments there is no mask.

        `sliding` is for layers with a window, `max_length` for texts that may become longer than this call.
        """
        length = positions.shape[1]
        frequencies, magnitude = rotary_frequencies(config, length=max(length, max_length), sliding=sliding)
        angle = positions.astype(jnp.float32)[..., None, None] * frequencies[None, None, None, :]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        if magnitude != 1:
            cos, sin = cos * magnitude, sin * magnitude
        window = config.sliding_window if sliding else 0
        if segments is None:
            return cls(cos, sin, None, positions, window)
        causal = jnp.tril(jnp.ones((1, length, length), bool))
        if window:
            causal &= ~jnp.tril(jnp.ones((1, length, length), bool), -window)
        mask = causal & (segments[:, :, None] == segments[:, None, :])
        return cls(cos, sin, mask[:, None, None], positions, window)


def rotary_frequencies(
    config: ModelConfig, *, length: int = 0, sliding: bool = False
) -> tuple[Float[Array, "half"], float]:
    """The rotation of each pair of values from one position to the next, and what cosines and sines are multiplied by.

    Args:
      config: The model.
      length: The length of the text, on which some kinds of scaling depend.
      sliding: Whether they are those of layers with a window.
    """
    half = config.rotated // 2
    local = sliding and config.sliding_rope_theta is not None
    theta = config.sliding_rope_theta if local and config.sliding_rope_theta else config.rope_theta
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if config.rope is None or local:
        return frequency, 1.0
    return frequency * config.rope.multipliers(theta, 2 * half, length), config.rope.magnitude


def rotate(
    x: Float[Array, "batch length heads dim"], angles: RotaryAngles, *, interleaved: bool = False
) -> Float[Array, "batch length heads dim"]:
    """Rotate each pair of values by its angle; values beyond the angles are kept.

    Interleaved pairs come out in the order of halves, which dot products of queries and keys do not depend on.
    """
    half = angles.cos.shape[-1]
    if half == 0:
        return x
    wide = x.astype(jnp.float32)
    first, second, rest = jnp.split(wide, (half, 2 * half), axis=-1)
    if interleaved:
        pairs = wide[..., : 2 * half].reshape(*x.shape[:-1], half, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    rotated = (first * angles.cos - second * angles.sin, second * angles.cos + first * angles.sin, rest)
    return jnp.concatenate(rotated if rest.shape[-1] else rotated[:2], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """out(softmax(query key^T / sqrt(head_dim)) value) for each head."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, gain: float, layer: int = 0):
        self.has_kv = config.kv_layer(layer) == layer
        self.shares_kv = config.full_shared_kv and not config.is_sliding(layer)
        config = config.of_layer(layer)
        self.heads, self.kv_heads, self.dim = config.num_query_heads, config.num_kv_heads, config.head_dim
        size, dtype, bias = config.emb_dim, config.weight_dtype, config.qkv_bias
        blocks = config.hadamard_inputs
        dense = functools.partial(Dense, size, dtype=dtype, rngs=rngs, use_bias=bias, hadamard=blocks)
        self.fused = config.fused and self.has_kv and not self.shares_kv
        if self.fused:
            self.query_key_value = dense((self.heads + 2 * self.kv_heads) * self.dim)
        else:
            self.query = dense(self.heads * self.dim)
            if self.has_kv:
                self.key = dense(self.kv_heads * self.dim)
            if self.has_kv and not self.shares_kv:
                self.value = dense(self.kv_heads * self.dim)
        inputs, bias = self.heads * self.dim, config.out_bias
        self.out = Dense(inputs, size, dtype, rngs=rngs, gain=gain, use_bias=bias, hadamard=blocks)
        if config.qk_norm:
            wide = config.qk_norm_wide
            self.query_norm = NORMS["rms"](self.dim * (self.heads if wide else 1), config.norm_eps, dtype)
            if self.has_kv:
                self.key_norm = NORMS["rms"](self.dim * (self.kv_heads if wide else 1), config.norm_eps, dtype)
        if config.attention_sinks:
            self.sinks = nnx.Param(jnp.zeros(self.heads, jnp.dtype(dtype)))
        self.qk_norm, self.config = config.qk_norm, config

    def __call__(
        self, x: Float[Array, "batch length size"], angles: RotaryAngles, cache: Cache | None = None, layer: str = ""
    ) -> tuple[Float[Array, "batch length size"], Cache | None]:
        query, key, value = self.project(x)
        query = shard_activation(self.config.placement, query, *TOKEN_AXES, "activation_heads", None)
        # A query attends to all keys of its row: where the length is sharded, keys and values are all-gathered.
        kv_axes = (TOKEN_AXES[0], "activation_kv_length", "activation_kv_heads", None)
        interleaved, block = self.config.rope_interleaved, self.config.hadamard_keys
        if self.qk_norm:
            query = self.normalize(query, self.query_norm)
        query = rotate(query, angles, interleaved=interleaved)
        query = walsh_hadamard(query, block) if block else query
        if key is not None and value is not None:
            key, value = (shard_activation(self.config.placement, x, *kv_axes) for x in (key, value))
            key = rotate(self.normalize(key, self.key_norm) if self.qk_norm else key, angles, interleaved=interleaved)
            key = walsh_hadamard(key, block) if block else key
            value = rms(value, self.config.norm_eps) if self.config.value_norm else value
        if self.config.attention_scale is not None:
            query = query * (self.config.attention_scale * self.dim**0.5)
        sinks = self.sinks[...].astype(jnp.float32) if self.config.attention_sinks else None
        options = AttentionOptions(angles.window, self.config.attention_softcap, sinks)
        if cache is not None:
            context, cache = cache.attend(layer, QKV(query, key, value), angles.positions, options)
        else:
            assert angles.mask is not None
            assert key is not None
            assert value is not None
            context = attend(query, key, value, angles.mask, options)
        context = name_result(context, "context")
        return name_result(self.out(context.reshape(*x.shape[:2], -1)), "out_proj"), cache

    def normalize(self, x: Float[Array, "batch length heads dim"], norm: nnx.Module) -> Float[Array, "..."]:
        """Queries or keys normalized by head, or over all heads."""
        if not self.config.qk_norm_wide:
            return norm(x)
        return norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)

    def project(self, x: Float[Array, "batch length size"]) -> QKV:
        """Queries, keys and values by head."""
        if self.fused:
            ends = (self.heads * self.dim, (self.heads + self.kv_heads) * self.dim)
            parts = jnp.split(self.query_key_value(x), ends, axis=-1)
        else:
            parts = [self.query(x)]
            if self.has_kv:
                parts.append(self.key(x))
                parts.append(parts[1] if self.shares_kv else self.value(x))
        names = ("query_proj", "key_proj", "value_proj")
        by_head = (*x.shape[:2], -1, self.dim)
        found = [name_result(part, name).reshape(by_head) for part, name in zip(parts, names, strict=False)]
        return QKV(found[0], found[1], found[2]) if self.has_kv else QKV(found[0], None, None)


def attend(
    query: Float[Array, "batch query heads dim"],
    key: Float[Array, "batch key kv_heads dim"],
    value: Float[Array, "batch key kv_heads value_dim"],
    mask: Bool[Array, "batch 1 1 query key"],
    options: AttentionOptions = _PLAIN,
    *,
    bias: Float[Array, "heads query key"] | None = None,
) -> Float[Array, "batch query heads value_dim"]:
    """Attention with a mask, which has the window: softmax(query key^T / sqrt(dim) + bias) value."""
    batch, length, heads, dim = query.shape
    kv_heads = key.shape[2]
    # Queries of a group are rows of one matrix, and heads come first: with either left to the einsum, XLA's CPU backend
    # takes about half as long again.
    rows = (query * dim**-0.5).reshape(batch, length, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, -1, dim)
    key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    scores = jnp.einsum("bhqd,bhkd->bhqk", rows, key, preferred_element_type=jnp.float32)
    scores = options.cap(scores.reshape(batch, kv_heads, -1, *mask.shape[-2:]))
    if bias is not None:
        scores = scores + bias.reshape(1, kv_heads, -1, *mask.shape[-2:])
    scores = name_result(jnp.where(mask, scores, jnp.finfo(scores.dtype).min), "attention_scores")
    # Normalized after the matmul: fewer values to divide, and none to save.
    top = jnp.max(scores, axis=-1, keepdims=True)
    sinks = None if options.sinks is None else options.sinks.reshape(1, kv_heads, -1, 1, 1)
    top = jax.lax.stop_gradient(top if sinks is None else jnp.maximum(top, sinks))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    weights = weights.astype(value.dtype).reshape(batch, kv_heads, -1, key.shape[2])
    context = jnp.einsum("bhqk,bhkd->bhqd", weights, value).reshape(batch, kv_heads, -1, length, value.shape[-1])
    context = (context.astype(jnp.float32) / total).astype(value.dtype)
    return context.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, -1)
