"""The interface of a key and value cache, as the model calls it."""

from typing import Protocol, runtime_checkable

from octavo._typing import Array, Float, Shaped


@runtime_checkable
class Cache(Protocol):
    """Stores the keys and values of each layer, and attends to them.

    A cache is a pytree. The model calls `attend` for one layer after the other and returns the last cache.
    """

    def positions(self, tokens: Shaped[Array, "batch length"]) -> Shaped[Array, "batch length"]:
        """Default positions of tokens: after those in the cache."""
        ...

    def attend(
        self,
        layer: str,
        query: Float[Array, "batch length heads dim"],
        key: Float[Array, "batch length kv_heads dim"],
        value: Float[Array, "batch length kv_heads dim"],
        positions: Shaped[Array, "batch length"],
    ) -> tuple[Float[Array, "batch length heads dim"], "Cache"]:
        """Store keys and values, and attend causally to all that are stored.

        Args:
            layer: The name of the layer's parameters, such as `layers_0`.
            query: Queries of the new tokens.
            key: Keys of the new tokens.
            value: Values of the new tokens.
            positions: Positions of the new tokens, consecutive in each row.

        Returns:
            The context of each query, and the cache with the new tokens.
        """
        ...
