"""Embeddings of tokens for each layer, as in Gemma 3n and 4: a further input, which the layer gates by its output.

With the table E of all layers and the scaled embedding x of a token, the input of a layer is
(norm(x W / sqrt(emb_dim)) + E[token] sqrt(width)) / sqrt(2).
"""

import math

import jax.numpy as jnp
from flax import nnx

from octavo._typing import Array, Float, Shaped
from octavo.models.config import ModelConfig
from octavo.models.layers import ACTIVATIONS, NORMS, Dense, Embed


class LayerEmbed(nnx.Module):
    """The inputs of all layers."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width, dtype = config.layer_embed_dim, config.weight_dtype
        outputs = config.num_layers * width
        self.embedder = Embed(config.vocab_size, outputs, dtype, rngs=rngs, stddev=width**-0.5)
        self.projection = Dense(config.emb_dim, outputs, dtype, rngs=rngs)
        self.projection_norm = NORMS["rms"](width, config.norm_eps, dtype)
        self.width, self.dtype = width, config.dtype

    def __call__(
        self, tokens: Shaped[Array, "batch length"], x: Float[Array, "batch length size"]
    ) -> Float[Array, "batch length layers width"]:
        shape = (*tokens.shape, -1, self.width)
        own = self.embedder(tokens, self.dtype).reshape(shape) * jnp.asarray(math.sqrt(self.width), self.dtype)
        scale = jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        projected = self.projection_norm((self.projection(x) * scale).reshape(shape))
        return (projected + own) * jnp.asarray(2**-0.5, x.dtype)


class LayerInput(nnx.Module):
    """norm(projection(activation(gate(x)) * inputs)), which is added to the layer's output x."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, gain: float):
        width, dtype = config.layer_embed_dim, config.weight_dtype
        self.gate = Dense(config.emb_dim, width, dtype, rngs=rngs)
        self.projection = Dense(width, config.emb_dim, dtype, rngs=rngs, gain=gain)
        self.out_norm = NORMS["rms"](config.emb_dim, config.norm_eps, dtype)
        self.activation = config.activation

    def __call__(
        self, x: Float[Array, "batch length size"], inputs: Float[Array, "batch length width"]
    ) -> Float[Array, "batch length size"]:
        return self.out_norm(self.projection(ACTIVATIONS[self.activation](self.gate(x)) * inputs))
