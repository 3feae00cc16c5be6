"""A decoder language model: embedding, layers of attention and MLP, logits.

Parameters are named as in MaxText, so that its rules fit: `decoder/layers/self_attention/query/kernel`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from octavo._typing import Array, Float, PRNGKeyArray, Shaped
from octavo.models.attention import Attention, Cache, RotaryAngles
from octavo.models.call_cache import CallCache
from octavo.models.config import ModelConfig
from octavo.models.latent_attention import LatentAttention
from octavo.models.layer_embed import LayerEmbed, LayerInput
from octavo.models.layers import NORMS, Dense, Embed, Mlp
from octavo.models.moe import MoeBlock
from octavo.models.remat import remat
from octavo.models.sharding import TOKEN_AXES, call_auto_sharded, shard_activation


class Aux(NamedTuple):
    """Auxiliary outputs of the model."""

    load_balance: Float[Array, ""]
    """The load-balancing loss, averaged over layers with experts: 1 for an even load; 0 without experts."""


class Group(NamedTuple):
    """Layers under one name: a scanned stack, or a single layer."""

    name: str
    layers: range
    is_moe: bool
    is_stack: bool


def layer_groups(config: ModelConfig) -> tuple[Group, ...]:
    """The layers in order, by the names of their parameters.

    >>> from octavo.models import ModelConfig
    >>> sizes = dict(vocab_size=8, emb_dim=8, num_query_heads=1, num_kv_heads=1, head_dim=8, mlp_dim=8)
    >>> [g.name for g in layer_groups(ModelConfig(**sizes, num_layers=5, unscanned_first=1, unscanned_last=1))]
    ['first_layers_0', 'layers', 'last_layers_0']
    >>> [g.name for g in layer_groups(ModelConfig(**sizes, num_layers=3, scan_layers=False))]
    ['layers_0', 'layers_1', 'layers_2']
    """
    start, stop = config.unscanned_first, config.num_layers - config.unscanned_last
    dense = min(max(config.first_dense_layers, start), stop)
    groups: list[Group] = []
    for name, layers, is_stack in (
        ("first_layers", range(start), False),
        ("dense_layers", range(start, dense), config.scan_layers),
        ("layers", range(dense, stop), config.scan_layers),
        ("last_layers", range(stop, config.num_layers), False),
    ):
        if is_stack and layers:
            groups.append(Group(name, layers, config.is_moe(layers[0]), True))
        else:
            groups += [Group(f"{name}_{n}", range(i, i + 1), config.is_moe(i), False) for n, i in enumerate(layers)]
    return tuple(groups)


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); or with norms of the outputs, or both: `norm_place`."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs):
        # Every layer adds twice to the residual stream; so scaled, its variance is the same at any depth.
        gain = (2 * config.num_layers) ** -0.5
        size, dtype = config.emb_dim, config.weight_dtype
        norm = functools.partial(NORMS[config.norm], size, config.norm_eps, dtype)
        # "both" and "pre" share the names of their input norms, as in MaxText.
        if config.norm_place != "post":
            self.pre_self_attention_layer_norm, self.post_self_attention_layer_norm = norm(), norm()
        if config.norm_place != "pre":
            self.self_attention_out_norm, self.mlp_out_norm = norm(), norm()
        attention = LatentAttention if config.kv_lora_rank else functools.partial(Attention, layer=layer)
        self.self_attention = attention(config, rngs=rngs, gain=gain)
        self.is_moe, self.config = config.is_moe(layer), config
        if self.is_moe:
            self.moe_block = MoeBlock(config, rngs=rngs, gain=gain)
        else:
            options: dict[str, Any] = {"fused": config.fused, "has_gate": config.gated_mlp, "use_bias": config.mlp_bias}
            options["hadamard"] = (config.hadamard_inputs, config.hadamard_mlp or config.hadamard_inputs)
            hidden = config.of_layer(layer).mlp_dim
            self.mlp = Mlp(size, hidden, config.activation, dtype, rngs=rngs, gain=gain, **options)
        if config.layer_embed_dim:
            self.layer_input = LayerInput(config, rngs=rngs, gain=gain)
        if config.layer_scale:
            self.layer_scale = nnx.Param(jnp.ones(1, jnp.dtype(dtype)))

    def __call__(
        self,
        x: Float[Array, "batch length size"],
        angles: RotaryAngles,
        cache: Cache | None = None,
        name: str = "",
        inputs: Float[Array, "batch length width"] | None = None,
    ) -> tuple[Float[Array, "batch length size"], Float[Array, ""], Cache | None]:
        before, after = self.config.norm_place != "post", self.config.norm_place != "pre"
        y, cache = self.self_attention(self.pre_self_attention_layer_norm(x) if before else x, angles, cache, name)
        x = x + (self.self_attention_out_norm(y) if after else y)
        y = self.post_self_attention_layer_norm(x) if before else x
        if self.is_moe:
            y, load_balance = call_auto_sharded(self.moe_block, y)
        else:
            y, load_balance = self.mlp(y), jnp.zeros((), jnp.float32)
        x = x + (self.mlp_out_norm(y) if after else y)
        if inputs is not None:
            x = x + self.layer_input(x, inputs)
        if self.config.layer_scale:
            x = x * jnp.broadcast_to(self.layer_scale[...].astype(x.dtype), x.shape)
        return shard_activation(self.config.placement, x, *TOKEN_AXES, "activation_embed"), load_balance, cache


class LayerAngles(NamedTuple):
    """The rotary angles and masks of layers that attend to all positions, and of those with a sliding window."""

    full: RotaryAngles
    sliding: RotaryAngles

    @classmethod
    def of(cls, config: ModelConfig, positions: Array, segments: Array | None, max_length: int = 0) -> "LayerAngles":
        """For tokens at these positions: see `RotaryAngles.of`."""
        full = RotaryAngles.of(config.full, positions, segments, max_length=max_length)
        if not config.sliding_window:
            return cls(full, full)
        return cls(full, RotaryAngles.of(config, positions, segments, sliding=True, max_length=max_length))


def _layer(config: ModelConfig, layer: int, key: PRNGKeyArray) -> DecoderLayer:
    return DecoderLayer(config, layer, rngs=nnx.Rngs(key))


class Stack(nnx.Module):
    """All layers and the final norm."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        keys = jax.random.split(rngs.params(), config.num_layers)
        for group in layer_groups(config):
            make = functools.partial(_layer, config, group.layers[0])
            group_keys = keys[group.layers.start : group.layers.stop]
            setattr(self, group.name, nnx.vmap(make)(group_keys) if group.is_stack else make(group_keys[0]))
        self.decoder_norm = NORMS[config.norm](config.emb_dim, config.norm_eps, config.weight_dtype)
        if not config.tied_logits:
            self.logits_dense = Dense(config.emb_dim, config.vocab_size, config.weight_dtype, rngs=rngs)
        self.config = config

    def __call__(
        self,
        x: Float[Array, "batch length size"],
        angles: LayerAngles,
        cache: Cache | None = None,
        inputs: Float[Array, "batch length layers width"] | None = None,
    ) -> tuple[Float[Array, "batch length size"], Aux, Cache | None]:
        total, groups = jnp.zeros((), jnp.float32), layer_groups(self.config)
        names = [group.name for group in groups for _ in group.layers]
        is_call = cache is None and self.config.kv_shared_layers > 0
        if is_call:
            assert angles.full.mask is not None
            assert angles.sliding.mask is not None
            cache = CallCache(angles.full.mask, angles.sliding.mask)
        for group in groups:
            layer = group.layers[0]
            here = angles.sliding if self.config.is_sliding(layer) else angles.full
            own = None if inputs is None else inputs[:, :, layer]
            if cache is not None:
                stored = names[self.config.kv_layer(layer)]
                x, load_balance, cache = getattr(self, group.name)(x, here, cache, stored, own)
                total = total + load_balance
                continue
            graph, params = nnx.split(getattr(self, group.name))

            def run(x: Array, params: Any, graph: Any = graph, rest: Any = (here, own)) -> tuple[Array, Array]:
                return split_batch(nnx.merge(graph, params), x, *rest, parts=self.config.batch_split)

            run = remat(run, self.config.remat, in_scan=group.is_stack)
            x, load_balance = jax.lax.scan(run, x, params) if group.is_stack else run(x, params)
            total = total + jnp.sum(load_balance)
        count = sum(map(self.config.is_moe, range(self.config.num_layers)))
        return self.decoder_norm(x), Aux(load_balance=total / max(count, 1)), None if is_call else cache


def split_batch(
    layer: Any, x: Array, angles: RotaryAngles, inputs: Array | None = None, *, parts: int
) -> tuple[Array, Array]:
    """A layer's result for a batch that is split into independent parts.

    Each part has every n-th row, so that rows stay on their devices.
    """
    if parts == 1:
        return layer(x, angles, inputs=inputs)[:2]
    rows = x.shape[0]
    if rows % parts:
        raise ValueError(f"{rows} rows cannot be split into batch_split={parts} equal parts: choose another batch size")

    def part(tree: Any, number: int) -> Any:
        split = lambda a: a.reshape(-1, parts, *a.shape[1:])[:, number] if np.shape(a)[:1] == (rows,) else a  # noqa: E731
        return jax.tree.map(split, tree)

    outs, balances = zip(*(layer(part(x, i), part(angles, i))[:2] for i in range(parts)), strict=True)
    return jnp.stack(outs, axis=1).reshape(x.shape), jnp.mean(jnp.stack(balances))


class Decoder(nnx.Module):
    """A language model.

    >>> from octavo.models import ModelConfig
    >>> sizes = dict(emb_dim=16, num_layers=2, num_query_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32)
    >>> model = Decoder(ModelConfig(vocab_size=50, **sizes), rngs=nnx.Rngs(0))
    >>> logits, aux = jax.jit(lambda tokens: model(tokens))(jnp.asarray([[3, 14, 15]]))
    >>> logits.shape
    (1, 3, 50)
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        # A normalized vector has the length sqrt(emb_dim): tied logits begin with a variance of one.
        stddev = config.emb_dim**-0.5 if config.tied_logits else 1.0
        self.token_embedder = Embed(config.vocab_size, config.emb_dim, config.weight_dtype, rngs=rngs, stddev=stddev)
        if config.learned_positions:
            size = (config.learned_positions, config.emb_dim)
            self.position_embedder = Embed(*size, config.weight_dtype, rngs=rngs, stddev=stddev)
        if config.layer_embed_dim:
            self.layer_embedder = LayerEmbed(config, rngs=rngs)
        self.decoder = Stack(config, rngs=rngs)
        self.config = config

    def __call__(
        self,
        tokens: Shaped[Array, "batch length"],
        positions: Shaped[Array, "batch length"] | None = None,
        segments: Shaped[Array, "batch length"] | None = None,
    ) -> tuple[Float[Array, "batch length vocab"], Aux]:
        """Next-token logits in float32, and auxiliary outputs.

        Attention is causal within a segment; documents packed into one row differ in their `segments`. `positions` are
        those of rotary embeddings, by default from 0 on.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        if segments is None:
            segments = jnp.zeros(tokens.shape, jnp.int32)
        x = shard_activation(self.config.placement, self.embed(tokens, positions), *TOKEN_AXES, "activation_embed")
        inputs = self.layer_embedder(tokens, x) if self.config.layer_embed_dim else None
        x, aux, _ = self.decoder(x, LayerAngles.of(self.config, positions, segments), None, inputs)
        return self.logits(x), aux

    def call_with_cache(
        self,
        tokens: Shaped[Array, "batch length"],
        positions: Shaped[Array, "batch length"] | None,
        cache: Cache,
        last: Shaped[Array, "batch"] | None = None,
    ) -> tuple[Float[Array, "batch _length vocab"], Aux, Cache]:
        """The same for tokens that follow those in a cache, and the cache with them added.

        `last` is the index in each row of the one token whose logits are wanted.
        """
        if positions is None:
            positions = cache.positions(tokens)
        max_length = getattr(cache, "max_length", 0)
        x = self.embed(tokens, positions, max_length)
        # Computed once: the compiler would fuse the angles into every layer.
        angles = LayerAngles.of(self.config, positions, None, max_length)
        cos_sin = jax.lax.optimization_barrier([(a.cos, a.sin) for a in angles])
        angles = LayerAngles(*(a._replace(cos=c, sin=s) for a, (c, s) in zip(angles, cos_sin, strict=True)))
        inputs = self.layer_embedder(tokens, x) if self.config.layer_embed_dim else None
        x, aux, new = self.decoder(x, angles, cache, inputs)
        assert new is not None
        if last is not None:
            x = jnp.take_along_axis(x, last[:, None, None], axis=1)
        return self.logits(x), aux, new

    def embed(self, tokens: Array, positions: Array, max_length: int = 0) -> Float[Array, "batch length size"]:
        """The embeddings of tokens, and of their positions where these are learned."""
        x, config = self.token_embedder(tokens, self.config.dtype), self.config
        if config.embedding_scale != 1:
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
        if not config.learned_positions:
            return x
        if max(tokens.shape[1], max_length) > config.learned_positions:
            raise ValueError(
                f"a text of {max(tokens.shape[1], max_length)} tokens is longer than the {config.learned_positions} "
                "positions that the model has embeddings for: reduce max_length"
            )
        return x + self.position_embedder(positions, config.dtype)

    def logits(self, x: Float[Array, "batch length size"]) -> Float[Array, "batch length vocab"]:
        """Logits of the last layer's output."""
        if self.config.float32_logits:
            x = x.astype(jnp.float32)
        # The table has the dtype of x: where it is sharded, the all-gather is as wide.
        head = self.token_embedder.attend if self.config.tied_logits else self.decoder.logits_dense
        logits, cap = head(x, jnp.float32), self.config.logits_softcap
        logits = cap * jnp.tanh(logits / cap) if cap else logits
        return shard_activation(self.config.placement, logits, *TOKEN_AXES, "activation_vocab")
