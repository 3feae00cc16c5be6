"""Pooling of the hidden states of an encoder to one vector per text.

Reimers and Gurevych, Sentence-BERT, arXiv:1908.10084: a text's vector is the mean of its tokens' last states.
"""

from collections.abc import Callable

import jax.numpy as jnp

from octavo._typing import Array, Float, Shaped


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


def max_pool(
    states: Float[Array, "batch length size"], mask: Shaped[Array, "batch length"]
) -> Float[Array, "batch size"]:
    """The largest value of each channel over the tokens of each text."""
    masked = jnp.where(mask.astype(bool)[..., None], states, jnp.finfo(states.dtype).min)
    return jnp.max(masked, axis=1).astype(jnp.float32)


def cls_pool(
    states: Float[Array, "batch length size"], mask: Shaped[Array, "batch length"]
) -> Float[Array, "batch size"]:
    """The state of the first token of each text."""
    del mask
    return states[:, 0].astype(jnp.float32)


POOLINGS: dict[str, Callable[[Array, Array], Array]] = {"mean": mean_pool, "cls": cls_pool, "max": max_pool}
"""Poolings of hidden states to one vector per text, by the name that sentence-transformers gives them."""


def normalize(x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
    """Vectors scaled to unit length; zeros stay zeros.

    >>> normalize(jnp.asarray([[3.0, 4.0], [0.0, 0.0]])).round(3).tolist()
    [[0.6..., 0.8...], [0.0, 0.0]]
    """
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
