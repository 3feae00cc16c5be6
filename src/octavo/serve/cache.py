"""The key and value cache: one slot for each text."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from octavo._names import unknown_name
from octavo._typing import Array, Float, Shaped
from octavo.models import QKV, AttentionOptions, ModelConfig, layer_groups
from octavo.serve.cache_attention import CacheIndex
from octavo.serve.cache_kivi import KiviLayer
from octavo.serve.cache_layers import CacheLayer, LatentLayer, PositionLayer
from octavo.serve.cache_store import FLOAT, KVConfig

_LAYERS: dict[str, type[CacheLayer]] = {"dkv": PositionLayer, "heads_and_dkv": PositionLayer, "kivi": KiviLayer}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer for a number of slots, as a pytree.

    Every slot has a length of its own. A call of the model writes tokens at their positions and attends causally;
    values beyond a slot's length and those of other slots have no influence. A token at `max_length` or later makes its
    row NaN, or is an error where positions are concrete.

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

    layers: Mapping[str, CacheLayer]
    lengths: Shaped[Array, "slots"]
    """The number of tokens in each slot."""
    rows: Shaped[Array, "batch"] | None = None
    """The slots of the rows of the next call; None for all slots in order."""
    counts: Shaped[Array, "batch"] | None = None
    """The number of tokens in each row of the next call; the rest is padding. None for all."""
    max_length: int = dataclasses.field(default=0, metadata={"static": True})
    config: KVConfig = dataclasses.field(default=FLOAT, metadata={"static": True})
    by_token: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether the tokens of a call attend one after the other, with the bits of a call for each."""

    @classmethod
    def empty(cls, model: ModelConfig, config: KVConfig = FLOAT, *, slots: int, max_length: int) -> "KVCache":
        """An empty cache.

        Args:
            model: The model, whose layers are cached one by one.
            config: The precision of keys and values.
            slots: How many texts the cache holds.
            max_length: How many tokens each of them may have.
        """
        if slots < 1 or max_length < 1:
            raise ValueError(f"a cache has at least one slot and one position, got {slots} and {max_length}")
        make = _LAYERS[config.axis].empty
        model = model.replace(scan_layers=False)
        names = {layer: group.name for group in layer_groups(model) for layer in group.layers}
        if config.axis == "kivi" and model.kv_shared_layers:
            raise ValueError('"kivi" caches are not supported with kv_shared_layers: choose axis="dkv"')
        if config.latent:
            if not model.kv_lora_rank:
                raise ValueError("latent=True is for models with latent attention, and this one has no kv_lora_rank")
            make, latent = LatentLayer.empty, (model.kv_lora_rank + model.rotated, model.kv_lora_rank)
            layers = {name: make(config, slots, 1, latent, max_length) for name in names.values()}
            return cls(layers, jnp.zeros(slots, jnp.int32), max_length=max_length, config=config)
        layers = {}
        for layer, name in names.items():
            if model.kv_layer(layer) == layer:
                sizes = model.of_layer(layer)
                dims = (sizes.head_dim, sizes.v_head_dim or sizes.head_dim)
                layers[name] = make(config, slots, sizes.num_kv_heads, dims, max_length)
        return cls(layers, jnp.zeros(slots, jnp.int32), max_length=max_length, config=config)

    @property
    def is_latent(self) -> bool:
        """Whether latents are stored in place of keys and values."""
        return self.config.latent

    @property
    def slots(self) -> int:
        """The number of slots."""
        return self.lengths.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.layers))

    @property
    def bytes_per_token(self) -> float:
        """Bytes per position of one slot, in all layers; the float window of "kivi" is not counted."""
        return sum(layer.bytes_per_token for layer in self.layers.values())

    def at(self, rows: Any = None, *, counts: Any = None) -> "KVCache":
        """The same cache, whose next call has these slots as rows, with `counts` tokens in each."""
        as_ints = lambda x: None if x is None else jnp.asarray(x, jnp.int32)  # noqa: E731
        return dataclasses.replace(self, rows=as_ints(rows), counts=as_ints(counts))

    def with_lengths(self, lengths: Any) -> "KVCache":
        """The same cache with other lengths; a shorter one drops tokens."""
        return dataclasses.replace(self, lengths=jnp.asarray(lengths, jnp.int32))

    def positions(self, tokens: Shaped[Array, "batch length"]) -> Shaped[Array, "batch length"]:
        """Default positions of tokens: after those in the cache."""
        first = self.lengths if self.rows is None else self.lengths[self.rows]
        self._check(*tokens.shape)
        return first[:, None] + jnp.arange(tokens.shape[1], dtype=first.dtype)[None]

    def attend(
        self,
        layer: str,
        qkv: QKV,
        positions: Shaped[Array, "batch length"],
        options: AttentionOptions = AttentionOptions(),  # noqa: B008
    ) -> tuple[Float[Array, "batch length heads value_dim"], "KVCache"]:
        """Store and attend: see `octavo.models.Cache`."""
        if layer not in self.layers:
            raise ValueError(f"the cache has no layer {layer!r}: {unknown_name(layer, tuple(self.layers))}")
        self._check(*positions.shape)
        if not isinstance(positions, jax.core.Tracer) and positions.size:
            last = int(jnp.max(positions))
            if last >= self.max_length:
                raise ValueError(f"position {last} does not fit into a cache of max_length={self.max_length}")
        index = CacheIndex(positions.astype(jnp.int32), self.rows, self.counts, self.max_length, options, self.by_token)
        context, new = self.layers[layer].attend(qkv, index)
        lengths = index.ends
        if self.rows is not None:
            lengths = self.lengths.at[self.rows].set(lengths)
        return context, dataclasses.replace(self, layers={**self.layers, layer: new}, lengths=lengths)

    def _check(self, count: int, length: int) -> None:
        expected = self.slots if self.rows is None else self.rows.shape[0]
        if count != expected:
            raise ValueError(f"{count} rows of tokens for {expected} slots: say which by cache.at([...])")
        if length > self.max_length:
            raise ValueError(f"{length} tokens do not fit into a cache of max_length={self.max_length}")
