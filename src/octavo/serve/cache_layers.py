"""How one layer of a cache stores and attends, by what shares a scale."""

import dataclasses
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import jax

from octavo._typing import Array, Float
from octavo.qarray import Quantizer
from octavo.serve.cache_attention import Part, Where, attend
from octavo.serve.cache_kivi import KiviLayer
from octavo.serve.cache_store import KEY_TIME, VALUE_TIME, Recipe, Store, format_of

if TYPE_CHECKING:
    from octavo.serve.cache import KVConfig


@runtime_checkable
class Layer(Protocol):
    """Keys and values of one layer, a pytree."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one more position of one slot takes."""
        ...

    def attend(self, query: Array, key: Array, value: Array, where: Where) -> tuple[Array, "Layer"]:
        """Remember `[batch, length, heads, dim]` keys and values, and attend to all up to each query."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PositionLayer:
    """Every position is stored by itself, in float or with scales of its own."""

    keys: Store
    values: Store

    @classmethod
    def empty(cls, config: "KVConfig", slots: int, heads: int, dim: int, length: int) -> "PositionLayer":
        """Zeros."""
        return cls(*(Store.empty(how, slots, heads, dim, length) for how in _recipes(config)))

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
        where: Where,
    ) -> tuple[Float[Array, "batch length heads dim"], "PositionLayer"]:
        """Store, then attend to what is stored: a token sees itself as all later ones will."""
        keys = Store.encoded(self.keys.recipe, key.transpose(0, 2, 3, 1))
        values = Store.encoded(self.values.recipe, value.transpose(0, 2, 1, 3))
        new = PositionLayer(
            self.keys.write(keys, where.rows, where.starts), self.values.write(values, where.rows, where.starts)
        )
        # Reading waits for writing: fused with it, the write would not be in place.
        keys, values = jax.lax.optimization_barrier((new.keys, new.values))
        new = PositionLayer(keys, values)
        part = Part(keys.of_rows(where.rows), values.of_rows(where.rows), until=where.positions + 1)
        return attend(query, [part], where.valid), new


def _recipes(config: "KVConfig") -> tuple[Recipe, Recipe]:
    heads = () if config.axis == "heads_and_dkv" else (1,)

    def recipe(name: str | None, time: int) -> Recipe:
        how = None if name is None else Quantizer(format_of(name), channelwise_axes=(0, *heads, time))
        return Recipe(time, how, config.dtype)

    return recipe(config.keys, KEY_TIME), recipe(config.values, VALUE_TIME)


LAYERS: dict[str, type[PositionLayer] | type[KiviLayer]] = {
    "dkv": PositionLayer,
    "heads_and_dkv": PositionLayer,
    "kivi": KiviLayer,
}
"""How a layer is kept, by `KVConfig.axis`."""
