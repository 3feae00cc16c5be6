"""One decoding step of a decoder layer, one or more new tokens per sequence, with quantized matrices.

    x = x + out(attention(query_key_value(norm(x))))
    x = x + wo(silu(gate) * up),  [gate, up] = wi(norm(x))

Attention has rotary embeddings and a KV cache, to which the keys and values of the new tokens are written. Rows of a
matmul are summed independently, so the results of several tokens are those of one after the other, bit for bit. The
specification is `decode_layer_reference`; results differ only by the rounding of float32 sums.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from octavo._typing import Array, Float, Shaped
from octavo.kernels.library import LAYER_TARGET, require
from octavo.kernels.matvec import levels, reference

_NO_TABLE = (0.0,) * 16


class Matrix(NamedTuple):
    """A quantized matrix [K, N], as in `matvec`."""

    codes: Shaped[Array, "a b"]
    scale: Shaped[Array, "groups columns"]
    table: Sequence[float] | None = None
    """The values of 4-bit codes, which are packed along K."""
    zero: Shaped[Array, "groups columns"] | None = None
    outer: Float[Array, "columns"] | None = None


class CacheScales(NamedTuple):
    """The scales of keys and values that are codes of int8, -127 to 127: one for each head and position."""

    keys: Float[Array, "slots kv_heads 1 time"]
    values: Float[Array, "slots kv_heads time 1"]


class LayerWeights(NamedTuple):
    """The parameters of a layer; those that are None are absent."""

    norm_in: Float[Array, "size"]
    query_key_value: Matrix
    """The query, key and value heads, concatenated along N."""
    out: Matrix
    norm_mid: Float[Array, "size"]
    wi: Matrix
    """The gate and up projections, concatenated along N."""
    wo: Matrix
    bias: Float[Array, "mixed"] | None = None
    """The bias of queries, keys and values."""
    query_norm: Float[Array, "dim"] | None = None
    key_norm: Float[Array, "dim"] | None = None


def decode_layer(
    x: Float[Array, "rows size"],
    cos: Float[Array, "rows half"],
    sin: Float[Array, "rows half"],
    positions: Shaped[Array, "rows"],
    keys: Shaped[Array, "slots kv_heads dim time"],
    values: Shaped[Array, "slots kv_heads time dim"],
    weights: LayerWeights,
    scales: CacheScales | None = None,
    *,
    heads: int,
    epsilon: float,
    limit: int,
    isa: str = "",
    threads: int = 0,
) -> tuple[Array, Array, Array, CacheScales | None]:
    """One decoding step of a layer, on CPUs; gradients and vmap are unsupported.

    Args:
      x: the activations, one new token per row. Each slot has the same number of rows, one after the other.
      cos: the cosines of the rotary embedding.
      sin: the sines of the rotary embedding.
      positions: the position of each row's token, which attends to the entries of its slot before that and itself:
        those of a slot are consecutive. A position of `limit` or more gives NaN, and nothing is written for it.
      keys: the key cache in float32, or in int8 with `scales`; updated in place if it is donated.
      values: the value cache, updated in place if it is donated.
      weights: the parameters of the layer.
      scales: the scales of an int8 cache, updated in place if they are donated.
      heads: the number of query heads.
      epsilon: the epsilon of the norms.
      limit: the number of valid positions.
      isa: as in `matvec`.
      threads: as in `matvec`.

    Returns:
      The layer's output, and the caches and scales with the new tokens at their positions.
    """
    require()
    matrices = (weights.query_key_value, weights.out, weights.wi, weights.wo)
    tables = [weight.table or _NO_TABLE for weight in matrices]
    mix, out, wi, wo = ((weight.codes, weight.scale) for weight in matrices)
    none = jnp.zeros(0, jnp.float32)
    cache = (keys, values, *(scales or (none, none)))
    operands = [
        *(x, cos, sin, positions, *cache, weights.norm_in),
        *(*mix, *out, weights.norm_mid, *wi, *wo),
        *(none if part is None else part for part in (weights.bias, weights.query_norm, weights.key_norm)),
    ]
    if any(weight.zero is not None or weight.outer is not None for weight in matrices):
        operands += [part for weight in matrices for part in levels(weight.zero, weight.outer) or (none, none)]
    like = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)  # noqa: E731
    aliases = {4 + i: 1 + i for i in range(len(cache) if scales else 2)}
    call = jax.ffi.ffi_call(LAYER_TARGET, (like(x), *map(like, cache)), input_output_aliases=aliases)
    x, keys, values, *new = call(
        *operands,
        heads=np.int32(heads),
        limit=np.int32(limit),
        epsilon=np.float32(epsilon),
        tables=np.asarray(tables, np.float32).reshape(-1),
        isa=isa,
        threads=np.int32(threads),
    )
    return x, keys, values, CacheScales(*new) if scales else None


def decode_layer_reference(
    x: Float[Array, "rows size"],
    cos: Float[Array, "rows half"],
    sin: Float[Array, "rows half"],
    positions: Shaped[Array, "rows"],
    keys: Shaped[Array, "slots kv_heads dim time"],
    values: Shaped[Array, "slots kv_heads time dim"],
    weights: LayerWeights,
    scales: CacheScales | None = None,
    *,
    heads: int,
    epsilon: float,
    limit: int,
) -> tuple[Array, Array, Array, CacheScales | None]:
    """The reference of `decode_layer`, with the same arguments, in plain JAX."""
    rows, (slots, kv_heads, dim, time) = x.shape[0], keys.shape

    def norm(x: Array, scale: Array | None) -> Array:
        if scale is None:
            return x
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon) * jnp.broadcast_to(scale, x.shape)

    def rotated(x: Array) -> Array:
        first, second = jnp.split(x, 2, axis=-1)
        c, s = cos[:, None], sin[:, None]
        return jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1)

    def product(x: Array, weight: Matrix) -> Array:
        return reference(x, weight.codes, weight.scale, weight.zero, weight.outer, table=weight.table)

    mixed = product(norm(x, weights.norm_in), weights.query_key_value)
    if weights.bias is not None:
        mixed = mixed + jnp.broadcast_to(weights.bias, mixed.shape)
    query, key, value = jnp.split(mixed.reshape(rows, -1, dim), (heads, heads + kv_heads), axis=1)
    query, key = rotated(norm(query, weights.query_norm)), rotated(norm(key, weights.key_norm))
    slot, place = jnp.arange(rows) // (rows // slots), jnp.clip(positions, 0, time - 1)
    into = jnp.where(positions < limit, place, time)  # what is out of bounds is dropped
    if scales is not None:
        (key, key_scale), (value, value_scale) = _int8(key), _int8(value)
        scales = CacheScales(
            scales.keys.at[slot, :, :, into].set(key_scale), scales.values.at[slot, :, into].set(value_scale)
        )
    keys, values = keys.at[slot, :, :, into].set(key), values.at[slot, :, into].set(value)
    own_keys, own_values = keys[slot], values[slot]
    if scales is not None:
        own_keys = own_keys.astype(jnp.float32) * scales.keys[slot]
        own_values = own_values.astype(jnp.float32) * scales.values[slot]
    grouped = query.reshape(rows, kv_heads, -1, dim) * dim**-0.5
    scores = jnp.einsum("rkqd,rkdt->rkqt", grouped, own_keys, precision="highest")
    seen = jnp.arange(time)[None] <= place[:, None]
    weight = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
    context = jnp.einsum(
        "rkqt,rktd->rkqd", weight, jnp.where(seen[:, None, :, None], own_values, 0), precision="highest"
    )
    context = jnp.where(positions[:, None] < limit, context.reshape(rows, -1), jnp.nan)
    x = x + product(context, weights.out)
    gate, up = jnp.split(product(norm(x, weights.norm_mid), weights.wi), 2, axis=-1)
    return x + product(jax.nn.silu(gate) * up, weights.wo), keys, values, scales


def _int8(x: Float[Array, "rows heads dim"]) -> tuple[Array, Array]:
    """The codes of each head, and their scales."""
    absmax = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    scale = jnp.where(absmax == 0, 1.0, absmax * np.float32(1 / 127))
    return jnp.round(x * (1 / scale)).astype(jnp.int8), scale
