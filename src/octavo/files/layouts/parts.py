"""The parts of a quantized weight, taken from a file and put together; and taken apart to be written."""

import difflib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from octavo.files import bits as streams
from octavo.files.errors import FileError
from octavo.files.layouts.base import TensorFile, values_dtype
from octavo.files.layouts.scheme import Scheme
from octavo.numerics import IntFormat
from octavo.qarray import QArray

FLOATS = tuple(map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32)))
WORDS = (np.dtype(np.int32),)
_UNSIGNED = {2: ml_dtypes.uint2, 4: ml_dtypes.uint4, 8: np.uint8}


def shape_of(file: TensorFile, name: str, dtypes: Sequence[np.dtype], rank: int | None) -> tuple[int, ...]:
    """The shape of a tensor that is there and of the dtype and rank that it ought to be."""
    if name not in file:
        near = difflib.get_close_matches(name, file.names(), n=2)
        hint = f"did it mean {' or '.join(map(repr, near))}?" if near else "is a shard missing?"
        raise FileError(f"the file has no {name!r}, which its layout needs; {hint}")
    info = file.info(name)
    if info.dtype not in dtypes or (rank is not None and len(info.shape) != rank):
        kinds = " or ".join(dtype.name for dtype in dtypes)
        wanted = kinds if rank is None else f"{kinds} of rank {rank}"
        raise FileError(f"{name!r} is {info.dtype.name} {list(info.shape)}, not {wanted}; is this another layout?")
    return info.shape


def expect(name: str, shape: tuple[int, ...], wanted: tuple[int, ...], why: str) -> None:
    """Raise unless a part has the shape that the others ask for."""
    if shape != wanted:
        raise FileError(f"{name!r} has the shape {list(shape)} but {why} ask for {list(wanted)}; is the file damaged?")


def groups_of(name: str, g_idx: np.ndarray | None, size: int, group: int, count: int) -> np.ndarray | None:
    """The group of each input where they are out of order, None where they follow each other."""
    if -(-size // max(1, group)) != count:
        raise FileError(f"{name!r}: {size} inputs in groups of {group} do not make the {count} groups of its scales")
    if g_idx is None or np.array_equal(g_idx, np.arange(size) // group):
        return None
    if g_idx.size and (g_idx.min() < 0 or g_idx.max() >= count):
        raise FileError(f"{name!r}: its g_idx names groups outside of 0 to {count - 1}; is the file damaged?")
    return g_idx


def integers(
    fields: np.ndarray, zeros: np.ndarray | None, scale: np.ndarray, *, bits: int, group: int, g_idx: np.ndarray | None
) -> QArray | np.ndarray:
    """A weight [out, in] of unsigned fields with `value = (field - zero) * scale`, zeros and scales [out, groups].

    Without zeros, or with all of them in the middle, the codes are signed and have no zero point. With groups out of
    order (`g_idx`) there is no tile for a scale to belong to, and the values are given.
    """
    middle = 1 << (bits - 1)
    zeros = None if zeros is None or np.all(zeros == middle) else zeros
    if g_idx is not None:
        offset = np.int32(middle) if zeros is None else zeros[:, g_idx].astype(np.int32)
        values = (fields.astype(np.int32) - offset).astype(np.float32) * scale[:, g_idx].astype(np.float32)
        return values.astype(scale.dtype)
    size = fields.shape[1]
    missing = scale.shape[1] * group - size if scale.shape[1] > 1 else 0
    if missing:
        # Any code will do: these values are cut off.
        fields = np.pad(fields, [(0, 0), (0, missing)])
    signed = zeros is None
    codes = fields ^ np.uint8(middle) if signed else fields
    # Unsigned formats have 2, 4 or 8 bits; codes of fewer are codes of those as well.
    width = bits if signed else next(n for n in (2, 4, 8) if n >= bits)
    return _quantized(
        streams.pack(codes, width) if width < 8 else codes.view(np.int8 if signed else np.uint8),
        scale,
        f"{'' if signed else 'u'}int{width}",
        zero_point=None if zeros is None else jnp.asarray(zeros.astype(_UNSIGNED[width])),
        padding=((-1, missing),) if missing else (),
        packed=(-1, size + missing) if width < 8 else None,
    )


def blocks(
    name: str,
    weight: np.ndarray,
    scale: np.ndarray,
    block: tuple[int, int] | None,
    *,
    qtype: str | None = None,
    zero_point: np.ndarray | None = None,
) -> QArray:
    """A weight [..., out, in] of byte-wide codes whose scales are one for all, one per row, or one per block."""
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


def fours(packed: np.ndarray, scale: np.ndarray, qtype: str, outer: np.ndarray | None = None) -> QArray:
    """A weight of four-bit floats, two to a byte, the first in the low half, as `QArray` packs them too."""
    return _quantized(packed, scale, qtype, outer_scale=outer, packed=(-1, 2 * packed.shape[-1]))


def _quantized(codes: np.ndarray, scale: np.ndarray, qtype: str, outer_scale: Any = None, **rest: Any) -> QArray:
    outer = None if outer_scale is None else jnp.asarray(outer_scale)
    dtype = values_dtype(scale.dtype)
    return QArray(jnp.asarray(codes), jnp.asarray(scale), qtype=qtype, outer_scale=outer, dtype=dtype, **rest)


def check_integers(name: str, shape: tuple[int, ...], scheme: Scheme, widths: Sequence[int]) -> None:
    """Raise unless a weight is a matrix of integers with scales per output and whole group of inputs."""
    fmt = scheme.qtype
    if not isinstance(fmt, IntFormat) or fmt.unit != 1.0 or not fmt.preserve_zero or fmt.bits not in widths:
        kinds = ", ".join(f"{n}" for n in widths)
        raise FileError(f"{name!r} is {fmt.name}; this layout holds integers of {kinds} bits")
    if len(shape) != 2:
        raise FileError(f"{name!r} is {list(shape)}; this layout holds matrices [out, in]")
    if not fmt.signed and not scheme.zero_point:
        raise FileError(f"{name!r} is {fmt.name} without a zero point; this layout needs one")
    rows, columns = scheme.tile
    if rows not in (1, -1) or (columns > 0 and shape[1] % columns):
        raise FileError(f"{name!r} {list(shape)}: scales are per output and whole group, not tiles of {scheme.tile}")


def integer_fields(q: QArray) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """The unsigned fields [out, in], zeros if any and scales [out, groups] of a weight; the reverse of `integers`."""
    fmt = q.qtype
    offset = 1 << (fmt.bits - 1) if fmt.signed else 0
    grid = (q.shape[0], q.scale.shape[1])
    fields = (np.asarray(q.unpack().qvalue).astype(np.int16) + offset).astype(np.uint8)
    scale = np.broadcast_to(np.asarray(q.scale), grid)
    if q.zero_point is None:
        return fields, None, scale
    zeros = (np.asarray(q.zero_point).astype(np.int16) + offset).astype(np.uint8)
    return fields, np.broadcast_to(zeros, grid), scale
