"""What the model asks of a key and value cache, and nothing about how one stores."""

from typing import Protocol, runtime_checkable

from octavo._typing import Array, Float, Shaped


@runtime_checkable
class Cache(Protocol):
    """Remembers the keys and values of each layer, and attends to them.

    A cache is a pytree. The model calls `attend` once for each layer in turn, and returns the cache it was given last.
    """

    def positions(self, tokens: Shaped[Array, "batch length"]) -> Shaped[Array, "batch length"]:
        """Where these tokens stand when nobody says: after those that are remembered."""
        ...

    def attend(
        self,
        layer: str,
        query: Float[Array, "batch length heads dim"],
        key: Float[Array, "batch length kv_heads dim"],
        value: Float[Array, "batch length kv_heads dim"],
        positions: Shaped[Array, "batch length"],
    ) -> tuple[Float[Array, "batch length heads dim"], "Cache"]:
        """Remember keys and values, and give each query's mean of the values up to its own position.

        `layer` is the name of the layer's parameters, `layers_0` and so on. Positions of a row follow one another.
        """
        ...
