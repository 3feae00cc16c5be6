"""Arrays as blocks of ggml: F32, F16, BF16, Q8_0, Q5_0 and Q4_0, bit for bit as quantize_row_*_ref in ggml-quants.c.

K-quants are in `kquants_encode`.
"""

import functools
from collections.abc import Callable

import ml_dtypes
import numpy as np

from octavo.files.errors import FileError
from octavo.files.gguf.kquants_encode import KQUANTS, KQuant, encode_kquant
from octavo.files.gguf.types import TYPES, TensorType
from octavo.qarray import QArray


def _cast(dtype: np.dtype, limit: float) -> Callable[[str, np.ndarray], np.ndarray]:
    def cast(name: str, array: np.ndarray) -> np.ndarray:
        if array.dtype == dtype:
            return array.ravel().view(np.uint8)
        with np.errstate(over="ignore"):
            cast = array.astype(dtype)
        overflows = np.isinf(cast.astype(np.float32)) & np.isfinite(array.astype(np.float64))
        if overflows.any():
            largest = np.abs(array.astype(np.float64))[overflows].max()
            raise FileError(
                f"tensor {name!r}: {largest:.6g} is beyond {dtype.name}, which ends at {limit:.6g}; use F32"
            )
        return cast.ravel().view(np.uint8)

    return cast


def _blocks_of(name: str, array: np.ndarray, kind: str) -> np.ndarray:
    blocks = array.astype(np.float32, copy=False).reshape(-1, TYPES[kind].values)
    if not np.isfinite(blocks).all():
        raise FileError(f"tensor {name!r}: holds inf or NaN, which {kind} cannot; write it as F16 or F32")
    return blocks


def _half(name: str, scale: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore"):
        half = scale.astype(np.float16)
    if np.isinf(half).any():
        raise FileError(f"tensor {name!r}: the scale {np.abs(scale).max():.6g} is beyond float16; write it as F32")
    return half


def _inverse(scale: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        inverse = np.float32(1) / scale
    return np.where(np.isfinite(inverse), inverse, np.float32(0))  # of 0 and of subnormals


def _q8_0(name: str, array: np.ndarray) -> np.ndarray:
    blocks = _blocks_of(name, array, "Q8_0")
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    scaled = blocks * _inverse(scale)
    truncated = np.trunc(scaled)  # halves away from zero, like roundf
    away = np.abs(scaled - truncated) >= np.float32(0.5)
    codes = truncated + np.copysign(away.astype(np.float32), scaled)
    return pack_q8_0(_half(name, scale), codes.astype(np.int8))


def _q4_0(name: str, array: np.ndarray) -> np.ndarray:
    blocks = _blocks_of(name, array, "Q4_0")
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1, keepdims=True), axis=-1)
    scale = largest / np.float32(-8)  # the value of largest magnitude gets the code -8: scales have a sign
    codes = np.trunc(blocks * _inverse(scale) + np.float32(8.5)).astype(np.uint8)
    return pack_q4_0(_half(name, scale), np.minimum(codes, np.uint8(15)))


def _q5_0(name: str, array: np.ndarray) -> np.ndarray:
    blocks = _blocks_of(name, array, "Q5_0")
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1, keepdims=True), axis=-1)
    scale = largest / np.float32(-16)
    codes = np.minimum(np.trunc(blocks * _inverse(scale) + np.float32(16.5)).astype(np.uint8), np.uint8(31))
    out = np.empty(len(scale), TYPES["Q5_0"].block)
    out["d"] = _half(name, scale)
    out["qs"] = (codes[:, :16] & np.uint8(15)) | (codes[:, 16:] << np.uint8(4))
    out["qh"] = np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")
    return out.view(np.uint8)


def _kquant(kind: KQuant, name: str, array: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    blocks = _blocks_of(name, array, kind.name)
    out = encode_kquant(kind, blocks, None if importance is None else importance.reshape(blocks.shape))
    if np.isinf(out["d"]).any():
        raise FileError(f"tensor {name!r}: a scale of {np.abs(blocks).max():.6g} is beyond float16; write it as F32")
    return out.view(np.uint8)


def pack_q8_0(scale: np.ndarray, codes: np.ndarray) -> np.ndarray:
    out = np.empty(len(scale), TYPES["Q8_0"].block)
    out["d"], out["qs"] = scale, codes
    return out.view(np.uint8)


def pack_q4_0(scale: np.ndarray, codes: np.ndarray) -> np.ndarray:
    out = np.empty(len(scale), TYPES["Q4_0"].block)
    out["d"], out["qs"] = scale, codes[:, :16] | (codes[:, 16:] << np.uint8(4))
    return out.view(np.uint8)


ENCODERS: dict[str, Callable[..., np.ndarray]] = {
    "F32": _cast(np.dtype(np.float32), float(np.finfo(np.float32).max)),
    "F16": _cast(np.dtype(np.float16), 65504.0),
    "BF16": _cast(np.dtype(ml_dtypes.bfloat16), float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)),
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q5_0": _q5_0,
    **{name: functools.partial(_kquant, kind) for name, kind in KQUANTS.items()},
}
"""Functions of the name of a tensor, for errors, and its contiguous values; of K-quants also of their importances."""


def encode_codes(name: str, q: QArray, kind: TensorType) -> np.ndarray:
    """The bytes of a QArray as Q8_0 or Q4_0; raises unless its codes and scales can be stored unchanged."""
    wanted = {"Q8_0": "int8", "Q4_0": "int4"}.get(kind.name)
    if q.qtype.name != wanted or q.zero_point is not None or q.outer_scale is not None or q.padding:
        raise FileError(
            f"tensor {name!r}: a QArray of {q.qtype.name} cannot be stored as {kind.name}; "
            "symmetric int8 can as Q8_0 and symmetric int4 as Q4_0. Otherwise write q.dequantize()"
        )
    q = q.unpack()
    tile = q.tile_shape
    if tile[-1] % kind.values:
        raise FileError(
            f"tensor {name!r}: tiles of {tile[-1]} along the last axis are no multiple of blocks of {kind.values}"
        )
    exact = np.asarray(q.scale).astype(np.float32)
    scale = _half(name, exact)
    if not np.array_equal(scale.astype(np.float32), exact):
        raise FileError(
            f"tensor {name!r}: its scales are not float16 values, as {kind.name} stores them; round them first"
        )
    for axis in range(q.ndim):
        times = tile[axis] // kind.values if axis == q.ndim - 1 else tile[axis]
        scale = np.repeat(scale, times, axis=axis)
    codes = np.asarray(q.qvalue).astype(np.int8).reshape(-1, kind.values)
    scale = scale.reshape(-1, 1)
    if kind.name == "Q8_0":
        return pack_q8_0(scale, codes)
    return pack_q4_0(scale, (codes + np.int8(8)).astype(np.uint8))
