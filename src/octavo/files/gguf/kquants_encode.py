"""Arrays as K-quants: Q4_K, Q5_K and Q6_K, with scales searched for the least weighted squared error.

For the weights h of the values x of a group, over some steps s0 of its grid, with codes l = round((x - min x) / s0):

    argmin_{s, m}  sum h (s l + m - x)^2        by least squares in s and m <= 0

As in llama.cpp, h is the importance of a value's input (the mean of its square) times sqrt(2 mean x^2 + x^2); without
importances, sqrt(mean x^2) + |x|. Scales and minima are then rounded to multiples of one float16 pair for 256 values,
and the codes are those nearest to the values on the grid that is stored.
"""

import dataclasses
import itertools

import numpy as np

from octavo.files.gguf.blocks import SUPER, q4_k, q5_k, q6_k
from octavo.files.gguf.types import TYPES

_STEPS = tuple(-0.9 + 0.1 * i for i in range(19))
"""Candidates of a grid's step: the range over the number of steps plus this."""


@dataclasses.dataclass(frozen=True)
class KQuant:
    """A type: groups of a number of values, codes of a number of bits, with or without minima."""

    name: str
    bits: int
    group: int
    has_minimum: bool


KQUANTS = {kind.name: kind for kind in (KQuant("Q4_K", 4, 32, True), KQuant("Q5_K", 5, 32, True))}
KQUANTS["Q6_K"] = KQuant("Q6_K", 6, 16, False)


def encode_kquant(kind: KQuant, x: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    """The blocks of values [blocks, 256].

    Args:
      kind: One of `KQUANTS`.
      x: Finite values.
      importance: The weight of each value's squared error, at least 0.

    Returns:
      Records of the type, one for each row of `x`; a scale that float16 cannot hold is infinite.
    """
    x = x.astype(np.float32)
    power = np.mean(x * x, axis=1, keepdims=True)
    weight = np.sqrt(power) + np.abs(x) if importance is None else importance * np.sqrt(2 * power + x * x)
    x, weight = (a.astype(np.float32).reshape(len(x), -1, kind.group) for a in (x, weight))
    # Values that are all unimportant are as important as each other.
    weight = np.where(weight.any(axis=-1, keepdims=True), weight, np.float32(1))
    with np.errstate(all="ignore"):
        scale, minimum = (_asymmetric if kind.has_minimum else _symmetric)(x, weight, kind.bits)
        out = _with_scales(kind, x, weight, scale, minimum)
        steps = _grid(kind, out)
        codes = np.nan_to_num(np.rint(np.where(steps[0] != 0, (x - steps[1]) / steps[0], 0)))
    low = 0 if kind.has_minimum else -32
    codes = (np.clip(codes, low, low + (1 << kind.bits) - 1) - low).astype(np.uint8)
    _put_codes(kind, out, codes)
    return out


def _asymmetric(x: np.ndarray, h: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The scale and the minimum, at most 0, of each group."""
    top = (1 << bits) - 1
    low = np.minimum(x.min(axis=-1, keepdims=True), 0)
    span = x.max(axis=-1, keepdims=True) - low
    best = _candidate(x, h, span / top, low, top)
    sum_h, sum_hx = (a.sum(axis=-1, keepdims=True) for a in (h, h * x))
    for step in _STEPS:
        codes = np.clip(np.rint((x - low) * ((top + step) / span)), 0, top)
        hl = h * codes
        sum_l, sum_ll, sum_lx = (a.sum(axis=-1, keepdims=True) for a in (hl, hl * codes, hl * x))
        det = sum_h * sum_ll - sum_l * sum_l
        scale = (sum_h * sum_lx - sum_hx * sum_l) / det
        minimum = (sum_ll * sum_hx - sum_l * sum_lx) / det
        free = (minimum <= 0) & (scale > 0) & np.isfinite(scale) & np.isfinite(minimum)
        scale = np.where(free, scale, sum_lx / sum_ll)
        best = _better(best, _candidate(x, h, scale, np.where(free, minimum, 0), top))
    return best[1], best[2]


def _symmetric(x: np.ndarray, h: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The scale of each group, of either sign, with the largest value near the lowest code."""
    bottom = -(1 << (bits - 1))
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=-1)[..., None], axis=-1)
    zero = np.zeros_like(largest)
    best = _candidate(x, h, largest / bottom, zero, -bottom - 1, bottom)
    for step in _STEPS:
        codes = np.clip(np.rint(x * ((bottom - step) / largest)), bottom, -bottom - 1)
        scale = (h * codes * x).sum(axis=-1, keepdims=True) / (h * codes * codes).sum(axis=-1, keepdims=True)
        best = _better(best, _candidate(x, h, scale, zero, -bottom - 1, bottom))
    return best[1], best[2]


def _candidate(
    x: np.ndarray, h: np.ndarray, scale: np.ndarray, minimum: np.ndarray, top: int, bottom: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The error of a grid, and the grid."""
    codes = np.clip(np.rint(np.where(scale != 0, (x - minimum) / scale, 0)), bottom, top)
    error = (h * np.square(codes * scale + minimum - x)).sum(axis=-1, keepdims=True)
    return np.where(np.isfinite(error), error, np.inf), scale, minimum


def _better[T: tuple[np.ndarray, ...]](old: T, new: T) -> T:
    return tuple(np.where(new[0] < old[0], b, a) for a, b in zip(old, new, strict=True))  # pyrefly: ignore


def _with_scales(kind: KQuant, x: np.ndarray, h: np.ndarray, scale: np.ndarray, minimum: np.ndarray) -> np.ndarray:
    """Blocks with scales and minima, and codes of zero."""
    out = np.zeros(len(scale), TYPES[kind.name].block)
    out["d"], small = _rounded(np.nan_to_num(scale[..., 0]), 63 if kind.has_minimum else 127)
    if not kind.has_minimum:
        out["scales"] = small
        return out
    out["dmin"], minima = _rounded(-np.nan_to_num(minimum[..., 0]), 63)
    small, minima = _refined(x, h, out, small, minima, (1 << kind.bits) - 1)
    four, six = np.uint8(4), np.uint8(6)
    first = [a[:, :4] | ((a[:, 4:] >> four) << six) for a in (small, minima)]
    last = (small[:, 4:] & np.uint8(15)) | ((minima[:, 4:] & np.uint8(15)) << four)
    out["scales"] = np.concatenate([*first, last], axis=1)
    return out


def _refined(
    x: np.ndarray, h: np.ndarray, out: np.ndarray, small: np.ndarray, minima: np.ndarray, top: int
) -> list[np.ndarray]:
    """The scales and minima with the least error, among the multiples next to the given ones."""
    unit, low_unit = (out[name].astype(np.float32)[..., None] for name in ("d", "dmin"))
    best: tuple[np.ndarray, ...] = (np.full((*small.shape, 1), np.inf, np.float32),) * 3
    for more, below in itertools.product((0, -1, 1), repeat=2):
        scale, minimum = (np.clip(a + b, 0, 63)[..., None] for a, b in ((small, more), (minima, below)))
        error = _candidate(x, h, scale * unit, -minimum * low_unit, top)[0]
        best = _better(best, (error, scale, minimum))
    return [np.nan_to_num(a[..., 0], posinf=0).astype(np.uint8) for a in best[1:]]


def _rounded(scale: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """A float16 for each block, and the multiples of it that are nearest to its scales."""
    whole = (np.abs(scale).max(axis=1, keepdims=True) / most).astype(np.float16)
    exact = whole.astype(np.float32)
    return whole, np.clip(np.rint(np.where(exact != 0, scale / exact, 0)), -most, most)


def _grid(kind: KQuant, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scale and the minimum of each group as a reader finds them, [blocks, groups, 1]."""
    read = {"Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k}[kind.name](blocks)
    return read.scale, np.zeros_like(read.scale) if read.minimum is None else read.minimum


def _put_codes(kind: KQuant, out: np.ndarray, codes: np.ndarray) -> None:
    four = np.uint8(4)
    if kind.name == "Q6_K":
        halves = codes.reshape(-1, 2, 128)
        low = halves & np.uint8(15)
        out["ql"] = (low[..., :64] | (low[..., 64:] << four)).reshape(-1, 128)
        high = (halves >> four).reshape(-1, 2, 4, 32) << np.asarray([0, 2, 4, 6], np.uint8)[:, None]
        out["qh"] = np.bitwise_or.reduce(high, axis=2).reshape(-1, 64)
        return
    low = (codes & np.uint8(15)).reshape(-1, 4, 2, 32)
    out["qs"] = (low[:, :, 0] | (low[:, :, 1] << four)).reshape(-1, SUPER // 2)
    if kind.name == "Q5_K":
        fifth = (codes >> four) << np.arange(8, dtype=np.uint8)[:, None]
        out["qh"] = np.bitwise_or.reduce(fifth, axis=1)
