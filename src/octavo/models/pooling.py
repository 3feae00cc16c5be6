"""Pooling of the hidden states of an encoder to one vector per text.

Reimers and Gurevych, Sentence-BERT, arXiv:1908.10084: a text's vector is the mean of its tokens' last states. The
others have the names and the computations of sentence-transformers.
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
    return weighted_pool(states, mask.astype(jnp.float32))


def mean_sqrt_pool(
    states: Float[Array, "batch length size"], mask: Shaped[Array, "batch length"]
) -> Float[Array, "batch size"]:
    """The sum of the states of each text over the square root of its length."""
    count = jnp.sum(mask.astype(jnp.float32), axis=1, keepdims=True)
    return mean_pool(states, mask) * jnp.sqrt(count)


def position_weighted_pool(
    states: Float[Array, "batch length size"], mask: Shaped[Array, "batch length"]
) -> Float[Array, "batch size"]:
    """The mean of states weighted by position: 1 for the first token, 2 for the second, and so on.

    >>> position_weighted_pool(jnp.asarray([[[1.0], [4.0], [9.0]]]), jnp.asarray([[True, True, False]])).tolist()
    [[3.0]]
    """
    weights = mask.astype(jnp.float32)
    return weighted_pool(states, weights * jnp.cumsum(weights, axis=1))


def weighted_pool(
    states: Float[Array, "batch length size"], weights: Float[Array, "batch length"]
) -> Float[Array, "batch size"]:
    """The weighted mean of the states of each text; zeros without weights."""
    total = jnp.sum(states.astype(jnp.float32) * weights[..., None], axis=1)
    return total / jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), 1.0)


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


def last_pool(
    states: Float[Array, "batch length size"], mask: Shaped[Array, "batch length"]
) -> Float[Array, "batch size"]:
    """The state of the last token of each text."""
    last = jnp.max(jnp.where(mask.astype(bool), jnp.arange(mask.shape[1])[None], 0), axis=1)
    return jnp.take_along_axis(states, last[:, None, None], axis=1)[:, 0].astype(jnp.float32)


POOLINGS: dict[str, Callable[[Array, Array], Array]] = {
    "mean": mean_pool,
    "cls": cls_pool,
    "max": max_pool,
    "mean_sqrt_len_tokens": mean_sqrt_pool,
    "weightedmean": position_weighted_pool,
    "lasttoken": last_pool,
}
"""Poolings of hidden states to one vector per text, by the name that sentence-transformers gives them."""


def normalize(x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
    """Vectors scaled to unit length; zeros stay zeros.

    >>> normalize(jnp.asarray([[3.0, 4.0], [0.0, 0.0]])).round(3).tolist()
    [[0.6..., 0.8...], [0.0, 0.0]]
    """
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
