"""Attention to what a cache holds: one softmax over all of its parts."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from octavo._typing import Array, Bool, Float, Shaped
from octavo.serve.cache_store import BLOCK, Store

_LOWEST = float(jnp.finfo(jnp.float32).min)


class Where(NamedTuple):
    """Where the tokens of one call stand."""

    positions: Shaped[Array, "batch length"]
    rows: Shaped[Array, "batch"] | None
    """Their slots; None if they are all in order."""
    counts: Shaped[Array, "batch"] | None
    """How many of each row are more than filling; None for all."""
    max_length: int

    @property
    def starts(self) -> Shaped[Array, "batch"]:
        """The first position of each row."""
        return self.positions[:, 0]

    @property
    def ends(self) -> Shaped[Array, "batch"]:
        """One past the last position of each row that counts."""
        return self.starts + (self.positions.shape[1] if self.counts is None else self.counts)

    @property
    def valid(self) -> Bool[Array, "batch length"]:
        """Whether a position is one that the cache has."""
        return self.positions < self.max_length


class Part(NamedTuple):
    """Keys and values, and which of them a query sees: those before `until`, or those that `seen` says."""

    keys: Store
    values: Store
    until: Shaped[Array, "batch query"] | None = None
    seen: Bool[Array, "batch query time"] | None = None


class Sums(NamedTuple):
    """A softmax that is not done: the largest score, the sum of exp(score - largest), and of that times values."""

    top: Float[Array, "batch heads rows 1"]
    total: Float[Array, "batch heads rows 1"]
    context: Float[Array, "batch heads rows dim"]


def attend(
    query: Float[Array, "batch query heads dim"], parts: Sequence[Part], valid: Bool[Array, "batch query"]
) -> Float[Array, "batch query heads dim"]:
    """Each query's mean of the values that it sees in all parts; NaN where a query is not valid.

    What a query does not see has no influence, whatever it holds. Long parts are gone through in blocks, as far as
    any query sees. A block of which a query sees nothing changes none of its sums by a bit, so that the length of one
    text does not touch the numbers of another.
    """
    batch, length, heads, dim = query.shape
    kv_heads = parts[0].keys.codes.shape[1]
    rows = (query.astype(jnp.float32) * dim**-0.5).reshape(batch, length, kv_heads, -1, dim)
    rows = rows.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, dim)
    sums = _of_part(rows, parts[0], length)
    for part in parts[1:]:
        sums = _merged(sums, _of_part(rows, part, length))
    context = (sums.context / sums.total).reshape(batch, kv_heads, -1, length, dim).transpose(0, 3, 1, 2, 4)
    context = jnp.where(valid[:, :, None, None, None], context, jnp.nan)
    return context.reshape(batch, length, heads, dim).astype(query.dtype)


def _of_part(rows: Array, part: Part, length: int) -> Sums:
    time = part.keys.length
    if part.until is None:
        assert part.seen is not None
        return _sums(rows, part.keys, part.values, part.seen, length)
    until = part.until[:, :, None]
    if time <= BLOCK:
        return _sums(rows, part.keys, part.values, jnp.arange(time)[None, None] < until, length)

    def block(number: Array, sums: Sums) -> Sums:
        start = number * BLOCK
        keys, values = part.keys.block(start, BLOCK), part.values.block(start, BLOCK)
        seen = start + jnp.arange(BLOCK)[None, None] < until
        return _merged(sums, _sums(rows, keys, values, seen, length))

    none = jnp.full((*rows.shape[:3], 1), _LOWEST, jnp.float32)
    start = Sums(none, jnp.zeros_like(none), jnp.zeros_like(rows))
    return jax.lax.fori_loop(0, jnp.minimum(jnp.max(until) + BLOCK - 1, time) // BLOCK, block, start)


def _merged(a: Sums, b: Sums) -> Sums:
    top = jnp.maximum(a.top, b.top)
    left, right = jnp.exp(a.top - top), jnp.exp(b.top - top)
    return Sums(top, a.total * left + b.total * right, a.context * left + b.context * right)


def _sums(rows: Array, keys: Store, values: Store, seen: Array, length: int) -> Sums:
    """Scales that are constant along a product are multiplied into scores and weights: less work than into codes."""
    floats, scale = keys.folded()
    scores = jnp.einsum("bhqd,bhdt->bhqt", rows, floats)
    if scale is not None:
        scores = scores * scale
    shape = scores.shape
    # A finite lowest value: a query that sees nothing of one part must not make NaN of it.
    scores = jnp.where(seen[:, None, None], scores.reshape(*shape[:2], -1, length, shape[-1]), _LOWEST).reshape(shape)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    floats, scale = values.folded()
    anyone = jnp.any(seen, axis=1)
    if scale is not None:
        weights = weights * jnp.where(anyone[:, None, None], scale, 0)
    # A weight of zero does not undo a value that is not finite.
    floats = jnp.where(anyone[:, None, :, None], floats, 0)
    return Sums(top, total, jnp.einsum("bhqt,bhtd->bhqd", weights, floats))
