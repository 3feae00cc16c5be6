"""The keys and values of a single call, for layers that attend to those of other layers."""

import dataclasses
from collections.abc import Mapping

import jax

from octavo._typing import Array, Bool, Float, Shaped
from octavo.models.attention import _PLAIN, QKV, AttentionOptions, attend


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CallCache:
    """A `Cache` of the tokens of the call only, unquantized, with the masks of layers without and with a window."""

    full: Bool[Array, "batch 1 1 query key"]
    sliding: Bool[Array, "batch 1 1 query key"]
    stored: Mapping[str, tuple[Array, Array]] = dataclasses.field(default_factory=dict)

    def positions(self, tokens: Shaped[Array, "batch length"]) -> Shaped[Array, "batch length"]:
        """A call with a `CallCache` has positions of its own."""
        raise ValueError("a CallCache has no positions: give those of the call")

    def attend(
        self, layer: str, qkv: QKV, positions: Shaped[Array, "batch length"], options: AttentionOptions = _PLAIN
    ) -> tuple[Float[Array, "batch length heads value_dim"], "CallCache"]:
        """Store and attend: see `octavo.models.Cache`."""
        stored = dict(self.stored)
        if qkv.key is not None:
            stored[layer] = qkv.stored
        mask = self.sliding if options.window else self.full
        return attend(qkv.query, *stored[layer], mask, options), dataclasses.replace(self, stored=stored)
