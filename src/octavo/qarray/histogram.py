"""Histograms of tensors: their values in units of the scale, with the representable values of the format."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from octavo.qarray.display import granularity
from octavo.qarray.qarray import QArray

_SAMPLE = 1 << 17
_BARS = 96
WORST = 4
"""The number of tensors shown of a model: those with the lowest signal-to-noise ratio."""


def histogram(path: str, x: np.ndarray, q: QArray, *, sqnr_db: float | None = None) -> dict[str, Any]:
    """A histogram of a tensor's values divided by their scales, as JSON data.

    Large tensors are sampled. `clipped` is the fraction of nonzero values beyond the format's range, `zeroed` of those
    that round to zero; `grid` are the representable values.

    >>> import octavo
    >>> x = np.linspace(-1, 1, 64, dtype=np.float32)
    >>> found = histogram("w", x, octavo.quantize(jnp.asarray(x), "int4"))
    >>> found["format"], len(found["grid"]), sum(found["counts"]), found["clipped"]
    ('int4', 16, 64, 0.0)
    """
    values, zero, margin = _scaled(np.asarray(x), q)
    fmt = q.qtype
    beyond = max(0.0, fmt.bound - fmt.largest)
    low, high = fmt.smallest - beyond, fmt.largest + beyond
    counts, _ = np.histogram(np.clip(values, low, high), bins=_BARS, range=(low, high))
    there, zero = values[values != zero], zero[values != zero]
    room = margin * max(abs(low), high)
    clipped = np.mean((there > high + room) | (there < low - room)) if there.size else 0.0
    zeroed = np.mean(np.asarray(fmt.round(jnp.asarray(there))) == zero) if there.size else 0.0
    return {
        "path": path,
        "format": fmt.name,
        "shape": list(q.shape),
        "granularity": granularity(q),
        "sampled": int(values.size),
        "counts": counts.tolist(),
        "low": float(low),
        "high": float(high),
        "grid": [float(v) for v in fmt.grid()],
        "clipped": float(clipped),
        "zeroed": float(zeroed),
        "sqnr_db": sqnr_db,
    }


def sqnr_db(before: np.ndarray, after: np.ndarray) -> float | None:
    """The ratio of a tensor's power to that of its error, in dB; None where either is zero.

    >>> round(sqnr_db(np.asarray([1.0, 1.0]), np.asarray([1.1, 0.9])) or 0, 3)
    20.0
    """
    noise = float(np.sum(np.square(after - before), dtype=np.float64))
    signal = float(np.sum(np.square(before), dtype=np.float64))
    return None if noise == 0 or signal == 0 else float(10 * np.log10(signal / noise))


def _scaled(x: np.ndarray, q: QArray) -> tuple[np.ndarray, np.ndarray, float]:
    """Values (or a sample) in units of the scale, the zero point of each, and the relative precision of scales."""
    # At random: a fixed stride would sample the same columns repeatedly.
    few = x.size <= _SAMPLE
    flat = np.arange(x.size) if few else np.random.default_rng(0).integers(0, x.size, _SAMPLE)
    at = np.unravel_index(flat, x.shape)
    scale = _at_indices(q.scale, at, q)
    if q.outer_scale is not None:
        scale = scale * _at_indices(q.outer_scale, at, q)
    zero = np.zeros_like(scale) if q.zero_point is None else _at_indices(q.zero_point, at, q)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.where(scale > 0, x[at].astype(np.float32) / scale, np.float32(0)) + zero
    known = np.isfinite(values)
    return values[known], zero[known], float(jnp.finfo(q.scale.dtype).eps) if _rounded(q) else 1e-6


def _rounded(q: QArray) -> bool:
    """Whether scales are rounded to nearest; powers of two are rounded on purpose."""
    return jnp.dtype(q.scale.dtype) != jnp.float8_e8m0fnu


def _at_indices(part: Any, at: tuple[np.ndarray, ...], q: QArray) -> np.ndarray:
    """The entries of a scale or zero point for values at given indices."""
    stored = np.asarray(part).astype(np.float32)
    sizes = (n // max(1, s) for n, s in zip(q._stored_shape, stored.shape, strict=True))
    return stored[tuple(i // size for i, size in zip(at, sizes, strict=True))]
