"""GPTQ of one matrix, [outputs, inputs], by `octavo.ptq.gptq`; scales are those of plain rounding."""

from typing import Any

import jax
import jax.numpy as jnp

from octavo.numerics import get_format
from octavo.ptq import Scales, gptq, scales_of
from octavo.ptq.gptq import damped, inverse_factor
from octavo.ptq.scales import encode
from octavo.qarray import QArray, Quantizer


def cholesky_inverse(L: jax.Array) -> jax.Array:  # noqa: N803
    """The inverse of L L^T.

    >>> cholesky_inverse(2.0 * jnp.eye(2)).tolist()
    [[0.25, 0.0], [0.0, 0.25]]
    """
    return jax.scipy.linalg.cho_solve((L, True), jnp.eye(L.shape[0], dtype=L.dtype))


def find_params(w: jax.Array, how: Quantizer) -> tuple[jax.Array, jax.Array | None]:
    """The scale and the zero point of a group of columns."""
    found = how.scale_of(how.measure(w), w.dtype)
    return found["scale"], found.get("zero_point")


def quantize(w: jax.Array, qtype: Any, scale: jax.Array, zero_point: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The codes of a column, and their values."""
    fmt, zero = get_format(qtype), None if zero_point is None else zero_point.astype(scale.dtype)
    codes = fmt.encode(w / scale + (0 if zero is None else zero))
    return codes, Scales(scale, zero).round(w, fmt)


def quantize_weight(
    W: jax.Array,  # noqa: N803
    H: jax.Array,  # noqa: N803
    how: Quantizer,
    blocksize: int = 128,
    percdamp: float = 0.01,
) -> tuple[QArray, jax.Array]:
    """Quantize W such that W x changes little, for inputs x with the Hessian H.

    Args:
        W: The weight, [outputs, inputs].
        H: The sum of x x^T over inputs, up to a factor.
        how: The quantizer of W.
        blocksize: Accepted for Qwix; results do not depend on it.
        percdamp: The share of the mean of the Hessian's diagonal that is added to it.

    Returns:
        The quantized weight, and half of the squared error that each weight adds to the outputs.
    """
    del blocksize
    if H.shape != (W.shape[1], W.shape[1]):
        raise ValueError(f"the Hessian of a weight {W.shape} is ({W.shape[1]}, {W.shape[1]}), got {H.shape}")
    stable, unused = damped(H, percdamp)
    matrix = jnp.where(unused[None], 0, W)
    start = how.quantize(matrix)
    scales = scales_of(start).map(lambda x: x.T[None])
    rounded = gptq(matrix.T[None], H[None], scales, how.qtype, damping=percdamp, activation_order=False)[0]
    # W - Q = E U, with U as in `octavo.ptq.gptq`.
    error = jax.scipy.linalg.solve_triangular(inverse_factor(stable).T, matrix.T - rounded, lower=True)
    return encode(rounded.T, start), (error.T**2 / 2).astype(W.dtype)


def compute_hessian(X: jax.Array) -> jax.Array:  # noqa: N803
    """The sum of x x^T over the columns of X."""
    return X @ X.T
