"""Blocks of ggml as QArrays, where those have exactly the same values."""

from collections.abc import Iterable

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from octavo.files.gguf.blocks import IQ4_TABLE, Blocks, Codes
from octavo.files.gguf.header import Info
from octavo.numerics import BlockFormat, Format, IntFormat, TableFormat, get_format
from octavo.qarray import QArray

IQ4 = TableFormat(name="iq4_nl", values=tuple(map(float, IQ4_TABLE)))

_SIGNED = {"Q8_0": "int8", "Q8_K": "int8", "Q4_0": "int4", "Q5_0": "int5", "Q6_K": "int6", "Q3_K": "int3"}
_FORMATS: dict[str, Format] = {
    **{kind: get_format(name) for kind, name in _SIGNED.items()},
    "TQ1_0": get_format("int2"),
    "TQ2_0": get_format("int2"),
    "IQ4_NL": IQ4,
    "IQ4_XS": IQ4,
    "MXFP4": get_format("mxfp4"),
    # With a minimum: unsigned codes and a zero point.
    "Q2_K": get_format("uint2"),
    "Q4_1": get_format("uint4"),
    "Q4_K": get_format("uint4"),
    "Q5_1": IntFormat(bits=5, signed=False),
    "Q5_K": IntFormat(bits=5, signed=False),
}
_TWO_BIT_TERNARY = ("TQ1_0", "TQ2_0")


def assemble_rounded(info: Info, parts: Iterable[tuple[Blocks, Codes]]) -> QArray | None:
    """The QArray of a type with a minimum, as signed codes and float32 zero points: exact but for a rounding.

    `minimum / scale` is rounded, so values differ from `scale * code + minimum` by half a unit in the last place of the
    minimum. None for other types, and where a scale or its zero point is not finite.
    """
    if info.kind not in _WITH_MINIMUM:
        return None
    middle = np.int8(1 << (_FORMATS[info.kind].bits - 1))
    codes = np.empty(info.size, np.int8)
    scales: list[np.ndarray] = []
    zeros: list[np.ndarray] = []
    done, tile = 0, 1
    for _, piece in parts:
        assert piece.minimum is not None
        # Without a scale all values are the minimum: code 0, with the zero point 1 or -1.
        flat = piece.scale == 0
        scale = np.where(flat, np.abs(piece.minimum), piece.scale)
        with np.errstate(all="ignore"):
            zero = np.where(flat, -np.sign(piece.minimum), -piece.minimum / scale - np.float32(middle))
        if not (np.isfinite(zero).all() and np.isfinite(scale).all()):
            return None
        tile = piece.codes.shape[-1]
        shifted = np.where(flat, np.int8(0), piece.codes.view(np.int8) - middle)
        codes[done : done + shifted.size] = shifted.ravel()
        scales.append(scale.ravel())
        zeros.append(zero.ravel())
        done += piece.codes.size
    groups = (*info.shape[:-1], info.shape[-1] // tile)
    fmt = _with_zeros(_WITH_MINIMUM[info.kind], tile)
    return QArray(
        codes.reshape(info.shape).astype(fmt.storage, copy=False),
        np.concatenate(scales).reshape(groups),
        np.concatenate(zeros).reshape(groups),
        fmt,
        dtype=np.float32,
    )


def assemble(info: Info, parts: Iterable[tuple[Blocks, Codes]]) -> QArray | None:
    """The QArray of a tensor's blocks, given in pieces, or None if it would not be exact."""
    if info.kind not in _FORMATS:
        return None
    fmt = _FORMATS[info.kind]
    codes = np.empty(info.size, np.int8)
    scales: list[np.ndarray] = []
    zeros: list[np.ndarray] = []
    done, tile = 0, 1
    for blocks, piece in parts:
        if info.kind in _TWO_BIT_TERNARY and piece.codes.max() > 1:
            return None  # the fourth code, which is not in int2 and which no program writes
        scale = _e8m0(blocks, piece) if info.kind == "MXFP4" else piece.scale
        if scale is None:
            return None
        if piece.minimum is not None:
            zero = _zero_points(piece, fmt)
            if zero is None:
                return None
            zeros.append(zero.ravel())
        tile = piece.codes.shape[-1]
        codes[done : done + piece.codes.size] = piece.codes.ravel()
        scales.append(scale.ravel())
        done += piece.codes.size
    groups = (*info.shape[:-1], info.shape[-1] // tile)
    return QArray(
        jnp.asarray(_stored(codes.reshape(info.shape), fmt)),
        jnp.asarray(np.concatenate(scales).reshape(groups)),
        jnp.asarray(_stored(np.concatenate(zeros).reshape(groups), fmt)) if zeros else None,
        fmt,
        dtype=np.float32,
    )


_WITH_MINIMUM = {"Q2_K": 8, "Q4_1": 4, "Q4_K": 4, "Q5_1": 8, "Q5_K": 8}
"""The types with a minimum, and the bits of the codes that kernels multiply."""


def _with_zeros(bits: int, tile: int) -> BlockFormat:
    element = get_format(f"int{bits}")
    scales = {"scale_dtype": "float32", "scale_rounding": "nearest", "zero_dtype": "float32"}
    return BlockFormat(name=f"int{bits}_g{tile}", element=element, tile=tile, **scales)


def _stored(codes: np.ndarray, fmt: Format) -> np.ndarray:
    """Codes in the storage dtype of a format; those of e2m1 are bit patterns."""
    if fmt.storage == ml_dtypes.float4_e2m1fn:
        return codes.view(np.uint8).view(ml_dtypes.float4_e2m1fn)
    return codes.astype(fmt.storage, copy=False)


def _e8m0(blocks: Blocks, piece: Codes) -> np.ndarray | None:
    """Exponents as scales; None where ggml and e8m0 differ (255), or float32 would overflow or lose bits."""
    exponent = blocks["e"]
    used = (piece.codes & np.uint8(7)).any(axis=-1)
    outside = (exponent < 2) | (exponent > 252)
    if (exponent == 255).any() or (outside & used).any():
        return None
    return exponent.view(ml_dtypes.float8_e8m0fnu)


def _zero_points(piece: Codes, fmt: Format) -> np.ndarray | None:
    """Integer zero points z with minimum == -z * scale exactly, or None."""
    assert piece.minimum is not None
    with np.errstate(all="ignore"):
        zero = np.rint(-piece.minimum / piece.scale)
        zero = np.where(piece.scale == 0, np.float32(0), zero)
        exact = (zero >= 0) & (zero <= fmt.largest) & (-zero * piece.scale == piece.minimum) & np.isfinite(piece.scale)
    return zero.astype(np.int8) if exact.all() else None
