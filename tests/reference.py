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


def ideal_scale(part, fmt: Format, *, asymmetric=False):
    """The scale of a tile before it is stored, and its lowest value, which is zero if none is negative."""
    if not asymmetric:
        return np.abs(part).max() / fmt.bound, 0.0
    element, low, high = getattr(fmt, "element", fmt), min(part.min(), 0), max(part.max(), 0)
    return (high - low) / (element.qmax - element.qmin), low


def outer_scale(x, fmt: Format, sizes, *, asymmetric=False):
    """The scale that all tiles of a tensor share, 1 if the format has none."""
    if not (isinstance(fmt, BlockFormat) and fmt.outer):
        return 1.0
    largest = max(ideal_scale(x[tile], fmt, asymmetric=asymmetric)[0] for tile in groups(x.shape, sizes))
    return np.float32(largest / fmt.largest_scale) or 1.0


def quantize_dequantize(x, fmt: Format, sizes, *, scale_dtype=None, asymmetric=False):
    """What quantizing with absmax (or minmax) and dequantizing gives, tile by tile, and each value's scale."""
    x = np.asarray(x, np.float64)
    out, scales = np.zeros_like(x), np.zeros_like(x)
    grid, outer, block = fmt.grid(), outer_scale(x, fmt, sizes, asymmetric=asymmetric), isinstance(fmt, BlockFormat)
    for tile in groups(x.shape, sizes):
        part = x[tile]
        ideal, low = ideal_scale(part, fmt, asymmetric=asymmetric)
        zero_point = 0.0
        if block and fmt.scale_dtype == "float8_e8m0fnu":
            scale = power_of_two_up(ideal) if part.any() else 1.0
        else:
            scale = _stored(ideal / outer or 1.0, fmt.scale_dtype if block else scale_dtype) * outer
        scales[tile] = scale
        if scale == 0:  # less than the smallest scale of a block: all its values are zero
            continue
        if asymmetric and block:
            zero_point = stored_zero_point(fmt, low, scale)
        elif asymmetric:
            zero_point = np.clip(np.round(fmt.qmin - low / scale), fmt.qmin, fmt.qmax)
        out[tile] = (nearest(grid, part / scale + zero_point) - zero_point) * scale
    return out, scales


def stored_zero_point(fmt: BlockFormat, low, scale):
    """The zero point of a block: a fraction of a code, in few bits."""
    element = fmt.element
    return _stored(np.clip(element.qmin - low / scale, element.qmin, element.qmax), fmt.zero_dtype)


def _stored(scale, dtype):
    return float(np.asarray(scale, np.float32).astype(jnp.dtype(dtype or "float32")))
