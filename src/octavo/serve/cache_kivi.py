"""Old positions in low precision and recent ones in float.

Liu et al., KIVI, arXiv:2402.02750: channels of keys have outliers, so keys share a scale and a zero point along time,
channel by channel over a group of positions; values have theirs at each position:

    codes = round((x - min) / scale),   scale = (max - min) / (2**bits - 1).

A text of n tokens has its first Q(n) in low precision, the largest multiple of the group that leaves at least `window`
in float. A query at position p sees what a text of p + 1 tokens has, so that it does not matter in which pieces a text
came in.
"""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from octavo._typing import Array, Float, Shaped
from octavo.qarray import Quantizer
from octavo.serve.cache_attention import Part, Where, attend
from octavo.serve.cache_store import BLOCK, KEY_TIME, VALUE_TIME, Recipe, Store, format_of

if TYPE_CHECKING:
    from octavo.serve.cache import KVConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KiviLayer:
    """Whole groups as codes, and a ring of the last positions as floats: position s lies at s modulo its size."""

    keys: Store
    values: Store
    recent_keys: Store
    recent_values: Store
    group: int = dataclasses.field(metadata={"static": True})
    window: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def empty(cls, config: "KVConfig", slots: int, heads: int, dim: int, length: int) -> "KiviLayer":
        """Zeros."""
        if BLOCK % config.group:
            raise ValueError(
                f"a group of {config.group} does not divide {BLOCK}, the positions that are read at a time"
            )
        whole = -(-length // config.group) * config.group
        # A group that has become old is still whole in the ring, when it is encoded once more at each step.
        ring = config.window + 2 * config.group
        plain = [Recipe(time, None, config.dtype) for time in (KEY_TIME, VALUE_TIME)]
        return cls(
            Store.empty(_recipe(config, config.keys, KEY_TIME), slots, heads, dim, whole),
            Store.empty(_recipe(config, config.values, VALUE_TIME), slots, heads, dim, whole),
            *(Store.empty(how, slots, heads, dim, ring) for how in plain),
            group=config.group,
            window=config.window,
        )

    @property
    def bytes_per_token(self) -> float:
        slots, length = self.values.codes.shape[0], self.values.codes.shape[VALUE_TIME]
        old = jax.tree.leaves((self.keys, self.values))
        return sum(x.size * x.dtype.itemsize for x in old) / (slots * length)

    @property
    def ring(self) -> int:
        """How many positions the ring has."""
        return self.recent_values.codes.shape[VALUE_TIME]

    def old(self, count: Shaped[Array, "*batch"]) -> Shaped[Array, "*batch"]:
        """How many of a text's tokens are in low precision."""
        return jnp.maximum(count - self.window, 0) // self.group * self.group

    def attend(
        self,
        query: Float[Array, "batch length heads dim"],
        key: Float[Array, "batch length kv_heads dim"],
        value: Float[Array, "batch length kv_heads dim"],
        where: Where,
    ) -> tuple[Float[Array, "batch length heads dim"], "KiviLayer"]:
        """Store, move what has become old, and attend to both."""
        length = query.shape[1]
        now = [
            Store.encoded(store.recipe, x)
            for store, x in (
                (self.recent_keys, key.transpose(0, 2, 3, 1)),
                (self.recent_values, value.transpose(0, 2, 1, 3)),
            )
        ]
        before = [store.of_rows(where.rows) for store in (self.recent_keys, self.recent_values)]
        # The floats at hand: the ring as it was, and the tokens of this call.
        times = jnp.concatenate([self._times(where.starts), where.positions], axis=1)
        floats = [_joined(a, b) for a, b in zip(before, now, strict=True)]
        moved = self._moved(floats, times, where)
        # Reading waits for writing: fused with it, the write would not be in place.
        moved = list(jax.lax.optimization_barrier(tuple(moved)))
        old = self.old(where.positions + 1)
        fresh = (times[:, None] >= old[:, :, None]) & (times[:, None] <= where.positions[:, :, None])
        parts = [
            Part(moved[0].of_rows(where.rows), moved[1].of_rows(where.rows), until=old),
            Part(floats[0], floats[1], seen=fresh & (times >= 0)[:, None]),
        ]
        context = attend(query, parts, where.valid)
        stores = (self.recent_keys, self.recent_values)
        if length == 1 and where.counts is None:
            recent = [s.write(x, where.rows, where.starts % self.ring) for s, x in zip(stores, now, strict=True)]
        else:
            recent = [self._turned(s, x, where) for s, x in zip(stores, floats, strict=True)]
        return context, KiviLayer(*moved, *recent, group=self.group, window=self.window)

    def _times(self, starts: Shaped[Array, "batch"]) -> Shaped[Array, "batch ring"]:
        """Which position lies at each place of the ring, before those from `starts` on; below 0 if none does."""
        place = jnp.arange(self.ring, dtype=starts.dtype)[None]
        last = starts[:, None] - 1
        return last - (last - place) % self.ring

    def _moved(self, floats: list[Store], times: Array, where: Where) -> list[Store]:
        """The stores of old positions, with all groups in them that this call has made old."""
        before, after = self.old(where.starts), self.old(where.ends)
        length = where.positions.shape[1]
        # One token makes at most one group old. It is encoded again at each step until the next one is.
        size = self.group if length == 1 else min((length // self.group + 1) * self.group, self.values.length)
        first = after - self.group if length == 1 else before
        start = jnp.clip(first, 0, self.values.length - size)
        wanted = start[:, None] + jnp.arange(size, dtype=start.dtype)[None]
        place = jnp.argmax(times[:, None, :] == wanted[:, :, None], axis=-1)
        stores = []
        for store, x in zip((self.keys, self.values), floats, strict=True):
            new = Store.encoded(store.recipe, _picked(x, place))
            if length > 1:
                new = (
                    store.of_rows(where.rows)
                    .window(start, size)
                    .replaced(new, (wanted >= before[:, None]) & (wanted < after[:, None]))
                )
            stores.append(store.write(new, where.rows, start))
        return stores

    def _turned(self, store: Store, floats: Store, where: Where) -> Store:
        """The ring after this call, of which only the tokens that count go in."""
        times = self._times(where.ends)
        known = jnp.concatenate([self._times(where.starts), where.positions], axis=1)
        # The last of equal ones: there are none, but for places that hold nothing.
        place = jnp.argmax(known[:, None, :] == times[:, :, None], axis=-1)
        new = Store(_picked(floats, place), None, None, store.recipe)
        return store.write(new, where.rows, jnp.zeros_like(where.starts))


def _recipe(config: "KVConfig", name: str | None, time: int) -> Recipe:
    if name is None:
        return Recipe(time, None, config.dtype)
    if time == KEY_TIME:
        how = Quantizer(_asymmetric(name), (0, 1, 2), {KEY_TIME: config.group}, calibration="minmax")
    else:
        how = Quantizer(_asymmetric(name), (0, 1, VALUE_TIME), calibration="minmax")
    return Recipe(time, how, config.dtype)


def _asymmetric(name: str):
    return format_of(name).replace(narrow=False)


def _joined(a: Store, b: Store) -> Store:
    return Store(jnp.concatenate([a.codes, b.codes], axis=a.recipe.time), None, None, a.recipe)


def _picked(store: Store, place: Shaped[Array, "batch count"]) -> Float[Array, "batch heads a b"]:
    """Positions of a store of floats, by their places in each row."""
    shape = (place.shape[0], 1, 1, -1) if store.recipe.time == KEY_TIME else (place.shape[0], 1, -1, 1)
    return jnp.take_along_axis(store.codes, place.reshape(shape), axis=store.recipe.time)
