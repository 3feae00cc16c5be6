"""AWQ of one matrix, [outputs, inputs], by the search of `octavo.ptq.awq`."""

import jax
import jax.numpy as jnp

from octavo.ptq import Statistics
from octavo.ptq.awq import best_factor
from octavo.ptq.layout import MatrixView
from octavo.qarray import QArray, Quantizer


def compute_act_scale(x: jax.Array, axis: int = 0) -> jax.Array:
    """The mean magnitude of each input; `axis` is that of samples.

    >>> compute_act_scale(jnp.asarray([[1.0, -2.0], [3.0, 2.0]])).tolist()
    [2.0, 2.0]
    """
    return jnp.mean(jnp.abs(x), axis=axis)


def search_optimal_scales(
    w: jax.Array, activation_scales: jax.Array, how: Quantizer, n_grid: int = 20, min_scale: float = 1e-4
) -> jax.Array:
    """The factor of each input, [1, inputs], with the least error of the outputs for independent inputs.

    Args:
        w: The weight, [outputs, inputs].
        activation_scales: The mean magnitude of each input.
        how: The quantizer of the weight.
        n_grid: The number of exponents of the magnitudes that are tried, from 0 to 1.
        min_scale: The least magnitude, relative to the largest.
    """
    square = (activation_scales**2)[None]
    view = MatrixView(digits=w.shape, order=(1, 0), stack=(), shape=(1, w.shape[1], w.shape[0]))
    inputs = activation_scales[None]
    statistics = Statistics(jnp.diag(square[0])[None], square, inputs, inputs, jnp.ones(1), view)
    mean = jnp.clip(inputs / (jnp.max(inputs) + 1e-8), min=min_scale)
    return best_factor([w], [how], [statistics], mean, grid=n_grid)


def quantize_weight(
    w: jax.Array, activation_scales: jax.Array, how: Quantizer, n_grid: int = 20
) -> tuple[QArray, jax.Array]:
    """The weight times the best factor of each input, quantized; and the factors, [1, inputs]."""
    scales = search_optimal_scales(w, activation_scales, how, n_grid)
    return how.quantize(w * scales), scales
