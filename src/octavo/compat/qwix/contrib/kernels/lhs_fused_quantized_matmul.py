"""The matmul of activations, which are quantized first, and codes with scales; see `quantized_matmul`."""

from typing import Any

import jax
import jax.numpy as jnp

from octavo.ops import dot_general
from octavo.qarray import QArray, Quantizer


def quantize_a_tile(x: jax.Array, *, qtype: Any = jnp.int8, method: str = "absmax") -> tuple[jax.Array, jax.Array]:
    """The codes and the scale of each matrix in the last two axes.

    >>> codes, scale = quantize_a_tile(jnp.asarray([[1.0, -2.0]]))
    >>> codes.tolist(), scale.shape
    ([[64, -127]], (1, 1))
    """
    q = Quantizer(qtype, tuple(range(x.ndim - 2)), calibration=method).quantize(x)
    return q.qvalue, q.scale


def lhs_fused_qmm_kernel(*refs: Any, **blocks: Any) -> None:
    """Not offered: the body of Qwix's kernel for TPUs."""
    raise NotImplementedError(
        "lhs_fused_qmm_kernel is the body of a TPU kernel of Qwix's: call lhs_fused_quantized_matmul, or write a "
        "kernel with octavo.compat.qwix.pallas"
    )


def lhs_fused_quantized_matmul(
    x: jax.Array,
    y: jax.Array,
    sy: jax.Array,
    *,
    bm: int,
    bk: int,
    bn: int,
    sm: int,
    accum_dtype: Any = jnp.float32,
) -> jax.Array:
    """The matmul of x, quantized like y with `sm` scales along its rows and those of y's contraction, and codes y.

    >>> y = jnp.ones((4, 2), jnp.int8)
    >>> out = lhs_fused_quantized_matmul(jnp.ones((2, 4)), y, jnp.ones((1, 1)), bm=2, bk=4, bn=2, sm=1)
    >>> bool(jnp.allclose(out, 4, rtol=0.01))
    True
    """
    del bm, bk, bn, accum_dtype
    tiles = {0: x.shape[0] // sm, 1: x.shape[1] // sy.shape[0]}
    low = Quantizer(y.dtype, tiled_axes=tiles).quantize(x)
    return dot_general(low, QArray(y, sy), (((1,), (0,)), ((), ()))).astype(x.dtype)
