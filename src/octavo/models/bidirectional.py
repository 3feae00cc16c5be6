"""Attention to both sides: within windows, by blocks of queries for long texts, with biases by relative position."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from octavo._typing import Array, Bool, Float
from octavo.models.attention import attend

_FARTHEST = 128
"""The distance from which on all relative positions share a bucket."""


def attend_bidirectional(
    query: Float[Array, "batch length heads dim"],
    key: Float[Array, "batch length heads dim"],
    value: Float[Array, "batch length heads dim"],
    mask: Bool[Array, "batch length"],
    *,
    window: int = 0,
    bias: Float[Array, "heads length length"] | None = None,
    block: int = 512,
) -> Float[Array, "batch length heads dim"]:
    """Attention to the tokens of a mask: softmax(query key^T / sqrt(dim) + bias) value.

    Longer texts are computed in blocks of queries, one after the other, so that memory grows with their length and not
    with its square. With a window a block reads only the keys around it.

    Args:
      query: By head, as keys and values.
      key: The keys.
      value: The values.
      mask: False for padding.
      window: How many tokens on either side a query attends to; 0 for all.
      bias: Added to scores; then there is one block.
      block: The number of queries of a block.
    """
    batch, length, heads, dim = query.shape
    if length <= block or bias is not None:
        return attend(query, key, value, _visible(mask, length, window, 0), bias=bias)
    blocks = -(-length // block)
    span = block + 2 * window if window else length
    rows = _pad(query, 0, blocks * block - length)
    around = [_pad(x, window, blocks * block - length + window) if window else x for x in (key, value, mask)]

    def attend_block(start: Array) -> Array:
        queries = jax.lax.dynamic_slice_in_dim(rows, start, block, axis=1)
        keys, values, seen = (jax.lax.dynamic_slice_in_dim(x, start if window else 0, span, axis=1) for x in around)
        return attend(queries, keys, values, _visible(seen, block, window, window))

    found = jax.lax.map(attend_block, jnp.arange(blocks) * block)
    return found.transpose(1, 0, 2, 3, 4).reshape(batch, blocks * block, heads, dim)[:, :length]


def _visible(
    mask: Bool[Array, "batch key"], queries: int, window: int, first: int
) -> Bool[Array, "batch 1 1 query key"]:
    """Which keys each query attends to; the first query is at the position of key `first`."""
    keys = mask.shape[1]
    visible = jnp.broadcast_to(mask[:, None, None, None, :], (mask.shape[0], 1, 1, queries, keys))
    if not window:
        return visible
    distance = np.arange(queries)[:, None] + first - np.arange(keys)[None, :]
    return visible & (np.abs(distance) <= window)[None, None, None]


def _pad(x: Array, before: int, after: int) -> Array:
    return jnp.pad(x, ((0, 0), (before, after), *((0, 0),) * (x.ndim - 2)))


def relative_bias(table: Float[Array, "buckets heads"], length: int) -> Float[Array, "heads length length"]:
    """The bias of scores by head: the row of a table for the bucket of each relative position."""
    rows = table[relative_bucket(np.arange(1 - length, length), table.shape[0])]
    position = np.arange(length)
    return rows[position[None, :] - position[:, None] + (length - 1)].transpose(2, 0, 1)


def relative_bucket(distance: np.ndarray, buckets: int) -> np.ndarray:
    """The bucket of a key's position relative to the query's: near ones have their own, far ones share by logarithm.

    >>> relative_bucket(np.asarray([-200, -9, -1, 0, 1, 9, 200]), 32).tolist()
    [15, 8, 1, 0, 17, 24, 31]
    """
    half = buckets // 2
    near = half // 2
    size = np.abs(distance)
    far = np.log(np.maximum(size, 1).astype(np.float32) / np.float32(near)) / np.float32(math.log(_FARTHEST / near))
    far = near + (far * np.float32(half - near)).astype(np.int32)
    return np.where(distance > 0, half, 0) + np.where(size < near, size, np.minimum(far, half - 1))
