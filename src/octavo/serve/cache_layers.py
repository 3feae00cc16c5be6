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
    """What is stored of one layer, a pytree."""

    keys: Store

    @classmethod
    @abc.abstractmethod
    def empty(cls, config: KVConfig, slots: int, heads: int, dims: tuple[int, int], length: int) -> "CacheLayer":
        """Zeros for at least `length` positions; `dims` are the widths of a key and of a value."""

    @abc.abstractmethod
    def attend(self, qkv: QKV, index: CacheIndex) -> tuple[Float[Array, "batch length heads value_dim"], "CacheLayer"]:
        """Store keys and values, and attend causally to all that are stored."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one more position of one slot takes."""
        slots, length = self.keys.codes.shape[0], self.keys.length
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.stores)) / (slots * length)

    @property
    def stores(self) -> tuple[Store, ...]:
        """The tensors that have all positions."""
        return (self.keys,)


@dataclasses.dataclass(frozen=True)
class KeyValueLayer(CacheLayer):
    """A layer that stores values by themselves."""

    values: Store

    @property
    def stores(self) -> tuple[Store, ...]:
        return self.keys, self.values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PositionLayer(KeyValueLayer):
    """Every position is stored in float, or quantized with scales of its own."""

    @classmethod
    def empty(cls, config: KVConfig, slots: int, heads: int, dims: tuple[int, int], length: int) -> "PositionLayer":
        by_head = () if config.axis == "heads_and_dkv" else (1,)

        def store(name: str | None, time: int, dim: int) -> Store:
            axes = (0, *by_head, time)
            quantizer = None if name is None else Quantizer(get_cache_format(name), channelwise_axes=axes)
            return Store.empty(StorageSpec(time, quantizer, config.dtype), slots, heads, dim, length)

        return cls(store(config.keys, KEY_TIME, dims[0]), store(config.values, VALUE_TIME, dims[1]))

    def attend(
        self, qkv: QKV, index: CacheIndex
    ) -> tuple[Float[Array, "batch length heads value_dim"], "PositionLayer"]:
        """Store, then attend to what is stored: a token attends to its own key as all later ones will."""
        return _attend(self, qkv, index)

    def _stored(self, qkv: QKV, index: CacheIndex) -> "PositionLayer":
        stores = zip((self.keys, self.values), qkv.stored, strict=True)
        keys, values = (store.write(store.encode_like(x), index.rows, index.starts) for store, x in stores)
        # A barrier before reading: if fused with the read, the write would not be in place.
        return PositionLayer(*jax.lax.optimization_barrier((keys, values)))

    def _attended(self, qkv: QKV, index: CacheIndex) -> Float[Array, "batch length heads value_dim"]:
        part = KVBlock(self.keys, self.values, until=index.positions + 1, since=index.since, rows=index.rows)
        return attend(qkv.query, [part], index.valid, index.options)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentLayer(CacheLayer):
    """The latent of each position and the rotated part of its keys, stored once: values are the latents among keys."""

    rank: int = dataclasses.field(metadata={"static": True})
    """The width of a latent."""

    @classmethod
    def empty(cls, config: KVConfig, slots: int, heads: int, dims: tuple[int, int], length: int) -> "LatentLayer":
        keys = PositionLayer.empty(config, slots, heads, dims, length).keys
        return cls(keys, dims[1])

    def attend(self, qkv: QKV, index: CacheIndex) -> tuple[Float[Array, "batch length heads value_dim"], "LatentLayer"]:
        """Store, then attend to what is stored, as `PositionLayer`."""
        return _attend(self, qkv, index)

    def _stored(self, qkv: QKV, index: CacheIndex) -> "LatentLayer":
        keys = self.keys.write(self.keys.encode_like(qkv.stored[0]), index.rows, index.starts)
        return LatentLayer(jax.lax.optimization_barrier(keys), self.rank)

    def _attended(self, qkv: QKV, index: CacheIndex) -> Float[Array, "batch length heads value_dim"]:
        part = KVBlock(self.keys, self.rank, until=index.positions + 1, since=index.since, rows=index.rows)
        return attend(qkv.query, [part], index.valid, index.options)


def _attend[Layer: (PositionLayer, LatentLayer)](layer: Layer, qkv: QKV, index: CacheIndex) -> tuple[Array, Layer]:
    """Store, then attend to what is stored; with `by_token`, of one token after the other."""
    if not index.by_token:
        layer = layer if qkv.key is None else layer._stored(qkv, index)
        return layer._attended(qkv, index), layer
    parts = [(_token(qkv, i), index.token(i)) for i in range(index.positions.shape[1])]
    # The last one first: a position beyond the end is written over the last one, which then has its own token.
    for part in reversed(parts if qkv.key is not None else []):
        layer = layer._stored(*part)
    return jnp.concatenate([layer._attended(*part) for part in parts], axis=1), layer


def _token(qkv: QKV, number: int) -> QKV:
    """One token of each row."""
    return jax.tree.map(lambda x: x[:, number : number + 1], qkv)
