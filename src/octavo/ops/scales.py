"""Moving scales along the contraction of a matmul from one operand into the other."""

from typing import NamedTuple

import jax.numpy as jnp

from octavo import _sharding
from octavo._typing import Array
from octavo.ops.operands import ArrayOrQArray, Dims
from octavo.qarray import QArray


class Scaled(NamedTuple):
    """An array and a scale that was moved into it, not yet multiplied."""

    value: Array
    scale: Array

    def product(self) -> Array:
        return self.value.astype(jnp.float32) * _sharding.reshard_for_broadcast(self.scale, self.value)


def full_scale(q: QArray) -> Array:
    """Both levels of scales multiplied, in float32."""
    scale = q.scale.astype(jnp.float32)
    return scale if q.outer_scale is None else scale * q.outer_scale.astype(jnp.float32)


def without_scale(q: QArray) -> QArray:
    """The same codes with a scale of one."""
    return q._replace(scale=jnp.ones((1,) * q.ndim, jnp.float32), outer_scale=None)


def move_scale(q: QArray, other: Array, dims: Dims, *, from_left: bool) -> tuple[Scaled, QArray]:
    """The other operand with the scale of `q`, and `q` without it."""
    mine = (*dims.lhs_batch, *dims.lhs_contract) if from_left else (*dims.rhs_batch, *dims.rhs_contract)
    theirs = (*dims.rhs_batch, *dims.rhs_contract) if from_left else (*dims.lhs_batch, *dims.lhs_contract)
    return Scaled(other, _across(full_scale(q), mine, theirs, other.ndim)), without_scale(q)


def smooth(
    lhs: ArrayOrQArray, rhs: ArrayOrQArray, dims: Dims, alpha: float | tuple[float, float]
) -> tuple[Array, Array]:
    """Smooth outliers of both operands along the contraction, without changing their matmul.

    Xiao et al., SmoothQuant (2022), equation 4, for each contracted index k (and each batch):

        s_k = max|lhs_k|**alpha / max|rhs_k|**(1 - alpha),   lhs_k / s_k,   rhs_k * s_k

    A pair for alpha is both exponents.
    """
    alpha, beta = alpha if isinstance(alpha, tuple) else (alpha, 1 - alpha)
    if isinstance(lhs, QArray) or isinstance(rhs, QArray):
        raise TypeError("smooth scales float operands before they are quantized; a QArray is quantized already")
    wide = jnp.float64 if jnp.float64 in (lhs.dtype, rhs.dtype) else jnp.float32
    lhs, rhs = lhs.astype(wide), rhs.astype(wide)
    mine, theirs = (*dims.lhs_batch, *dims.lhs_contract), (*dims.rhs_batch, *dims.rhs_contract)
    left = jnp.max(jnp.abs(lhs), axis=dims.lhs_remaining, keepdims=True, initial=0)
    right = jnp.max(jnp.abs(rhs), axis=dims.rhs_remaining, keepdims=True, initial=0)
    right = _sharding.reshard_for_broadcast(_across(right, theirs, mine, lhs.ndim), left)
    s = left**alpha / right**beta
    # A non-finite value affects only its own row.
    s = jnp.where((s > 0) & jnp.isfinite(s), s, 1)
    # An index that is all zeros in one operand contributes nothing: do not let it widen the other's range.
    used = ((left != 0) & (right != 0)).astype(wide)
    return lhs * (used / s), rhs * _sharding.reshard_for_broadcast(_across(used * s, mine, theirs, rhs.ndim), rhs)


def _across(part: Array, mine: tuple[int, ...], theirs: tuple[int, ...], ndim: int) -> Array:
    """An array over the batch and contracted axes of one operand, broadcastable against the other."""
    order = [a for _, a in sorted(zip(theirs, mine, strict=True))]
    sizes = dict(zip(sorted(theirs), (part.shape[a] for a in order), strict=True))
    long = [a for a in order if part.shape[a] not in (0, 1)]
    if long != sorted(long):
        part = jnp.transpose(part, (*order, *(a for a in range(part.ndim) if a not in mine)))
    return part.reshape([sizes.get(a, 1) for a in range(ndim)])
