"""The product of two operands, each an array or a QArray, with nothing left to differentiate.

An operand is a factor of codes and a factor of scales. Where the scales are constant along the contraction, or along
tiles of it, the codes are multiplied in their own precision and the scales come in afterwards; otherwise the operand
is dequantized first. Zero points of integers become correction terms: with l = ql - zl and r = qr - zr,

    sum l r = sum ql qr - zl sum qr - zr sum ql + n zl zr.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo._typing import Array
from octavo.numerics import BlockFormat, FloatFormat, IntFormat
from octavo.ops.dims import Dims
from octavo.ops.lowering import check_lowering, float_dot, integer_dot
from octavo.qarray import QArray

# Shorter tiles make a stack of products, one for each, larger than the operands: dequantizing is cheaper.
SMALLEST_TILE = 64

type Factor = Array | QArray


def multiply(
    lhs: Factor,
    rhs: Factor,
    dims: Dims,
    *,
    dtype: Any,
    precision: Any = None,
    out_sharding: Any = None,
    lowering: str = "auto",
) -> Array:
    """The product in `dtype`."""
    check_lowering(lowering)
    if not isinstance(lhs, QArray) and not isinstance(rhs, QArray):
        return jax.lax.dot_general(
            lhs, rhs, dims.numbers, precision=precision, preferred_element_type=dtype, out_sharding=out_sharding
        )
    lhs, rhs = _whole(lhs), _whole(rhs)
    tiles = _contraction_tiles(lhs, rhs, dims)
    kind = None if tiles is None else _kind(lhs, rhs)
    if tiles is None or kind is None:
        return _dequantized(lhs, rhs, dims, dtype, precision, out_sharding)
    left = _Side(lhs, dims.lhs_contract, dims.lhs_batch, tiles)
    right = _Side(rhs, dims.rhs_contract, dims.rhs_batch, tiles)
    split = Dims(left.ndim, right.ndim, left.contract, right.contract, left.batch, right.batch)
    out_sharding = None if len(left.batch) > len(dims.lhs_batch) else out_sharding
    if kind == "int":
        out = integer_dot(left.integers(), right.integers(), split, lowering=lowering, out_sharding=out_sharding)
        out = _correct(out, left, right, split).astype(jnp.float32)
    else:
        values = left.values(kind), right.values(kind)
        out = float_dot(*values, split, precision=precision, out_sharding=out_sharding)
    for side in (left, right):
        scale = side.scale(codes=kind == "int")
        if scale is not None:
            out = out * _beside(scale, split, after=side is right)
    counts = range(len(dims.lhs_batch), len(split.lhs_batch))
    return (jnp.sum(out, axis=tuple(counts)) if counts else out).astype(dtype)


def _whole(x: Factor) -> Factor:
    """Unpacked and without padding that a matmul would trip over."""
    if not isinstance(x, QArray):
        return x
    x = x.unpack()
    for axis, _ in x.padding:
        # Slicing to the array's own length spreads the scale of a padded axis to single values.
        index = [slice(None)] * x.ndim
        index[axis] = slice(0, x.shape[axis])
        x = x[tuple(index)]
    return x


def _contraction_tiles(lhs: Factor, rhs: Factor, dims: Dims) -> tuple[int, ...] | None:
    """The tile of each contracted axis in which both scales are constant; None if that is too short to be worth it."""
    tiles = []
    for a, b in zip(dims.lhs_contract, dims.rhs_contract, strict=True):
        sizes = [x.tile_shape[axis] for x, axis in ((lhs, a), (rhs, b)) if isinstance(x, QArray)]
        sizes += [_part_tile(x, axis) for x, axis in ((lhs, a), (rhs, b)) if isinstance(x, QArray)]
        small, size = min(sizes), lhs.shape[a]
        if any(s % small for s in sizes if small) or (small < SMALLEST_TILE and small != size):
            return None
        tiles.append(small)
    return tuple(tiles)


def _part_tile(q: QArray, axis: int) -> int:
    return min(q.shape[axis] // max(1, p.shape[axis]) for p in (q.scale, q.zero_point, q.outer_scale) if p is not None)


def _kind(lhs: Factor, rhs: Factor) -> Any:
    """ "int" for a product of integers, or the dtype in which all values are exact; None where there is none."""
    if isinstance(lhs, QArray) and isinstance(rhs, QArray):
        if _is_integer(lhs) and _is_integer(rhs):
            return "int"
        if _native_float8(lhs) and _native_float8(rhs):
            return "native"
    carriers = [_carrier(x) for x in (lhs, rhs)]
    if None in carriers:
        return None
    return jnp.promote_types(*carriers)


def _is_integer(q: QArray) -> bool:
    fmt = _element(q)
    return isinstance(fmt, IntFormat) and fmt.bits <= (8 if fmt.has_zero else 7)


def _native_float8(q: QArray) -> bool:
    fmt = _element(q)
    return isinstance(fmt, FloatFormat) and fmt.dtype is not None and fmt.bits == 8


def _element(q: QArray):
    return q.qtype.element if isinstance(q.qtype, BlockFormat) else q.qtype


def _carrier(x: Factor) -> np.dtype | None:
    if not isinstance(x, QArray):
        return jnp.dtype(x.dtype) if x.dtype in (jnp.bfloat16, jnp.float16, jnp.float32) else None
    if x.zero_point is not None:
        return jnp.dtype(jnp.bfloat16) if x.qtype.bits <= 8 else jnp.dtype(jnp.float32)
    carrier = x.qtype.carrier
    return jnp.dtype(jnp.bfloat16) if carrier == np.int8 else carrier


def _dequantized(lhs: Factor, rhs: Factor, dims: Dims, dtype: Any, precision: Any, out_sharding: Any) -> Array:
    wide = [x.dequantize() if isinstance(x, QArray) else x for x in (lhs, rhs)]
    common = jnp.promote_types(wide[0].dtype, wide[1].dtype)
    lhs, rhs = (x.astype(common) for x in wide)
    out = float_dot(lhs, rhs, dims, precision=precision, out_sharding=out_sharding)
    return out.astype(dtype)


class _Side:
    """One operand with its contracted axes cut into tiles; the tiles' counts are batch axes."""

    def __init__(self, x: Factor, contract: tuple[int, ...], batch: tuple[int, ...], tiles: tuple[int, ...]):
        self.x = x
        self.own_contract, self.own_batch = contract, batch
        cut = {axis: tile for axis, tile in zip(contract, tiles, strict=True) if 0 < tile < x.shape[axis]}
        self.cut = cut
        place, at = {}, 0
        for axis in range(len(x.shape)):
            place[axis] = at
            at += 2 if axis in cut else 1
        self.ndim = at
        self.batch = (*(place[a] for a in batch), *(place[a] for a in contract if a in cut))
        self.contract = tuple(place[a] + (a in cut) for a in contract)

    def _split(self, x: Array) -> Array:
        shape = []
        for axis, dim in enumerate(x.shape):
            if axis in self.cut:
                tile, size = self.cut[axis], self.x.shape[axis]
                shape += [size // tile, tile] if dim == size else [dim, 1]
            else:
                shape.append(dim)
        return x.reshape(shape)

    def integers(self) -> Array:
        """Codes as int8, their zero point not yet subtracted."""
        assert isinstance(self.x, QArray)
        fmt, codes = _element(self.x), self.x.qvalue
        if not fmt.signed and fmt.bits == 8:
            codes = (codes ^ jnp.uint8(128)).astype(jnp.int8)  # 128 less, as are the zero points below
        codes = codes.astype(jnp.int8)
        return self._split(codes if fmt.has_zero else 2 * codes + jnp.int8(1))

    def zero_point(self) -> Array | None:
        """The zero point of `integers`, as int32 in split form, one per value of the axes that are not contracted."""
        if not isinstance(self.x, QArray) or self.x.zero_point is None:
            return None
        fmt = _element(self.x)
        zero = self.x.zero_point.astype(jnp.int32) - (128 if not fmt.signed and fmt.bits == 8 else 0)
        return self._split(self._spread(zero))

    def values(self, kind: Any) -> Array:
        """Codes as the floats that they stand for, exactly."""
        if not isinstance(self.x, QArray):
            return self._split(self.x.astype(kind))
        if kind == "native":
            return self._split(self.x.qvalue)
        values = self.x.qtype.decode(self.x.qvalue)
        if self.x.zero_point is not None:
            ones = QArray(self.x.qvalue, jnp.ones_like(self.x.scale, jnp.float32), self.x.zero_point, self.x.qtype)
            values = ones.dequantize(jnp.float32)
        return self._split(values.astype(kind))

    def scale(self, *, codes: bool) -> Array | None:
        """The scale in split form, float32: that of the codes as integers, or that of the values they stand for."""
        if not isinstance(self.x, QArray):
            return None
        scale = self.x.scale.astype(jnp.float32)
        if self.x.outer_scale is not None:
            scale = scale * self.x.outer_scale.astype(jnp.float32)
        fmt = _element(self.x)
        if codes and isinstance(fmt, IntFormat):
            scale = scale * (fmt.unit * (1.0 if fmt.has_zero else 0.5))
        return self._split(self._spread(scale))

    def _spread(self, part: Array) -> Array:
        """One entry per value on axes that are kept, one per tile or one for all on those that are contracted."""
        for axis, (count, size) in enumerate(zip(part.shape, self.x.shape, strict=True)):
            want = size // self.cut[axis] if axis in self.cut else (1 if axis in self.own_contract else size)
            if 1 < count < want:
                part = jnp.repeat(part, want // count, axis=axis)
        return part


def _beside(part: Array, dims: Dims, *, after: bool = False) -> Array:
    """A scale in split form, with its axes where they are in the product: (batch, lhs, rhs)."""
    batch = dims.rhs_batch if after else dims.lhs_batch
    remaining = dims.rhs_remaining if after else dims.lhs_remaining
    contract = dims.rhs_contract if after else dims.lhs_contract
    part = jnp.transpose(part, (*batch, *remaining, *contract))
    lead, kept = part.shape[: len(batch)], part.shape[len(batch) : len(batch) + len(remaining)]
    others = (1,) * len(dims.lhs_remaining if after else dims.rhs_remaining)
    return part.reshape(*lead, *others, *kept) if after else part.reshape(*lead, *kept, *others)


def _correct(out: Array, left: _Side, right: _Side, dims: Dims) -> Array:
    """An integer product of codes, with the terms that their zero points make."""
    zl, zr = left.zero_point(), right.zero_point()
    if zl is not None:
        sums = jnp.sum(right.integers().astype(jnp.int32), axis=dims.rhs_contract, keepdims=True)
        out = out - _beside(zl, dims) * _beside(sums, dims, after=True)
    if zr is not None:
        sums = jnp.sum(left.integers().astype(jnp.int32), axis=dims.lhs_contract, keepdims=True)
        out = out - _beside(zr, dims, after=True) * _beside(sums, dims)
    if zl is not None and zr is not None:
        depth = math.prod(left.integers().shape[a] for a in dims.lhs_contract)
        out = out + depth * _beside(zl, dims) * _beside(zr, dims, after=True)
    return out
