"""Quantization in plain NumPy float64, written from the formulas: what the tests compare against."""

import itertools
import math

import jax.numpy as jnp
import numpy as np

from octavo.numerics import BlockFormat, Format


def groups(shape, sizes):
    """The index tuples of all tiles of an array."""
    ranges = [range(0, dim, size) for dim, size in zip(shape, sizes, strict=True)]
    for starts in itertools.product(*ranges):
        yield tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def nearest(grid, x):
    """The values of an ascending grid nearest to `x`."""
    above = np.clip(np.searchsorted(grid, x), 1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    return np.where(x - low <= high - x, low, high)


def power_of_two_up(ratio):
    """The smallest power of two that is at least `ratio`."""
    mantissa, exponent = math.frexp(ratio)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


def quantize_dequantize(x, fmt: Format, sizes, *, scale_dtype=None, asymmetric=False):
    """What quantizing with absmax (or minmax) and dequantizing gives, tile by tile, and each value's scale."""
    x = np.asarray(x, np.float64)
    out, scales = np.zeros_like(x), np.zeros_like(x)
    grid = fmt.grid()
    outer = 1.0
    if isinstance(fmt, BlockFormat) and fmt.outer:
        outer = np.float32(np.abs(x).max() / (fmt.bound * fmt.largest_scale))
    for tile in groups(x.shape, sizes):
        part = x[tile]
        zero_point = 0.0
        if asymmetric:
            low, high = min(part.min(), 0), max(part.max(), 0)
            scale = _stored((high - low) / (fmt.qmax - fmt.qmin) or 1.0, scale_dtype)
            zero_point = np.clip(np.round(fmt.qmin - low / scale), fmt.qmin, fmt.qmax)
        elif isinstance(fmt, BlockFormat) and fmt.scale_dtype == "float8_e8m0fnu":
            scale = power_of_two_up(np.abs(part).max() / fmt.bound) if part.any() else 1.0
        else:
            stored = fmt.scale_dtype if isinstance(fmt, BlockFormat) else scale_dtype
            scale = _stored(np.abs(part).max() / fmt.bound / outer or 1.0, stored) * outer
        out[tile] = (nearest(grid, part / scale + zero_point) - zero_point) * scale
        scales[tile] = scale
    return out, scales


def _stored(scale, dtype):
    return float(np.asarray(scale, np.float32).astype(jnp.dtype(dtype or "float32")))
