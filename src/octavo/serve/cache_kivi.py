"""KIVI: old positions quantized, recent ones in float.

Liu et al., KIVI, arXiv:2402.02750: channels of keys have outliers, so keys share a scale and a zero point along time,
channel by channel over a group of positions; values have theirs at each position:

    codes = round((x - min) / scale),   scale = (max - min) / (2**bits - 1).

A text of n tokens has its first Q(n) quantized, the largest multiple of the group that leaves at least `window` in
float. A query at position p attends to what a text of p + 1 tokens has, so results do not depend on how a text was
split into calls.
"""

import dataclasses

import jax
import jax.numpy as jnp

from octavo._typing import Array, Float, Shaped
from octavo.models import QKV
from octavo.qarray import Quantizer
from octavo.serve.cache_attention import CacheIndex, KVBlock, attend
from octavo.serve.cache_layers import KeyValueLayer
from octavo.serve.cache_store import BLOCK, KEY_TIME, VALUE_TIME, KVConfig, StorageSpec, Store, get_cache_format


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KiviLayer(KeyValueLayer):
    """Complete groups as codes, and a ring of the last positions as floats: position s is at s modulo its size."""

    recent_keys: Store
    recent_values: Store
    group: int = dataclasses.field(metadata={"static": True})
    window: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def empty(cls, config: KVConfig, slots: int, heads: int, dims: tuple[int, int], length: int) -> "KiviLayer":
        if BLOCK % config.group:
            raise ValueError(
                f"a group of {config.group} does not divide {BLOCK}, the positions that are read at a time"
            )
        length = -(-length // config.group) * config.group
        # A group that has become old must still be complete in the ring: it is quantized again at each step.
        ring = config.window + 2 * config.group
        stores = [
            Store.empty(_storage_spec(config, name, time), slots, heads, dims[time == VALUE_TIME], size)
            for (name, time, size) in (
                *((config.keys, KEY_TIME, length), (config.values, VALUE_TIME, length)),
                *((None, KEY_TIME, ring), (None, VALUE_TIME, ring)),
            )
        ]
        return cls(*stores, group=config.group, window=config.window)

    @property
    def ring(self) -> int:
        """The size of the ring."""
        return self.recent_values.length

    def num_quantized(self, count: Shaped[Array, "*batch"]) -> Shaped[Array, "*batch"]:
        """How many of a text's tokens are quantized."""
        return jnp.maximum(count - self.window, 0) // self.group * self.group

    def attend(self, qkv: QKV, index: CacheIndex) -> tuple[Float[Array, "batch length heads value_dim"], "KiviLayer"]:
        """Store, quantize groups that have become old, and attend to both stores."""
        stores = (self.recent_keys, self.recent_values)
        now = [store.encode_like(x) for store, x in zip(stores, qkv.stored, strict=True)]
        # Available as floats: the ring before this call, and the tokens of this call.
        times = jnp.concatenate([self._ring_positions(index.starts), index.positions], axis=1)
        floats = [_concatenate(s.select_slots(index.rows), x) for s, x in zip(stores, now, strict=True)]
        # A barrier before reading: if fused with the read, the write would not be in place.
        quantized = jax.lax.optimization_barrier(self._quantize_old(floats, times, index))
        old = self.num_quantized(index.positions + 1)
        fresh = (times[:, None] >= old[:, :, None]) & (times[:, None] <= index.positions[:, :, None])
        if index.since is not None:
            fresh &= times[:, None] >= index.since[:, :, None]
        stored = [store.select_slots(index.rows) for store in quantized]
        parts = [
            KVBlock(*stored, until=old, since=index.since),
            KVBlock(floats[0], floats[1], visible=fresh & (times >= 0)[:, None]),
        ]
        context = attend(qkv.query, parts, index.valid, index.options)
        if qkv.query.shape[1] == 1 and index.counts is None:
            recent = [s.write(x, index.rows, index.starts % self.ring) for s, x in zip(stores, now, strict=True)]
        else:
            recent = [self._update_ring(s, x, times, index) for s, x in zip(stores, floats, strict=True)]
        return context, KiviLayer(*quantized, *recent, group=self.group, window=self.window)

    def _ring_positions(self, starts: Shaped[Array, "batch"]) -> Shaped[Array, "batch ring"]:
        """The position at each index of the ring before those from `starts` on; negative if there is none."""
        slot = jnp.arange(self.ring, dtype=starts.dtype)[None]
        last = starts[:, None] - 1
        return last - (last - slot) % self.ring

    def _quantize_old(self, floats: list[Store], times: Array, index: CacheIndex) -> list[Store]:
        """The quantized stores with all groups that this call has made old."""
        before, after = self.num_quantized(index.starts), self.num_quantized(index.ends)
        length = index.positions.shape[1]
        # One token makes at most one group old. It is quantized again at each step until the next one is.
        size = self.group if length == 1 else min((length // self.group + 1) * self.group, self.values.length)
        first = after - self.group if length == 1 else before
        start = jnp.clip(first, 0, self.values.length - size)
        wanted = start[:, None] + jnp.arange(size, dtype=start.dtype)[None]
        indices = jnp.argmax(times[:, None, :] == wanted[:, :, None], axis=-1)
        stores = []
        for store, x in zip((self.keys, self.values), floats, strict=True):
            new = Store.encode(store.spec, _take(x, indices))
            if length > 1:
                new = (
                    store.select_slots(index.rows)
                    .window(start, size)
                    .where(new, (wanted >= before[:, None]) & (wanted < after[:, None]))
                )
            stores.append(store.write(new, index.rows, start))
        return stores

    def _update_ring(self, store: Store, floats: Store, times: Array, index: CacheIndex) -> Store:
        """The ring after this call, without padding; `times` are the positions of the floats."""
        wanted = self._ring_positions(index.ends)
        # Positions are unique, except for those of empty entries.
        indices = jnp.argmax(times[:, None, :] == wanted[:, :, None], axis=-1)
        new = Store(_take(floats, indices), None, None, store.spec)
        return store.write(new, index.rows, jnp.zeros_like(index.starts))


def _storage_spec(config: KVConfig, name: str | None, time: int) -> StorageSpec:
    quantizer = None
    if name is not None:
        tiles = {KEY_TIME: config.group} if time == KEY_TIME else {}
        # Axis 2: the channels of keys, the positions of values.
        quantizer = Quantizer(get_cache_format(name).replace(narrow=False), (0, 1, 2), tiles, calibration="minmax")
    return StorageSpec(time, quantizer, config.dtype)


def _concatenate(a: Store, b: Store) -> Store:
    return Store(jnp.concatenate([a.codes, b.codes], axis=a.spec.time), None, None, a.spec)


def _take(store: Store, indices: Shaped[Array, "batch count"]) -> Float[Array, "batch heads a b"]:
    """Entries of a store of floats, by their indices in each row."""
    shape = (indices.shape[0], 1, 1, -1) if store.spec.time == KEY_TIME else (indices.shape[0], 1, -1, 1)
    return jnp.take_along_axis(store.codes, indices.reshape(shape), axis=store.spec.time)
