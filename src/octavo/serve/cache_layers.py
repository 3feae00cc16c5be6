"""The layers of a cache, and those in which every position is stored alike."""

import abc
import dataclasses

import jax
import jax.numpy as jnp

from octavo._typing import Array, Float
from octavo.models import QKV
from octavo.qarray import Quantizer
from octavo.serve.cache_attention import CacheIndex, KVBlock, attend
from octavo.serve.cache_store import KEY_TIME, VALUE_TIME, KVConfig, StorageSpec, Store, get_cache_format


@dataclasses.dataclass(frozen=True)
class CacheLayer(abc.ABC):
    """Keys and values of one layer, a pytree."""

    keys: Store
    values: Store

    @classmethod
    @abc.abstractmethod
    def empty(cls, config: KVConfig, slots: int, heads: int, dim: int, length: int) -> "CacheLayer":
        """Zeros for at least `length` positions."""

    @abc.abstractmethod
    def attend(self, qkv: QKV, index: CacheIndex) -> tuple[Float[Array, "batch length heads dim"], "CacheLayer"]:
        """Store keys and values, and attend causally to all that are stored."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one more position of one slot takes."""
        slots, length = self.values.codes.shape[0], self.values.length
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((self.keys, self.values))) / (slots * length)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PositionLayer(CacheLayer):
    """Every position is stored in float, or quantized with scales of its own."""

    @classmethod
    def empty(cls, config: KVConfig, slots: int, heads: int, dim: int, length: int) -> "PositionLayer":
        by_head = () if config.axis == "heads_and_dkv" else (1,)

        def store(name: str | None, time: int) -> Store:
            axes = (0, *by_head, time)
            quantizer = None if name is None else Quantizer(get_cache_format(name), channelwise_axes=axes)
            return Store.empty(StorageSpec(time, quantizer, config.dtype), slots, heads, dim, length)

        return cls(store(config.keys, KEY_TIME), store(config.values, VALUE_TIME))

    def attend(self, qkv: QKV, index: CacheIndex) -> tuple[Float[Array, "batch length heads dim"], "PositionLayer"]:
        """Store, then attend to what is stored: a token attends to its own key as all later ones will."""
        if not index.by_token:
            layer = self._stored(qkv, index)
            return layer._attended(qkv, index), layer
        parts = [(_token(qkv, i), index.token(i)) for i in range(index.positions.shape[1])]
        layer = self
        # The last one first: a position beyond the end is written over the last one, which then has its own token.
        for part in reversed(parts):
            layer = layer._stored(*part)
        return jnp.concatenate([layer._attended(*part) for part in parts], axis=1), layer

    def _stored(self, qkv: QKV, index: CacheIndex) -> "PositionLayer":
        keys = self.keys.write(self.keys.encode_like(qkv.key), index.rows, index.starts)
        values = self.values.write(self.values.encode_like(qkv.value), index.rows, index.starts)
        # A barrier before reading: if fused with the read, the write would not be in place.
        return PositionLayer(*jax.lax.optimization_barrier((keys, values)))

    def _attended(self, qkv: QKV, index: CacheIndex) -> Float[Array, "batch length heads dim"]:
        part = KVBlock(self.keys, self.values, until=index.positions + 1, since=index.since, rows=index.rows)
        return attend(qkv.query, [part], index.valid, index.options)


def _token(qkv: QKV, number: int) -> QKV:
    """One token of each row."""
    return jax.tree.map(lambda x: x[:, number : number + 1], qkv)
