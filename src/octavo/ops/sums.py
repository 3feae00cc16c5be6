"""A sum of integer codes: rounded first, added exactly, scaled once."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from octavo import _sharding
from octavo._typing import Array, Float, PRNGKeyArray
from octavo.numerics import FormatLike, IntFormat
from octavo.qarray import QArray, Quantizer, inside
from octavo.qarray.indexing import unpad


def quantized_sum(
    x: Float[Array, "..."] | QArray,
    axis: int | tuple[int, ...],
    *,
    quantizer: Quantizer | FormatLike | None = None,
    keepdims: bool = False,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "..."]:
    """The sum of `x` in low precision: integer codes are added in int32, and their sum is scaled once.

    So its one rounding error beyond that of the codes is that of the result in float32. The values that are added share
    a scale: a quantizer with channels or tiles along a summed axis is refused, and so is a sum that might leave int32.
    A QArray is summed as it is. The gradient passes straight through, to values within the calibrated range.

    >>> quantized_sum(jnp.asarray([[0.1, 1.0], [0.2, 4.0]]), 1, quantizer=Quantizer("int8", channelwise_axes=(0,)))
    Array([1.0980393, 4.1725492], dtype=float32)
    """
    axes = _axes(axis, x.ndim)
    if isinstance(x, QArray):
        if quantizer is not None:
            raise TypeError("the array is quantized already: leave the quantizer out")
        out = _sum_codes(x, axes)
    elif quantizer is None:
        raise TypeError("a float array is summed by a quantizer: quantized_sum(x, axis, quantizer='int8')")
    else:
        out = _sum(quantizer if isinstance(quantizer, Quantizer) else Quantizer(quantizer), axes, key, x)
    return out if keepdims else jnp.squeeze(out, axes)


def _axes(axis: int | tuple[int, ...], ndim: int) -> tuple[int, ...]:
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    if wrong := [a for a in axes if not -ndim <= a < ndim]:
        raise ValueError(f"axis {wrong[0]} is out of range for an array of rank {ndim}")
    return tuple(sorted(a % ndim for a in axes))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _sum(how: Quantizer, axes: tuple[int, ...], key: Any, x: Array) -> Array:
    return _sum_codes(how.quantize(x, key=key), axes)


@_sum.defjvp
def _sum_jvp(how: Quantizer, axes: tuple[int, ...], primals: tuple[Any, Array], tangents: tuple[Any, Array]):
    (key, x), (_, dx) = primals, tangents
    out = _sum(how, axes, key, x)
    dx = jnp.where(inside(how, x), dx, jnp.zeros_like(dx)) if how.calibration.may_clip else dx
    return out, jnp.sum(dx, axis=axes, keepdims=True).astype(out.dtype)


def _sum_codes(q: QArray, axes: tuple[int, ...]) -> Array:
    """The sum with its axes kept; `axes` are not negative."""
    q = q.unpack()
    count = math.prod(q.shape[a] for a in axes)
    fmt = _check(q, axes, count)
    if not q.size:
        return jnp.zeros([1 if a in axes else n for a, n in enumerate(q.shape)], q.dtype)
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    total = jnp.sum(q.qvalue.astype(jnp.int32), axis=axes, keepdims=True)
    if q.zero_point is not None:
        total = total - count * _spread(q.zero_point.astype(jnp.int32), total.shape)
    value = total.astype(wide) if fmt.preserve_zero else total.astype(wide) + 0.5 * count
    value = value * _spread(q.scale.astype(wide) * fmt.unit, total.shape)
    return unpad(value, q.padding).astype(q.dtype)


def _check(q: QArray, axes: tuple[int, ...], count: int) -> IntFormat:
    fmt = q.qtype
    if not isinstance(fmt, IntFormat):
        raise ValueError(f"integer codes are summed; those of {fmt.name} are not: use int8, or sum in float")
    for part in (q.scale, q.zero_point):
        if part is not None and (wrong := [a for a in axes if part.shape[a] > 1]):
            raise ValueError(
                f"values that are summed share a scale, but along axis {wrong[0]} there are {part.shape[wrong[0]]}: "
                "take the summed axes out of channelwise_axes and tiled_axes"
            )
    largest = fmt.qmax - fmt.qmin if q.zero_point is not None else max(fmt.qmax, -fmt.qmin)
    if count * largest >= 2**31:
        raise ValueError(
            f"a sum of {count} {fmt.name} codes may leave int32: each is up to {largest}. Sum in parts of fewer than "
            f"{2**31 // largest} values"
        )
    return fmt


def _spread(scale: Array, shape: tuple[int, ...]) -> Array:
    """A scale of one entry per tile, as one entry per value where it has several."""
    for axis, size in enumerate(shape):
        if 1 < scale.shape[axis] < size:
            scale = _sharding.repeat(scale, size // scale.shape[axis], axis)
    return scale
