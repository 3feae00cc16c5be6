"""Scales by search: for each group of weights the scale with the least error, weighted by the inputs.

As llama.cpp does with an importance matrix, and Cheng et al., AutoRound (2024), for integers. With h the mean square of
the input of each weight w, over scales s around that of plain rounding:

    argmin_s  sum h (s round(w / s) - w)^2

Integer formats have one more negative than positive code, so both signs of s are tried: the largest weight, whatever
its sign, may use the lowest code. For nvfp4 the factors include "four over six" (Cook et al., 2025).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from octavo._typing import Array, Float
from octavo.numerics import Format, IntFormat
from octavo.qarray import QArray, Quantizer

FACTORS = tuple(float(f) for f in (*np.linspace(0.5, 1.2, 29), 0.9375, 1.5))
"""The candidates, as multiples of the scale of plain rounding: 0.9375 is the full range of int4, 1.5 four over six."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["scale", "zero_point"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Scales:
    """The scale and the zero point of every weight, in the weights' shape.

    Attributes:
        scale: The scale, of any sign; the product of both levels for formats with two.
        zero_point: The zero point; None for symmetric quantization.
    """

    scale: Float[Array, "..."]
    zero_point: Float[Array, "..."] | None = None

    def map(self, fn: Callable[[Array], Array]) -> "Scales":
        """A function applied to both."""
        return jax.tree.map(fn, self)

    def round(self, x: Float[Array, "..."], fmt: Format) -> Float[Array, "..."]:
        """The values of the grid that are nearest to `x`."""
        if self.zero_point is None and fmt.bits <= 4 and not isinstance(fmt, IntFormat):
            return _nearest(x / self._divisor, fmt) * self.scale
        return (fmt.decode(self._encode(x, fmt)) - self._zero) * self.scale

    @property
    def _zero(self) -> Array | float:
        return 0.0 if self.zero_point is None else self.zero_point

    @property
    def _divisor(self) -> Array:
        return jnp.where(self.scale == 0, 1, self.scale)

    def _encode(self, x: Array, fmt: Format) -> Array:
        return fmt.encode((x / self._divisor + self._zero).astype(jnp.float32))


def _nearest(x: Array, fmt: Format) -> Array:
    """The nearest of at most 16 values, by comparisons, which vectorize where table lookups and casts do not."""
    values = fmt.grid().astype(np.float32)
    out = jnp.full_like(x, values[0])
    for low, high in itertools.pairwise(values):
        out = jnp.where(x > (low + high) / 2, high, out)
    return out


def scales_of(q: QArray) -> Scales:
    """The scale of every value of a QArray."""
    return Scales(
        _spread(q, q.scale) if q.outer_scale is None else _spread(q, q.scale) * _spread(q, q.outer_scale),
        None if q.zero_point is None else _spread(q, q.zero_point),
    )


def _spread(q: QArray, x: Array) -> Array:
    """An array with a number for each tile as one with a number for each value."""
    x = x.astype(jnp.float32)
    for axis, (stored, size) in enumerate(zip(q.unpack().qvalue.shape, q.shape, strict=True)):
        x = jnp.repeat(x, stored // x.shape[axis], axis=axis)
        x = jax.lax.slice_in_dim(x, 0, size, axis=axis)
    return x


def encode(x: Float[Array, "..."], like: QArray) -> QArray:
    """`x` quantized with the scales and zero points of another QArray."""
    codes = scales_of(like)._encode(x, like.qtype)
    stored = like.unpack().qvalue.shape
    codes = jnp.pad(codes, [(0, n - m) for n, m in zip(stored, x.shape, strict=True)])
    return like._replace(qvalue=codes, packed=None)


@functools.partial(jax.jit, static_argnames="quantizer")
def signed_full_range(x: Float[Array, "..."], quantizer: Quantizer) -> QArray:
    """Quantize to integers with the value of largest magnitude of each group on the lowest code, as in ggml's Q4_0.

    >>> import octavo
    >>> q = signed_full_range(jnp.asarray([[1.0, -2.0, 8.0]]), octavo.Quantizer("int4", channelwise_axes=(0,)))
    >>> q.qvalue.tolist(), q.scale.tolist()
    ([[-1, 2, -8]], [[-1.0]])
    """
    start, tiles = quantizer.quantize(x.astype(jnp.float32)), quantizer.tiles(x.shape)
    fmt = start.qtype
    if not _is_signed(start):
        raise ValueError(f"only symmetric signed integers have a scale of either sign, not {fmt.name}: use 'search'")
    split = tiles.split(x.astype(jnp.float32))
    low, high = (tiles.merge(f(split, axis=tiles.axes, keepdims=True)) for f in (jnp.min, jnp.max))
    scale = jnp.where(-low > high, low, high) / fmt.smallest
    return encode(x, start._replace(scale=jnp.where(scale == 0, 1, scale).astype(start.scale.dtype)))


def _is_signed(q: QArray) -> bool:
    """Whether scales of either sign make sense: a range of integers with one more negative value."""
    return isinstance(q.qtype, IntFormat) and q.qtype.signed and q.zero_point is None


@functools.partial(jax.jit, static_argnames=("quantizer", "factors"))
def search(
    x: Float[Array, "..."],
    quantizer: Quantizer,
    weight: Float[Array, "..."] | None = None,
    *,
    factors: tuple[float, ...] = FACTORS,
) -> QArray:
    """Quantize an array with the scales that give the least weighted squared error.

    The scale of plain rounding is among the candidates, so that no group is worse than by plain rounding.

    Args:
        x: The values.
        quantizer: The quantizer; its calibration gives the scales of plain rounding.
        weight: The weight of each value's squared error, as `x` or broadcast to it; one by default.
        factors: The candidates, as multiples of the scale of plain rounding.

    Returns:
        A QArray. Scales of signed integer formats may be negative.

    >>> import octavo
    >>> x = jnp.asarray([[7.0, 1.0, -2.0, 8.0], [0.3, -0.2, 0.1, 0.05]])
    >>> quantizer = octavo.Quantizer("int4", channelwise_axes=(0,))
    >>> search(x, quantizer).dequantize()[0].tolist(), quantizer.quantize(x).dequantize()[0].tolist()
    ([7.0, 1.0, -2.0, 8.0], [7.466667175292969, 1.0666667222976685, -2.133333444595337, 7.466667175292969])
    """
    x = x.astype(jnp.float32)
    start, tiles = quantizer.quantize(x), quantizer.tiles(x.shape)
    fmt, split = start.qtype, tiles.split(x)
    weight = tiles.split(jnp.ones_like(x) if weight is None else jnp.broadcast_to(weight, x.shape).astype(jnp.float32))
    outer = None if start.outer_scale is None else tiles.split_scale(start.outer_scale)

    def grid(scale: Array, zero_point: Array | None) -> Scales:
        wide = tiles.split_scale(scale).astype(jnp.float32)
        zero = None if zero_point is None else tiles.split_scale(zero_point).astype(jnp.float32)
        return Scales(wide if outer is None else wide * outer, zero)

    def total(parts: Array) -> Array:
        return tiles.merge(jnp.sum(parts, axis=tiles.axes, keepdims=True))

    def centre(scale: Array, zero_point: Array) -> Array:
        """The zero point at which the weighted mean of the errors vanishes, in two steps."""
        for _ in range(2):
            now = grid(scale, zero_point)
            off = fmt.decode(now._encode(split, fmt)) - split / now.scale
            mean = total(weight * off) / jnp.maximum(total(weight), 1e-30)
            if jnp.issubdtype(zero_point.dtype, jnp.floating):
                zero_point = jnp.clip(mean, fmt.smallest, fmt.largest).astype(zero_point.dtype)
            else:
                zero_point = fmt.encode(mean).astype(zero_point.dtype)
        return zero_point

    def step(best: tuple[Array, Array, Array | None], factor: Array) -> tuple[tuple[Array, Array, Array | None], None]:
        scale = _rescaled(start.scale, factor)
        zero_point = None if start.zero_point is None else centre(scale, start.zero_point)
        error = total(weight * jnp.square(grid(scale, zero_point).round(split, fmt) - split))
        new = error, scale, zero_point
        return jax.tree.map(functools.partial(jnp.where, error < best[0]), new, best), None

    tried = [f * sign for f in factors for sign in ((1, -1) if _is_signed(start) else (1,))]
    error = total(weight * jnp.square(grid(start.scale, start.zero_point).round(split, fmt) - split))
    (_, scale, zero_point), _ = jax.lax.scan(
        step, (error, start.scale, start.zero_point), jnp.asarray(tried, jnp.float32)
    )
    return encode(x, start._replace(scale=scale, zero_point=zero_point))


def _rescaled(scale: Array, factor: Array) -> Array:
    """A scale times a factor in the dtype of scales; unchanged where that has no such value."""
    info = jnp.finfo(scale.dtype)
    wide = scale.astype(jnp.float32) * factor
    if scale.dtype.itemsize < 2:
        wide = jnp.clip(wide, float(info.smallest_subnormal), float(info.max))
    new = wide.astype(scale.dtype)
    return jnp.where(jnp.isfinite(wide) & (new.astype(jnp.float32) != 0), new, scale)
