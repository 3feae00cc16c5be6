"""Encoders with bidirectional attention: BERT, RoBERTa, MPNet, DistilBERT and ModernBERT are configs of one module.

Devlin et al., BERT, arXiv:1810.04805. Layers are normalized after they are added (post-norm):
x = norm(x + attention(x)), then x = norm(x + wo(gelu(wi(x)))).
Song et al., MPNet, arXiv:2004.09297: scores have a learned bias by head and relative position, the same in all layers.
Warner et al., ModernBERT, arXiv:2412.13663: pre-norm with rotary positions, gated MLPs, and local attention in most
layers.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx

from octavo._config import Config, check_choices, check_least
from octavo._typing import Array, Bool, Float, PRNGKeyArray, Shaped
from octavo.models.attention import RotaryAngles, rotate
from octavo.models.bidirectional import attend_bidirectional, relative_bias
from octavo.models.config import DTYPES
from octavo.models.layers import ACTIVATIONS, Dense, Embed, LayerNorm, Mlp
from octavo.models.module_params import Params, abstract_module, bind, check_token_arrays, init_module

_SIZES = ("vocab_size", "emb_dim", "num_layers", "num_heads", "mlp_dim", "max_length")
_COUNTS = ("num_types", "relative_buckets", "sliding_window")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class EncoderConfig(Config):
    """The architecture of an encoder, validated when made; the defaults are those of BERT.

    >>> EncoderConfig(vocab_size=100, emb_dim=16, num_layers=2, num_heads=2, mlp_dim=32)
    EncoderConfig(vocab_size=100, emb_dim=16, num_layers=2, num_heads=2, mlp_dim=32)
    """

    vocab_size: int
    emb_dim: int
    num_layers: int
    num_heads: int
    mlp_dim: int
    max_length: int = 512
    """The number of tokens that a text can have."""
    num_types: int = 2
    """The number of token type embeddings: two for the sentences of a pair in BERT, 0 for none."""
    padding_id: int | None = None
    """A token that is not counted by learned positions, which begin after its id, as in RoBERTa and MPNet."""
    relative_buckets: int = 0
    """Buckets of relative positions with a learned bias of scores, as in MPNet; 0 for none."""
    rope_theta: float | None = None
    """The base of rotary frequencies, as in ModernBERT; None for learned position embeddings."""
    sliding_window: int = 0
    """How many tokens on either side a token attends to in layers with a window; 0 for all."""
    sliding_layers: tuple[bool, ...] = (True,)
    """Which layers have the window, as a pattern that is repeated."""
    sliding_rope_theta: float | None = None
    """The base of the rotary frequencies in layers with the window; by default that of the others."""
    activation: str = "gelu_exact"
    gated_mlp: bool = False
    """Whether MLPs are wo(activation(wi_0(x)) * wi_1(x)), and not wo(activation(wi_0(x)))."""
    norm_place: str = "post"
    """"post": attention and MLP are added to their input and the sum is normalized. "pre": their input is normalized,
    except that of the first attention, which the norm of the embeddings normalizes, and the last states."""
    norm_eps: float = 1e-12
    norm_bias: bool = True
    attention_bias: bool = True
    mlp_bias: bool = True
    dtype: str = "float32"
    """The dtype of activations; norms and softmax are float32."""
    weight_dtype: str = "float32"
    """The dtype of parameters."""

    def __post_init__(self):
        check_least(self, 1, *_SIZES)
        check_least(self, 0, *_COUNTS)
        check_choices(self, activation=ACTIVATIONS, norm_place=("post", "pre"), dtype=DTYPES, weight_dtype=DTYPES)
        for name in ("norm_eps", "rope_theta", "sliding_rope_theta"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name} is positive, got {value}")
        if self.emb_dim % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} does not divide emb_dim={self.emb_dim} into equal heads")
        if self.rope_theta is not None and self.head_dim % 2:
            raise ValueError(f"rotary positions rotate pairs of values, but heads have {self.head_dim}")
        if self.rope_theta is None and self.sliding_rope_theta is not None:
            raise ValueError("sliding_rope_theta needs rope_theta: positions are learned otherwise")
        if self.rope_theta is not None and self.padding_id is not None:
            raise ValueError("padding_id is for learned positions, but rope_theta makes them rotary")
        if not self.sliding_layers:
            raise ValueError("sliding_layers is the pattern of layers with a window: it has at least one entry")

    @property
    def head_dim(self) -> int:
        """The size of a head."""
        return self.emb_dim // self.num_heads

    @property
    def num_query_heads(self) -> int:
        """Every head has a query, a key and a value."""
        return self.num_heads

    num_kv_heads = num_query_heads

    @property
    def first_position(self) -> int:
        """The row of the position table that the first token has."""
        return 0 if self.padding_id is None else self.padding_id + 1

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer attends to a window only."""
        return self.sliding_window > 0 and self.sliding_layers[layer % len(self.sliding_layers)]


class Embeddings(nnx.Module):
    """norm(word + position + type), of those that the config has."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        table = functools.partial(Embed, size=config.emb_dim, dtype=config.weight_dtype, rngs=rngs, stddev=0.02)
        self.word = table(config.vocab_size)
        if config.rope_theta is None:
            self.position = table(config.first_position + config.max_length)
        if config.num_types:
            self.type = table(config.num_types)
        self.norm = _norm(config)
        self.config = config

    def __call__(
        self,
        tokens: Shaped[Array, "batch length"],
        types: Shaped[Array, "batch length"],
        mask: Bool[Array, "batch length"],
    ) -> Float[Array, "batch length size"]:
        rows = self.word(tokens, self.config.dtype)
        if self.config.num_types:
            rows = rows + self.type(types, self.config.dtype)
        if self.config.rope_theta is None:
            rows = rows + self.position(_positions(self.config, tokens, mask), self.config.dtype)
        return self.norm(rows)


class SelfAttention(nnx.Module):
    """out(softmax(query key^T / sqrt(head size) + bias) value) over the tokens of a mask."""

    def __init__(self, config: EncoderConfig, layer: int, *, rngs: nnx.Rngs):
        size, bias = config.emb_dim, config.attention_bias
        square = functools.partial(Dense, size, size, config.weight_dtype, rngs=rngs, use_bias=bias)
        self.query, self.key, self.value, self.out = square(), square(), square(), square()
        self.heads = config.num_heads
        self.window = config.sliding_window if config.is_sliding(layer) else 0
        self.theta = (config.sliding_rope_theta if self.window else None) or config.rope_theta

    def __call__(
        self,
        x: Float[Array, "batch length size"],
        mask: Bool[Array, "batch length"],
        bias: Float[Array, "heads length length"] | None,
    ) -> Float[Array, "batch length size"]:
        query, key, value = (
            dense(x).reshape(*x.shape[:2], self.heads, -1) for dense in (self.query, self.key, self.value)
        )
        if self.theta is not None:
            angles = _angles(self.theta, x.shape[1], query.shape[-1])
            query, key = rotate(query, angles), rotate(key, angles)
        context = attend_bidirectional(query, key, value, mask, window=self.window, bias=bias)
        return self.out(context.reshape(x.shape))


class EncoderLayer(nnx.Module):
    """norm(x + attention(x)), then norm(x + mlp(x)); or x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: EncoderConfig, layer: int, *, rngs: nnx.Rngs):
        self.self_attention = SelfAttention(config, layer, rngs=rngs)
        self.is_pre_norm = config.norm_place == "pre"
        self.has_norm = not (self.is_pre_norm and layer == 0)
        if self.has_norm:
            self.self_attention_norm = _norm(config)
        self.mlp = Mlp(
            config.emb_dim,
            config.mlp_dim,
            config.activation,
            config.weight_dtype,
            rngs=rngs,
            gain=1.0,
            has_gate=config.gated_mlp,
            use_bias=config.mlp_bias,
        )
        self.mlp_norm = _norm(config)

    def __call__(
        self,
        x: Float[Array, "batch length size"],
        mask: Bool[Array, "batch length"],
        bias: Float[Array, "heads length length"] | None,
    ) -> Float[Array, "batch length size"]:
        if self.is_pre_norm:
            x = x + self.self_attention(self.self_attention_norm(x) if self.has_norm else x, mask, bias)
            return x + self.mlp(self.mlp_norm(x))
        x = self.self_attention_norm(x + self.self_attention(x, mask, bias))
        return self.mlp_norm(x + self.mlp(x))


class EncoderModel(nnx.Module):
    """An encoder: the last hidden states of tokens.

    >>> config = EncoderConfig(vocab_size=50, emb_dim=16, num_layers=2, num_heads=2, mlp_dim=32)
    >>> EncoderModel(config, rngs=nnx.Rngs(0))(jnp.asarray([[3, 14, 15]]), jnp.ones((1, 3), bool)).shape
    (1, 3, 16)
    """

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        self.embeddings = Embeddings(config, rngs=rngs)
        if config.relative_buckets:
            self.relative_bias = Embed(
                config.relative_buckets, config.num_heads, config.weight_dtype, rngs=rngs, stddev=0.02
            )
        layers = {f"layers_{i}": EncoderLayer(config, i, rngs=rngs) for i in range(config.num_layers)}
        self.encoder = nnx.Dict(layers)
        if config.norm_place == "pre":
            self.norm = _norm(config)
        self.config = config

    def __call__(
        self,
        tokens: Shaped[Array, "batch length"],
        mask: Bool[Array, "batch length"],
        types: Shaped[Array, "batch length"] | None = None,
    ) -> Float[Array, "batch length size"]:
        """The last hidden states. `mask` is false for padding; `types` are the token types, 0 by default."""
        x = self.embeddings(tokens, jnp.zeros(tokens.shape, jnp.int32) if types is None else types, mask)
        bias = None
        if self.config.relative_buckets:
            bias = relative_bias(self.relative_bias.embedding[...].astype(jnp.float32), tokens.shape[1])
        for i in range(self.config.num_layers):
            x = self.encoder[f"layers_{i}"](x, mask, bias)
        return self.norm(x) if self.config.norm_place == "pre" else x


def encoder_params(config: EncoderConfig, key: PRNGKeyArray) -> Params:
    """Random parameters: nested dictionaries of arrays.

    >>> import jax
    >>> config = EncoderConfig(vocab_size=50, emb_dim=16, num_layers=2, num_heads=2, mlp_dim=32)
    >>> encoder_params(config, jax.random.key(0))["encoder"]["layers_0"]["mlp"]["wi_0"]["kernel"].shape
    (16, 32)
    """
    return init_module(EncoderModel, config, key)


def abstract_encoder_params(config: EncoderConfig) -> Params:
    """The shapes and dtypes of the parameters."""
    return abstract_module(EncoderModel, config)


def encoder_apply(config: EncoderConfig, params: Params, tokens: Any, mask: Any, types: Any = None) -> Array:
    """The last hidden states: a pure function that can be jitted, differentiated and quantized.

    >>> import jax, octavo
    >>> from octavo.models.pooling import mean_pool
    >>> config = EncoderConfig(vocab_size=50, emb_dim=16, num_layers=1, num_heads=2, mlp_dim=32)
    >>> low = octavo.quantized(functools.partial(encoder_apply, config), octavo.recipe("qat_int8"))
    >>> tokens = jnp.asarray([[3, 14, 15], [9, 2, 0]])
    >>> states = jax.jit(low)(encoder_params(config, jax.random.key(0)), tokens, tokens != 0)
    >>> mean_pool(states, tokens != 0).shape
    (2, 16)
    """
    tokens, mask = jnp.asarray(tokens), jnp.asarray(mask)
    if types is not None and not config.num_types:
        raise ValueError("types are given, but this encoder has no token types: num_types=0")
    types = jnp.zeros(tokens.shape, jnp.int32) if types is None else jnp.asarray(types)
    check_token_arrays({"tokens": tokens, "types": types})
    if mask.shape != tokens.shape:
        raise ValueError(f"mask has the shape of tokens, {tokens.shape}, got {mask.shape}")
    if tokens.shape[1] > config.max_length:
        raise ValueError(
            f"texts of {tokens.shape[1]} tokens are longer than max_length={config.max_length}: truncate them"
        )
    return bind(EncoderModel, config, params)(tokens, mask.astype(bool), types)


def _norm(config: EncoderConfig) -> LayerNorm:
    return LayerNorm(config.emb_dim, config.norm_eps, config.weight_dtype, use_bias=config.norm_bias)


def _positions(
    config: EncoderConfig, tokens: Shaped[Array, "batch length"], mask: Bool[Array, "batch length"]
) -> Shaped[Array, "batch length"]:
    """The rows of the position table."""
    if config.padding_id is None:
        return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    counted = (mask & (tokens != config.padding_id)).astype(jnp.int32)
    return jnp.cumsum(counted, axis=1) * counted + config.padding_id


def _angles(theta: float, length: int, dim: int) -> RotaryAngles:
    position = jnp.arange(length)
    frequency = theta ** (-jnp.arange(dim // 2, dtype=jnp.float32) / (dim // 2))
    angle = position.astype(jnp.float32)[None, :, None, None] * frequency[None, None, None, :]
    return RotaryAngles(jnp.cos(angle), jnp.sin(angle), None, position[None])
