"""The key and value cache: what a model has seen of each text, a slot for each of them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from octavo._config import Config
from octavo._typing import Array, Float, Shaped
from octavo.models import ModelConfig, layer_groups
from octavo.numerics import nearest_names
from octavo.serve.cache_layers import LAYERS, Layer, Where
from octavo.serve.cache_store import FORMATS


@dataclasses.dataclass(frozen=True, repr=False)
class KVConfig(Config):
    """In which precision keys and values are kept.

    `axis` says what shares a scale: "dkv", the values of one head at one position; "heads_and_dkv", those of all heads
    at one position (MaxText's names); "kivi", keys by channel over `group` positions and values by position, with at
    least the last `window` positions in float (arXiv:2402.02750).

    >>> KVConfig.of("int8")
    KVConfig(keys='int8', values='int8')
    """

    keys: str | None = None
    """None for float, or "int8", "int4", "int2", "fp8"."""
    values: str | None = None
    axis: str = "dkv"
    group: int = 32
    """Positions whose keys share a scale in each channel, by "kivi"."""
    window: int = 128
    """Positions that "kivi" keeps in float."""
    dtype: str = "float32"
    """Of what is kept in float."""

    @classmethod
    def of(cls, name: str | None, **fields: Any) -> "KVConfig":
        """Both keys and values in a format."""
        return cls(keys=name, values=name, **fields)

    def __post_init__(self):
        for name, known, none in (
            ("keys", FORMATS, True),
            ("values", FORMATS, True),
            ("axis", tuple(LAYERS), False),
            ("dtype", ("float32", "bfloat16", "float16"), False),
        ):
            given = getattr(self, name)
            if given not in known and not (none and given is None):
                raise ValueError(f"unknown {name} {given!r} of a cache: {nearest_names(given, known)}")
        if self.group < 1 or self.window < 0:
            raise ValueError(f"group is at least 1 and window at least 0, got {self.group} and {self.window}")
        if self.axis == "kivi" and self.keys is None and self.values is None:
            raise ValueError("axis='kivi' keeps old positions in low precision: give keys, values or both a format")
        if self.axis == "kivi" and "fp8" in (self.keys, self.values):
            raise ValueError("axis='kivi' stores a minimum and a maximum of integers: use int8, int4 or int2, not fp8")


FLOAT = KVConfig()
"""Keys and values as they come."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer for a number of slots, as a pytree.

    Every slot has a length of its own. A call of the model writes tokens at their positions and attends to all up to
    them; what lies beyond in a slot, or in other slots, has no influence. A token at `max_length` or later makes
    its row NaN, or is an error where positions are known.

    >>> from octavo.models import ModelConfig, apply, init_params
    >>> sizes = dict(emb_dim=16, num_layers=1, num_query_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32)
    >>> config = ModelConfig(vocab_size=50, scan_layers=False, **sizes)
    >>> cache = KVCache.empty(config, slots=1, max_length=16)
    >>> params = init_params(config, jax.random.key(0))
    >>> run = jax.jit(lambda params, tokens, cache: apply(config, params, tokens, cache=cache))
    >>> logits, aux, cache = run(params, jnp.asarray([[3, 14, 15]]), cache)
    >>> cache.lengths.tolist(), cache.bytes_per_token
    ([3], 64.0)
    """

    layers: Mapping[str, Layer]
    lengths: Shaped[Array, "slots"]
    """How many tokens each slot holds."""
    rows: Shaped[Array, "batch"] | None = None
    """The slots that the rows of the next call are; None if they are all slots in order."""
    counts: Shaped[Array, "batch"] | None = None
    """How many tokens of each row count in the next call; the rest only fill it up. None for all."""
    max_length: int = dataclasses.field(default=0, metadata={"static": True})
    config: KVConfig = dataclasses.field(default=FLOAT, metadata={"static": True})

    @classmethod
    def empty(cls, model: ModelConfig, config: KVConfig = FLOAT, *, slots: int, max_length: int) -> "KVCache":
        """A cache that remembers nothing yet."""
        if slots < 1 or max_length < 1:
            raise ValueError(f"a cache has at least one slot and one position, got {slots} and {max_length}")
        make = LAYERS[config.axis].empty
        names = [group.name for group in layer_groups(model.replace(scan_layers=False))]
        sizes = (slots, model.num_kv_heads, model.head_dim, max_length)
        layers = {name: make(config, *sizes) for name in names}
        return cls(layers, jnp.zeros(slots, jnp.int32), max_length=max_length, config=config)

    @property
    def slots(self) -> int:
        """How many texts there is room for."""
        return self.lengths.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.layers))

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one more position of one slot takes, in all layers; what "kivi" keeps in float is not counted."""
        return sum(layer.bytes_per_token for layer in self.layers.values())

    def at(self, rows: Any = None, *, counts: Any = None) -> "KVCache":
        """The same cache, of which the next call uses some slots, and of each row only the first tokens."""
        as_ints = lambda x: None if x is None else jnp.asarray(x, jnp.int32)  # noqa: E731
        return dataclasses.replace(self, rows=as_ints(rows), counts=as_ints(counts))

    def with_lengths(self, lengths: Any) -> "KVCache":
        """The same cache with other lengths: shorter ones forget."""
        return dataclasses.replace(self, lengths=jnp.asarray(lengths, jnp.int32))

    # What the model calls.

    def positions(self, tokens: Shaped[Array, "batch length"]) -> Shaped[Array, "batch length"]:
        """After the tokens that are remembered."""
        first = self.lengths if self.rows is None else self.lengths[self.rows]
        if first.shape[0] != tokens.shape[0]:
            raise ValueError(
                f"{tokens.shape[0]} rows of tokens for {first.shape[0]} slots: say which by cache.at([...])"
            )
        return first[:, None] + jnp.arange(tokens.shape[1], dtype=first.dtype)[None]

    def attend(
        self,
        layer: str,
        query: Float[Array, "batch length heads dim"],
        key: Float[Array, "batch length kv_heads dim"],
        value: Float[Array, "batch length kv_heads dim"],
        positions: Shaped[Array, "batch length"],
    ) -> tuple[Float[Array, "batch length heads dim"], "KVCache"]:
        """Remember, and attend: see `octavo.models.Cache`."""
        if layer not in self.layers:
            raise ValueError(f"the cache has no layer {layer!r}: {nearest_names(layer, tuple(self.layers))}")
        self._check(positions)
        where = Where(positions.astype(jnp.int32), self.rows, self.counts, self.max_length)
        context, new = self.layers[layer].attend(query, key, value, where)
        lengths = where.ends
        if self.rows is not None:
            lengths = self.lengths.at[self.rows].set(lengths)
        return context, dataclasses.replace(self, layers={**self.layers, layer: new}, lengths=lengths)

    def _check(self, positions: Array) -> None:
        count, length = positions.shape
        wanted = self.slots if self.rows is None else self.rows.shape[0]
        if count != wanted:
            raise ValueError(f"{count} rows of tokens for {wanted} slots: say which by cache.at([...])")
        if length > self.max_length:
            raise ValueError(f"{length} tokens do not fit into a cache of max_length={self.max_length}")
        if not isinstance(positions, jax.core.Tracer) and positions.size:
            last = int(jnp.max(positions))
            if last >= self.max_length:
                raise ValueError(f"position {last} does not fit into a cache of max_length={self.max_length}")
