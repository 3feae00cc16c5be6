"""QEP: weights that compensate for the error of their inputs, which earlier weights have caused.

Arai and Ichikawa, Quantization Error Propagation: Revisiting Layer-Wise Post-Training Quantization (2025). With x the
inputs of the quantized model, x_f those of the float one, H = E x x^T and D = E (x_f - x) x^T:

    W <- W + strength H^-1 D^T W
"""

import functools

import jax
import jax.numpy as jnp

from octavo._typing import Array, Float
from octavo.ptq.gptq import damped


def correct_drift(
    weights: Float[Array, "s k n"],
    hessian: Float[Array, "s k k"],
    drift: Float[Array, "s k k"],
    *,
    strength: float = 0.5,
    damping: float = 0.01,
) -> Float[Array, "s k n"]:
    """The weights that give, for inputs of the quantized model, nearly the outputs of the float one.

    Args:
        weights: Matrices with inputs as rows.
        hessian: The mean of x x^T over inputs x of each matrix in the quantized model.
        drift: The mean of (x_f - x) x^T, for inputs x_f of the float model.
        strength: The share of the drift that is corrected for.
        damping: The share of the mean of the Hessian's diagonal that is added to it.

    Returns:
        The weights, in float; zero for inputs that are always zero.

    >>> x = jax.random.normal(jax.random.key(0), (64, 4))
    >>> hessian = (x.T @ x)[None] / 64
    >>> new = correct_drift(jnp.ones((1, 4, 2)), hessian, hessian, strength=1.0, damping=0.0)  # inputs were halved
    >>> bool(jnp.allclose(new, 2, atol=1e-4))
    True
    """

    def one(w: Array, h: Array, d: Array) -> Array:
        h, unused = damped(h, damping)
        w = jnp.where(unused[:, None], 0, w)
        dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
        change = jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(h, lower=True), dot(d.T, w))
        return w + strength * change

    return jax.vmap(one)(*(x.astype(jnp.float32) for x in (weights, hessian, drift)))
