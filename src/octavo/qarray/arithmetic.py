"""From bounds to scales and from values to codes, in Octavo's arithmetic or bit for bit in a peer's.

Octavo computes in float32 whatever the input's dtype. Qwix and AQT compute in the input's own dtype, which in bfloat16
costs a tenth more error; their arithmetic is here so that results can be compared exactly when migrating.
"""

import abc
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import mlir

from octavo._typing import Array, Shaped
from octavo.calibration import Bounds
from octavo.numerics import E8M0, BlockFormat, Format, IntFormat, power_of_two_scale, round_scale, round_unit

# The smallest normal scale: backends flush float32's subnormal numbers to zero.
_TINY = float(jnp.finfo(np.float32).tiny)
_SMALLEST = {np.dtype(np.float16): float(jnp.finfo(np.float16).smallest_subnormal)}


class Arithmetic(abc.ABC):
    """The arithmetic of a quantizer: scales from bounds, and codes from values."""

    wide: ClassVar[bool] = False
    """Whether it computes in float32 whatever the dtype of the values, and chooses the dtype of scales."""
    narrow: ClassVar[bool] = False
    """Whether signed integers are in a symmetric range."""

    @abc.abstractmethod
    def scale(
        self, bounds: Bounds, fmt: Format, *, scale_dtype: np.dtype, stochastic: bool
    ) -> tuple[Array, Array | None, Array | None]:
        """The scale, the zero point and the outer scale, in the computing dtype."""

    @abc.abstractmethod
    def encode(
        self, x: Array, fmt: Format, scale: Array, zero_point: Array | None, noise: Array | None
    ) -> Shaped[Array, "..."]:
        """The codes of `x`."""

    def decode(self, codes: Array, fmt: Format, scale: Array, zero_point: Array | None, dtype: np.dtype) -> Array:
        """The values of codes, in the computing dtype."""
        x = fmt.decode(codes).astype(dtype)
        return (x if zero_point is None else x - zero_point.astype(dtype)) * scale


class Float32(Arithmetic):
    """Octavo's own: float32 (float64 for float64 inputs), exact powers of two, no overflow or underflow.

    Divisions are written as multiplications by the reciprocal. XLA rewrites a division in this way if the divisor is
    broadcast, but not otherwise. Written out, results are bit-equal under jit, eager and vmap, per tensor and channel.
    """

    wide = True

    def scale(self, bounds, fmt, *, scale_dtype, stochastic):
        if "min" in bounds:
            return _asymmetric(bounds["min"], bounds["max"], fmt, scale_dtype, slack=int(stochastic))
        absmax = bounds["absmax"]
        # With stochastic rounding the largest value is mapped to the last code: clipped there, it would be biased.
        bound = min(fmt.largest, -fmt.smallest) if stochastic else fmt.bound
        outer = None
        if scale_dtype == E8M0:
            floor = isinstance(fmt, BlockFormat) and fmt.scale_rounding == "floor"
            scale = power_of_two_scale(absmax.astype(jnp.float32), fmt, floor=floor).astype(absmax.dtype)
        else:
            if isinstance(fmt, BlockFormat) and fmt.outer:
                outer = _outer(bounds.get("largest", absmax), bound * fmt.largest_scale)
                absmax = absmax * (1 / outer)
            scale = absmax * (1 / bound)
            if outer is None:
                scale = jax.lax.max(scale, jnp.asarray(_SMALLEST.get(scale_dtype, _TINY), scale.dtype))
            if scale.dtype != scale_dtype:
                up = stochastic or (isinstance(fmt, BlockFormat) and fmt.scale_rounding == "up")
                scale = round_scale(scale.astype(jnp.float32), scale_dtype, up=up).astype(absmax.dtype)
        is_zero = jax.lax.eq(absmax, jax.lax.full_like(absmax, 0))
        return jax.lax.select(is_zero, jax.lax.full_like(scale, float(fmt.has_zero)), scale), None, outer

    def encode(self, x, fmt, scale, zero_point, noise):
        # A scale is zero only for a format that has no zero, or for a block scale that underflowed.
        may_vanish = not fmt.has_zero or isinstance(fmt, BlockFormat)
        divisor = jnp.where(scale == 0, 1, scale) if may_vanish else scale
        # Only formats with a small bound have scales so large that their reciprocal may flush to zero.
        x = (_divide(x, divisor) if fmt.bound < 4 else x * (1 / divisor)).astype(jnp.float32)
        if zero_point is not None and jnp.issubdtype(zero_point.dtype, jnp.floating):
            return fmt.encode(x + zero_point.astype(x.dtype), noise)
        if zero_point is not None:
            # Rounded first: under jit, a multiplication and an addition may be fused to an FMA, with other bits.
            x, noise = round_unit(x, noise) + zero_point.astype(x.dtype), None
        return fmt.encode(x, noise)


class QwixArithmetic(Arithmetic):
    """Qwix 0.1.8's, bit for bit, including its zero guard and its lack of an outer scale."""

    def scale(self, bounds, fmt, *, scale_dtype, stochastic):
        def guarded(scale: Array) -> Array:
            return jnp.where(scale < jnp.sqrt(jnp.finfo(scale.dtype).tiny), jnp.ones_like(scale), scale)

        if "min" in bounds:
            assert isinstance(fmt, IntFormat)
            scale = guarded((bounds["max"] - bounds["min"]) / float(fmt.qmax - fmt.qmin))
            return scale, fmt.encode((fmt.qmin - bounds["min"] / scale).astype(jnp.float32)), None
        scale = guarded(bounds["absmax"] / fmt.bound)
        if isinstance(fmt, BlockFormat):
            if jnp.dtype(fmt.scale_dtype) == E8M0:
                scale = (2 ** jnp.ceil(jnp.log2(scale))).astype(scale.dtype)
            else:
                limit = jnp.asarray(fmt.largest_scale, scale.dtype)
                scale = jnp.clip(scale, -limit, limit).astype(fmt.scale_dtype).astype(scale.dtype)
        return scale, None, None

    def encode(self, x, fmt, scale, zero_point, noise):
        x = x / scale
        if zero_point is not None:
            x = x + zero_point.astype(x.dtype)
        return fmt.encode(x.astype(jnp.float32), noise)


class AqtArithmetic(Arithmetic):
    """AQT 0.9's, bit for bit: multiplication by the reciprocal, and integers in a symmetric range."""

    narrow = True

    def scale(self, bounds, fmt, *, scale_dtype, stochastic):
        absmax = bounds["absmax"]
        absmax = jnp.where(absmax == 0, jnp.ones_like(absmax), absmax)
        return absmax / fmt.bound, None, None

    def encode(self, x, fmt, scale, zero_point, noise):
        inverse = jnp.reciprocal(scale)
        x = x * jnp.where(jnp.isinf(inverse), jnp.ones_like(inverse), inverse)
        return fmt.encode(x.astype(jnp.float32), noise)


ARITHMETICS: dict[str, Arithmetic] = {"float32": Float32(), "qwix": QwixArithmetic(), "aqt": AqtArithmetic()}


def _divide(x: Array, divisor: Array) -> Array:
    """`x / divisor` by the reciprocal, also where that of a divisor above 2**126 would flush to zero."""
    part = jnp.where(divisor > 2.0**120, 2.0**-4, 1.0).astype(x.dtype)
    return (x * part) * (1 / (divisor * part))


def _outer(x: Array, bound: float) -> Array:
    """The scale of a tensor that brings the largest finite value of `x` to a bound."""
    largest = jnp.max(jnp.where(jnp.isfinite(x), x, 0), keepdims=True, initial=0)
    return jnp.where(largest == 0, 1.0, jnp.maximum(largest * (1 / bound), _TINY))


def _asymmetric(
    low: Array, high: Array, fmt: Format, scale_dtype: np.dtype, *, slack: int
) -> tuple[Array, Array, Array | None]:
    """Scale, zero point and outer scale that spread [low, high] over all codes; with `slack`, over all but one.

    The slack leaves room for the rounded zero point, so that stochastic rounding never exceeds the range.
    """
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    assert isinstance(element, IntFormat)
    steps = element.qmax - element.qmin - slack
    # Halved, because the difference of two float32 numbers may overflow.
    scale = (high * 0.5 - low * 0.5) * (2 / steps)
    if isinstance(fmt, BlockFormat):
        outer = _outer(scale, fmt.largest_scale) if fmt.outer else None
        scale = scale if outer is None else scale * (1 / outer)
        scale = round_scale(scale.astype(jnp.float32), scale_dtype, up=bool(slack)).astype(low.dtype)
        scale = jnp.where(high == low, 1, scale)
        divisor = jnp.where(scale == 0, 1, scale) * (1 if outer is None else outer)
        zero = jnp.clip(element.qmin - _divide(low, divisor), element.qmin, element.qmax)
        return scale, zero.astype(fmt.zero_dtype), outer
    scale = jax.lax.max(scale, jnp.asarray(_SMALLEST.get(scale_dtype, _TINY), scale.dtype))
    if scale.dtype != scale_dtype:
        scale = round_scale(scale.astype(jnp.float32), scale_dtype, up=bool(slack)).astype(low.dtype)
    scale = jnp.where(high == low, 1, scale)
    below = _divide(low, scale).astype(jnp.float32)
    return scale, element.encode(element.qmin - (jnp.floor(below) if slack else jnp.round(below))), None


_on_cpu = core.Primitive("octavo_on_cpu")
_on_cpu.def_impl(lambda: jnp.asarray(True))
_on_cpu.def_abstract_eval(lambda: jax.core.ShapedArray((), jnp.dtype(bool)))
mlir.register_lowering(_on_cpu, mlir.lower_fun(lambda: jnp.asarray(False), multiple_results=False))
mlir.register_lowering(_on_cpu, mlir.lower_fun(lambda: jnp.asarray(True), multiple_results=False), platform="cpu")


def on_cpu() -> Array:
    """Whether the program runs on a CPU: a constant after lowering, so that XLA removes what it disables.

    Outside of jit it is True everywhere.
    """
    return _on_cpu.bind()
