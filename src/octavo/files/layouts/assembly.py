"""QArrays from the tensors of a file, with checks, and back."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from octavo._names import did_you_mean
from octavo.files import bits as streams
from octavo.files.errors import FileError
from octavo.files.layouts.base import values_dtype
from octavo.files.layouts.config import Scheme
from octavo.files.safetensors import SafeTensors
from octavo.numerics import IntFormat
from octavo.qarray import QArray

FLOATS = tuple(map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32)))
WORDS = (np.dtype(np.int32),)
_UNSIGNED = {2: ml_dtypes.uint2, 4: ml_dtypes.uint4, 8: np.uint8}


def checked_shape(file: SafeTensors, name: str, dtypes: Sequence[np.dtype], rank: int | None) -> tuple[int, ...]:
    """The shape of a tensor; raises unless it exists with one of the dtypes and the rank."""
    if name not in file:
        hint = did_you_mean(name, file.names(), most=2, cutoff=0.6) or "is a shard missing?"
        raise FileError(f"the file has no {name!r}, which its layout needs; {hint.rstrip()}")
    info = file.info(name)
    if info.dtype not in dtypes or (rank is not None and len(info.shape) != rank):
        kinds = " or ".join(dtype.name for dtype in dtypes)
        wanted = kinds if rank is None else f"{kinds} of rank {rank}"
        raise FileError(f"{name!r} is {info.dtype.name} {list(info.shape)}, not {wanted}; is this another layout?")
    return info.shape


def check_tensor(file: SafeTensors, name: str, dtypes: Sequence[np.dtype], wanted: tuple[int, ...], why: str) -> None:
    """Raise unless a tensor exists with one of the dtypes and the shape that other tensors imply."""
    shape = checked_shape(file, name, dtypes, len(wanted))
    if shape != wanted:
        raise FileError(f"{name!r} has the shape {list(shape)} but {why} imply {list(wanted)}; is the file damaged?")


def check_groups(name: str, g_idx: np.ndarray | None, size: int, group: int, count: int) -> np.ndarray | None:
    """The group of each input where groups are out of order, else None."""
    if -(-size // max(1, group)) != count:
        raise FileError(f"{name!r}: {size} inputs in groups of {group} do not make the {count} groups of its scales")
    if g_idx is None or np.array_equal(g_idx, np.arange(size) // group):
        return None
    if g_idx.size and (g_idx.min() < 0 or g_idx.max() >= count):
        raise FileError(f"{name!r}: its g_idx names groups outside of 0 to {count - 1}; is the file damaged?")
    return g_idx


def integer_weight(
    codes: np.ndarray, zeros: np.ndarray | None, scale: np.ndarray, *, bits: int, group: int, g_idx: np.ndarray | None
) -> QArray | np.ndarray:
    """A weight [out, in] of unsigned codes with `value = (code - zero) * scale`, zeros and scales [out, groups].

    Without zeros, or with all of them in the middle of the range, the result has signed codes and no zero point. A
    QArray cannot represent groups out of order (`g_idx`): the result is a float array.
    """
    middle = 1 << (bits - 1)
    zeros = None if zeros is None or np.all(zeros == middle) else zeros
    if g_idx is not None:
        offset = np.int32(middle) if zeros is None else zeros[:, g_idx].astype(np.int32)
        values = (codes.astype(np.int32) - offset).astype(np.float32) * scale[:, g_idx].astype(np.float32)
        return values.astype(scale.dtype)
    size = codes.shape[1]
    missing = scale.shape[1] * group - size if scale.shape[1] > 1 else 0
    if missing:
        # Any code will do: these values are padding.
        codes = np.pad(codes, [(0, 0), (0, missing)])
    signed = zeros is None
    codes = codes ^ np.uint8(middle) if signed else codes
    # Unsigned formats have 2, 4 or 8 bits: codes of 3 bits are stored in 4.
    width = bits if signed else next(n for n in (2, 4, 8) if n >= bits)
    return _quantized(
        streams.pack(codes, width) if width < 8 else codes.view(np.int8 if signed else np.uint8),
        scale,
        f"{'' if signed else 'u'}int{width}",
        zero_point=None if zeros is None else jnp.asarray(zeros.astype(_UNSIGNED[width])),
        padding=((-1, missing),) if missing else (),
        packed=(-1, size + missing) if width < 8 else None,
    )


def block_weight(
    name: str,
    weight: np.ndarray,
    scale: np.ndarray,
    block: tuple[int, int] | None,
    *,
    qtype: str | None = None,
    zero_point: np.ndarray | None = None,
) -> QArray:
    """A weight [..., out, in] of byte-wide codes with one scale per tensor, row or block."""
    if scale.size == 1:
        scale = scale.reshape((1,) * weight.ndim)
    elif scale.ndim == 1 and scale.shape[0] == weight.shape[-2]:
        scale = scale.reshape(*(1,) * (weight.ndim - 2), -1, 1)
    pads = []
    if scale.ndim != weight.ndim or scale.shape[:-2] not in (weight.shape[:-2], (1,) * (weight.ndim - 2)):
        raise FileError(f"{name!r}: scales of shape {list(scale.shape)} do not fit a weight {list(weight.shape)}")
    for axis in (-2, -1):
        size, count = weight.shape[axis], scale.shape[axis]
        length = size if count == 1 else 1 if count == size else block[axis] if block else size // max(1, count)
        if -(-size // max(1, length)) != count or (block is None and size % max(1, count)):
            shape = f"{list(scale.shape)} do not fit a weight {list(weight.shape)}"
            raise FileError(f"{name!r}: scales of shape {shape}" + (f" in blocks {list(block)}" if block else ""))
        if count > 1 and count * length != size:
            pads.append((axis, count * length - size))
    if pads:
        widths = [(0, dict(pads).get(axis - weight.ndim, 0)) for axis in range(weight.ndim)]
        weight = np.pad(weight.view(np.uint8), widths).view(weight.dtype)
    zeros = None if zero_point is None else jnp.asarray(zero_point.reshape(scale.shape))
    return _quantized(weight, scale, qtype or weight.dtype.name, zero_point=zeros, padding=tuple(pads))


def fp4_weight(packed: np.ndarray, scale: np.ndarray, qtype: str, outer: np.ndarray | None = None) -> QArray:
    """A weight of 4-bit floats, two to a byte, the first in the low half, as `QArray` packs them."""
    return _quantized(packed, scale, qtype, outer_scale=outer, packed=(-1, 2 * packed.shape[-1]))


def _quantized(codes: np.ndarray, scale: np.ndarray, qtype: str, outer_scale: Any = None, **rest: Any) -> QArray:
    outer = None if outer_scale is None else jnp.asarray(outer_scale)
    dtype = values_dtype(scale.dtype)
    return QArray(jnp.asarray(codes), jnp.asarray(scale), qtype=qtype, outer_scale=outer, dtype=dtype, **rest)


def check_integers(name: str, q: QArray, widths: Sequence[int]) -> None:
    """Raise unless a weight is an integer matrix with scales per output and full group of inputs."""
    fmt, shape, scheme = q.qtype, q.shape, Scheme.of(q)
    if not isinstance(fmt, IntFormat) or fmt.unit != 1.0 or not fmt.preserve_zero or fmt.bits not in widths:
        kinds = ", ".join(f"{n}" for n in widths)
        raise FileError(f"{name!r} is {fmt.name}; this layout holds integers of {kinds} bits")
    if len(shape) != 2:
        raise FileError(f"{name!r} is {list(shape)}; this layout holds matrices [out, in]")
    if not fmt.signed and not scheme.zero_point:
        raise FileError(f"{name!r} is {fmt.name} without a zero point; this layout needs one")
    rows, columns = scheme.tile
    if rows not in (1, -1) or (columns > 0 and shape[1] % columns):
        raise FileError(f"{name!r} {list(shape)}: scales are per output and full group, not tiles of {scheme.tile}")


def unsigned_codes(q: QArray) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Codes [out, in], zero points if any and scales [out, groups] of a weight: the inverse of `integer_weight`."""
    fmt = q.qtype
    offset = 1 << (fmt.bits - 1) if fmt.signed else 0
    grid = (q.shape[0], q.scale.shape[1])
    codes = (np.asarray(q.unpack().qvalue).astype(np.int16) + offset).astype(np.uint8)
    scale = np.broadcast_to(np.asarray(q.scale), grid)
    if q.zero_point is None:
        return codes, None, scale
    zeros = (np.asarray(q.zero_point).astype(np.int16) + offset).astype(np.uint8)
    return codes, np.broadcast_to(zeros, grid), scale
