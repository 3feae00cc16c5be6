"""Attention to the keys and values of a cache: one softmax over all of its stores."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from octavo._typing import Array, Bool, Float, Shaped
from octavo.models import AttentionOptions
from octavo.serve.cache_store import BLOCK, Store

_LOWEST = float(jnp.finfo(jnp.float32).min)


class CacheIndex(NamedTuple):
    """The slots and positions of the tokens of one call."""

    positions: Shaped[Array, "batch length"]
    rows: Shaped[Array, "batch"] | None
    """Slots of the rows; None for all slots in order."""
    counts: Shaped[Array, "batch"] | None
    """The number of tokens in each row, without padding; None for all."""
    max_length: int
    options: AttentionOptions = AttentionOptions()
    by_token: bool = False
    """Whether tokens attend one after the other."""

    def token(self, number: int) -> "CacheIndex":
        """That of one token of each row."""
        return self._replace(positions=self.positions[:, number : number + 1], counts=None, by_token=False)

    @property
    def since(self) -> Shaped[Array, "batch length"] | None:
        """The first position in the window of each query; None without one."""
        return self.positions - (self.options.window - 1) if self.options.window else None

    @property
    def starts(self) -> Shaped[Array, "batch"]:
        """The first position of each row."""
        return self.positions[:, 0]

    @property
    def ends(self) -> Shaped[Array, "batch"]:
        """One past the last position of each row, without padding."""
        return self.starts + (self.positions.shape[1] if self.counts is None else self.counts)

    @property
    def valid(self) -> Bool[Array, "batch length"]:
        """Whether a position is within the cache."""
        return self.positions < self.max_length


class KVBlock(NamedTuple):
    """Keys and values, and which a query attends to: those before `until` and from `since` on, or in `visible`."""

    keys: Store
    values: Store | int
    """The number of leading channels of keys that are the values, where they are not stored by themselves."""
    until: Shaped[Array, "batch query"] | None = None
    since: Shaped[Array, "batch query"] | None = None
    visible: Bool[Array, "batch query time"] | None = None
    rows: Shaped[Array, "batch"] | None = None
    """Slots of the rows, if the stores have others too."""

    @property
    def value_dim(self) -> int:
        """The width of a value."""
        return self.values if isinstance(self.values, int) else self.values.dim


class PartialSoftmax(NamedTuple):
    """A softmax over some of the keys: the maximum score, the sum of exp(score - maximum), and that times values."""

    top: Float[Array, "batch heads rows 1"]
    total: Float[Array, "batch heads rows 1"]
    context: Float[Array, "batch heads rows value_dim"]


def attend(
    query: Float[Array, "batch query heads dim"],
    parts: Sequence[KVBlock],
    valid: Bool[Array, "batch query"],
    options: AttentionOptions = AttentionOptions(),  # noqa: B008
) -> Float[Array, "batch query heads value_dim"]:
    """Attention over all parts with one softmax; NaN where a query is not valid.

    Masked entries have no influence, whatever they hold. Long parts are read in blocks, up to the last position that
    any query attends to. A block that is masked for a query leaves its sums bit-exact, so the results of one text do
    not depend on the length of another.
    """
    batch, length, heads, dim = query.shape
    kv_heads = parts[0].keys.codes.shape[1]
    rows = (query.astype(jnp.float32) * dim**-0.5).reshape(batch, length, kv_heads, -1, dim)
    rows = rows.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, dim)
    sums = _attend_block(rows, parts[0], length, options)
    for part in parts[1:]:
        sums = _merge(sums, _attend_block(rows, part, length, options))
    if options.sinks is not None:
        sinks = jnp.broadcast_to(
            options.sinks.reshape(1, kv_heads, -1, 1), (batch, kv_heads, heads // kv_heads, length)
        )
        sinks = sinks.reshape(sums.top.shape)
        sums = _merge(sums, PartialSoftmax(sinks, jnp.ones_like(sinks), jnp.zeros_like(sums.context)))
    context = (sums.context / sums.total).reshape(batch, kv_heads, -1, length, parts[0].value_dim)
    context = jnp.where(valid[:, :, None, None, None], context.transpose(0, 3, 1, 2, 4), jnp.nan)
    return context.reshape(batch, length, heads, -1).astype(query.dtype)


def _attend_block(rows: Array, part: KVBlock, length: int, options: AttentionOptions) -> PartialSoftmax:
    time = part.keys.length
    if part.until is None:
        assert part.visible is not None
        return _partial_softmax(rows, part.keys, part.values, part.visible, length, options)
    until, since = part.until[:, :, None], None if part.since is None else part.since[:, :, None]

    def is_visible(times: Array) -> Array:
        return times < until if since is None else (times < until) & (times >= since)

    if time <= BLOCK:
        visible = is_visible(jnp.arange(time)[None, None])
        keys = part.keys.select_slots(part.rows)
        values = part.values if isinstance(part.values, int) else part.values.select_slots(part.rows)
        return _partial_softmax(rows, keys, values, visible, length, options)
    # Of one slot, blocks are read where they are: a copy of all its positions would cost more than a short text.
    slot, all_keys, all_values = None, part.keys, part.values
    if part.rows is not None and part.rows.shape[0] == 1:
        slot = part.rows[0]
    else:
        all_keys = all_keys.select_slots(part.rows)
        all_values = all_values if isinstance(all_values, int) else all_values.select_slots(part.rows)

    def block(number: Array, sums: PartialSoftmax) -> PartialSoftmax:
        start = number * BLOCK
        keys = all_keys.block(start, BLOCK, slot)
        values = all_values if isinstance(all_values, int) else all_values.block(start, BLOCK, slot)
        visible = is_visible(start + jnp.arange(BLOCK)[None, None])
        return _merge(sums, _partial_softmax(rows, keys, values, visible, length, options))

    none = jnp.full((*rows.shape[:3], 1), _LOWEST, jnp.float32)
    context = jnp.zeros((*rows.shape[:3], part.value_dim), jnp.float32)
    start = PartialSoftmax(none, jnp.zeros_like(none), context)
    # Blocks before all windows are skipped.
    first = 0 if since is None else jnp.maximum(jnp.min(since), 0) // BLOCK
    return jax.lax.fori_loop(first, jnp.minimum(jnp.max(until) + BLOCK - 1, time) // BLOCK, block, start)


def _merge(a: PartialSoftmax, b: PartialSoftmax) -> PartialSoftmax:
    top = jnp.maximum(a.top, b.top)
    left, right = jnp.exp(a.top - top), jnp.exp(b.top - top)
    return PartialSoftmax(top, a.total * left + b.total * right, a.context * left + b.context * right)


def _partial_softmax(
    rows: Array, keys: Store, values: Store | int, visible: Array, length: int, options: AttentionOptions
) -> PartialSoftmax:
    """Scales that are constant along a contraction multiply scores and weights: less work than codes."""
    floats, scale = keys.unscaled()
    scores = jnp.einsum("bhqd,bhdt->bhqt", rows, floats)
    if scale is not None:
        scores = scores * scale
    scores = options.cap(scores)
    shape = scores.shape
    # The lowest finite value: a query for which all of a part is masked must not give NaN.
    scores = jnp.where(visible[:, None, None], scores.reshape(*shape[:2], -1, length, shape[-1]), _LOWEST).reshape(
        shape
    )
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if isinstance(values, int):
        floats = floats[:, :, :values].swapaxes(2, 3)
    else:
        floats, scale = values.unscaled()
    visible_to_any = jnp.any(visible, axis=1)
    if scale is not None:
        weights = weights * jnp.where(visible_to_any[:, None, None], scale, 0)
    # A weight of zero times a value that is not finite would be NaN.
    floats = jnp.where(visible_to_any[:, None, :, None], floats, 0)
    return PartialSoftmax(top, total, jnp.einsum("bhqt,bhtd->bhqd", weights, floats))
