"""The layers of a cache, by what shares a scale."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax

from octavo._typing import Array, Float
from octavo.qarray import Quantizer
from octavo.serve.cache_attention import CacheIndex, KVBlock, attend
from octavo.serve.cache_config import KVConfig
from octavo.serve.cache_kivi import KiviLayer
from octavo.serve.cache_store import KEY_TIME, VALUE_TIME, StorageSpec, Store, get_cache_format


@runtime_checkable
class Layer(Protocol):
    """Keys and values of one layer, a pytree."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one more position of one slot takes."""
        ...

    def attend(self, query: Array, key: Array, value: Array, index: CacheIndex) -> tuple[Array, "Layer"]:
        """Store keys and values `[batch, length, heads, dim]`, and attend causally to all that are stored."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PositionLayer:
    """Every position is stored in float, or quantized with scales of its own."""

    keys: Store
    values: Store

    @classmethod
    def empty(cls, config: KVConfig, slots: int, heads: int, dim: int, length: int) -> "PositionLayer":
        """Zeros."""
        return cls(*(Store.empty(spec, slots, heads, dim, length) for spec in _storage_specs(config)))

    @property
    def bytes_per_token(self) -> float:
        leaves = jax.tree.leaves(self)
        slots, length = self.values.codes.shape[0], self.values.codes.shape[VALUE_TIME]
        return sum(x.size * x.dtype.itemsize for x in leaves) / (slots * length)

    def attend(
        self,
        query: Float[Array, "batch length heads dim"],
        key: Float[Array, "batch length kv_heads dim"],
        value: Float[Array, "batch length kv_heads dim"],
        index: CacheIndex,
    ) -> tuple[Float[Array, "batch length heads dim"], "PositionLayer"]:
        """Store, then attend to what is stored: a token attends to its own key as all later ones will."""
        keys = Store.encode(self.keys.spec, key.transpose(0, 2, 3, 1))
        values = Store.encode(self.values.spec, value.transpose(0, 2, 1, 3))
        new = PositionLayer(
            self.keys.write(keys, index.rows, index.starts), self.values.write(values, index.rows, index.starts)
        )
        # A barrier before reading: if fused with the read, the write would not be in place.
        keys, values = jax.lax.optimization_barrier((new.keys, new.values))
        new = PositionLayer(keys, values)
        part = KVBlock(keys.select_slots(index.rows), values.select_slots(index.rows), until=index.positions + 1)
        return attend(query, [part], index.valid), new


def _storage_specs(config: KVConfig) -> tuple[StorageSpec, StorageSpec]:
    heads = () if config.axis == "heads_and_dkv" else (1,)

    def spec(name: str | None, time: int) -> StorageSpec:
        quantizer = None if name is None else Quantizer(get_cache_format(name), channelwise_axes=(0, *heads, time))
        return StorageSpec(time, quantizer, config.dtype)

    return spec(config.keys, KEY_TIME), spec(config.values, VALUE_TIME)


LAYERS: dict[str, type[PositionLayer] | type[KiviLayer]] = {
    "dkv": PositionLayer,
    "heads_and_dkv": PositionLayer,
    "kivi": KiviLayer,
}
"""The class of layers by `KVConfig.axis`."""
