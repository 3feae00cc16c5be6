"""A BERT encoder with bidirectional attention, and pooling of its states to sentence embeddings.

Devlin et al., BERT, arXiv:1810.04805. Layers are normalized after they are added (post-norm):
x = norm(x + attention(x)), then x = norm(x + wo(gelu(wi(x)))).
Reimers and Gurevych, Sentence-BERT, arXiv:1908.10084: a text's vector is the mean of its tokens' last states.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from octavo._config import Config, check_choices, check_least
from octavo._typing import Array, Bool, Float, PRNGKeyArray, Shaped
from octavo.models.attention import attend
from octavo.models.config import DTYPES
from octavo.models.layers import Dense, Embed
from octavo.models.module_params import Params, abstract_module, bind, check_token_arrays, init_module

_SIZES = ("vocab_size", "emb_dim", "num_layers", "num_heads", "mlp_dim", "max_length", "num_types")

BERT_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}
"""Activations of an encoder's MLPs; "gelu" is the exact one, by the error function."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class BertConfig(Config):
    """The architecture of a `Bert`, validated when made.

    >>> BertConfig(vocab_size=100, emb_dim=16, num_layers=2, num_heads=2, mlp_dim=32)
    BertConfig(vocab_size=100, emb_dim=16, num_layers=2, num_heads=2, mlp_dim=32)
    """

    vocab_size: int
    emb_dim: int
    num_layers: int
    num_heads: int
    mlp_dim: int
    max_length: int = 512
    """The number of position embeddings."""
    num_types: int = 2
    """The number of token type embeddings: two, for the sentences of a pair."""
    activation: str = "gelu"
    norm_eps: float = 1e-12
    dtype: str = "float32"
    """The dtype of activations; norms and softmax are float32."""
    weight_dtype: str = "float32"
    """The dtype of parameters."""

    def __post_init__(self):
        check_least(self, 1, *_SIZES)
        check_choices(self, activation=BERT_ACTIVATIONS, dtype=DTYPES, weight_dtype=DTYPES)
        if not self.norm_eps > 0:
            raise ValueError(f"norm_eps is positive, got {self.norm_eps}")
        if self.emb_dim % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} does not divide emb_dim={self.emb_dim} into equal heads")


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias, in float32."""

    def __init__(self, size: int, eps: float, dtype: str):
        self.scale = nnx.Param(jnp.ones(size, jnp.dtype(dtype)))
        self.bias = nnx.Param(jnp.zeros(size, jnp.dtype(dtype)))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        normal = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.eps)
        scale, bias = (jnp.broadcast_to(p[...].astype(jnp.float32), x.shape) for p in (self.scale, self.bias))
        return (normal * scale + bias).astype(x.dtype)


class Embeddings(nnx.Module):
    """norm(word + position + type)."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        table = functools.partial(Embed, size=config.emb_dim, dtype=config.weight_dtype, rngs=rngs, stddev=0.02)
        self.word = table(config.vocab_size)
        self.position = table(config.max_length)
        self.type = table(config.num_types)
        self.norm = LayerNorm(config.emb_dim, config.norm_eps, config.weight_dtype)
        self.dtype = config.dtype

    def __call__(
        self, tokens: Shaped[Array, "batch length"], types: Shaped[Array, "batch length"]
    ) -> Float[Array, "batch length size"]:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        rows = self.word(tokens, self.dtype) + self.type(types, self.dtype) + self.position(positions, self.dtype)
        return self.norm(rows)


class SelfAttention(nnx.Module):
    """out(softmax(query key^T / sqrt(head size)) value) over all tokens of the mask."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        square = functools.partial(Dense, config.emb_dim, config.emb_dim, config.weight_dtype, rngs=rngs, use_bias=True)
        self.query, self.key, self.value, self.out = square(), square(), square(), square()
        self.heads = config.num_heads

    def __call__(
        self, x: Float[Array, "batch length size"], mask: Bool[Array, "batch length"]
    ) -> Float[Array, "batch length size"]:
        query, key, value = (
            dense(x).reshape(*x.shape[:2], self.heads, -1) for dense in (self.query, self.key, self.value)
        )
        visible = jnp.broadcast_to(mask[:, None, None, None, :], (x.shape[0], 1, 1, x.shape[1], x.shape[1]))
        return self.out(attend(query, key, value, visible).reshape(x.shape))


class Feedforward(nnx.Module):
    """wo(activation(wi(x)))."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.wi = Dense(config.emb_dim, config.mlp_dim, config.weight_dtype, rngs=rngs, use_bias=True)
        self.wo = Dense(config.mlp_dim, config.emb_dim, config.weight_dtype, rngs=rngs, use_bias=True)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "batch length size"]) -> Float[Array, "batch length size"]:
        return self.wo(BERT_ACTIVATIONS[self.activation](self.wi(x)))


class EncoderLayer(nnx.Module):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        norm = functools.partial(LayerNorm, config.emb_dim, config.norm_eps, config.weight_dtype)
        self.self_attention, self.self_attention_norm = SelfAttention(config, rngs=rngs), norm()
        self.mlp, self.mlp_norm = Feedforward(config, rngs=rngs), norm()

    def __call__(
        self, x: Float[Array, "batch length size"], mask: Bool[Array, "batch length"]
    ) -> Float[Array, "batch length size"]:
        x = self.self_attention_norm(x + self.self_attention(x, mask))
        return self.mlp_norm(x + self.mlp(x))


class Bert(nnx.Module):
    """A BERT encoder: the last hidden states of tokens.

    >>> config = BertConfig(vocab_size=50, emb_dim=16, num_layers=2, num_heads=2, mlp_dim=32)
    >>> Bert(config, rngs=nnx.Rngs(0))(jnp.asarray([[3, 14, 15]]), jnp.ones((1, 3), bool)).shape
    (1, 3, 16)
    """

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.embeddings = Embeddings(config, rngs=rngs)
        self.names = tuple(f"layers_{i}" for i in range(config.num_layers))
        self.encoder = nnx.Dict({name: EncoderLayer(config, rngs=rngs) for name in self.names})

    def __call__(
        self,
        tokens: Shaped[Array, "batch length"],
        mask: Bool[Array, "batch length"],
        types: Shaped[Array, "batch length"] | None = None,
    ) -> Float[Array, "batch length size"]:
        """The last hidden states. `mask` is false for padding; `types` are the token types, 0 by default."""
        x = self.embeddings(tokens, jnp.zeros(tokens.shape, jnp.int32) if types is None else types)
        for name in self.names:
            x = self.encoder[name](x, mask)
        return x


def bert_params(config: BertConfig, key: PRNGKeyArray) -> Params:
    """Random parameters: nested dictionaries of arrays.

    >>> config = BertConfig(vocab_size=50, emb_dim=16, num_layers=2, num_heads=2, mlp_dim=32)
    >>> bert_params(config, jax.random.key(0))["encoder"]["layers_0"]["mlp"]["wi"]["kernel"].shape
    (16, 32)
    """
    return init_module(Bert, config, key)


def abstract_bert_params(config: BertConfig) -> Params:
    """The shapes and dtypes of the parameters."""
    return abstract_module(Bert, config)


def bert_apply(config: BertConfig, params: Params, tokens: Any, mask: Any, types: Any = None) -> Array:
    """The last hidden states: a pure function that can be jitted, differentiated and quantized.

    >>> import octavo
    >>> config = BertConfig(vocab_size=50, emb_dim=16, num_layers=1, num_heads=2, mlp_dim=32)
    >>> low = octavo.quantized(functools.partial(bert_apply, config), octavo.recipe("qat_int8"))
    >>> tokens = jnp.asarray([[3, 14, 15], [9, 2, 0]])
    >>> states = jax.jit(low)(bert_params(config, jax.random.key(0)), tokens, tokens != 0)
    >>> mean_pool(states, tokens != 0).shape
    (2, 16)
    """
    tokens, mask = jnp.asarray(tokens), jnp.asarray(mask)
    types = jnp.zeros(tokens.shape, jnp.int32) if types is None else jnp.asarray(types)
    check_token_arrays({"tokens": tokens, "types": types})
    if mask.shape != tokens.shape:
        raise ValueError(f"mask has the shape of tokens, {tokens.shape}, got {mask.shape}")
    if tokens.shape[1] > config.max_length:
        raise ValueError(
            f"texts of {tokens.shape[1]} tokens are longer than max_length={config.max_length}: truncate them"
        )
    return bind(Bert, config, params)(tokens, mask.astype(bool), types)


def mean_pool(
    states: Float[Array, "batch length size"], mask: Shaped[Array, "batch length"]
) -> Float[Array, "batch size"]:
    """The mean state over the tokens of each text; zeros for an empty text.

    >>> mean_pool(jnp.asarray([[[1.0], [3.0], [9.0]]]), jnp.asarray([[True, True, False]])).tolist()
    [[2.0]]
    """
    weight = mask.astype(jnp.float32)[..., None]
    total = jnp.sum(states.astype(jnp.float32) * weight, axis=1)
    return total / jnp.maximum(jnp.sum(weight, axis=1), 1.0)


def cls_pool(
    states: Float[Array, "batch length size"], mask: Shaped[Array, "batch length"]
) -> Float[Array, "batch size"]:
    """The state of the first token of each text."""
    del mask
    return states[:, 0].astype(jnp.float32)


POOLINGS: dict[str, Callable[[Array, Array], Array]] = {"mean": mean_pool, "cls": cls_pool}
"""Poolings of hidden states to one vector per text, by name."""


def normalize(x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
    """Vectors scaled to unit length; zeros stay zeros.

    >>> normalize(jnp.asarray([[3.0, 4.0], [0.0, 0.0]])).round(3).tolist()
    [[0.6..., 0.8...], [0.0, 0.0]]
    """
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
