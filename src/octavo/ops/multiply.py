"""The product of two operands, each an array or a QArray, with nothing left to differentiate.

An operand is a factor of codes and a factor of scales. Where the scales are constant along the contraction, or along
tiles of it, the codes are multiplied in their own precision and the scales come in afterwards; otherwise the operand
is dequantized first. Zero points of integers become correction terms: with l = ql - zl and r = qr - zr,

    sum l r = sum ql qr - zl sum qr - zr sum ql + n zl zr.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from octavo import _sharding
from octavo._typing import Array
from octavo.ops import digits, factor, native
from octavo.ops.dims import Dims
from octavo.ops.factor import Factor
from octavo.ops.lowering import check_lowering, float_dot, integer_dot, is_large, layout_refusal
from octavo.qarray import QArray

# Shorter tiles make a stack of products, one for each, larger than the operands: dequantizing is cheaper.
SMALLEST_TILE = 64


def multiply(
    lhs: Factor,
    rhs: Factor,
    dims: Dims,
    *,
    dtype: Any,
    precision: Any = None,
    out_sharding: Any = None,
    lowering: str = "auto",
    accumulator: str | None = None,
) -> Array:
    """The product in `dtype`."""
    check_lowering(lowering)
    if not isinstance(lhs, QArray) and not isinstance(rhs, QArray):
        return jax.lax.dot_general(
            lhs, rhs, dims.numbers, precision=precision, preferred_element_type=dtype, out_sharding=out_sharding
        )
    if lowering in ("auto", "kernel") and not (isinstance(lhs, QArray) and isinstance(rhs, QArray)):
        refusal = _kernel_refusal(lhs, rhs, dims, out_sharding, accumulator)
        if refusal is None and (lowering == "kernel" or is_large(rhs.shape)):
            how = functools.partial(_by_xla, dims=dims, dtype=jnp.float32, precision=precision)
            assert not isinstance(lhs, QArray)
            assert isinstance(rhs, QArray)
            return native.product(lhs, rhs, dims, how).astype(dtype)
        if lowering == "kernel":
            raise ValueError(f"lowering='kernel': {refusal}; lowering='auto' takes another way where it must")
    return _by_xla(
        lhs,
        rhs,
        dims,
        dtype=dtype,
        precision=precision,
        out_sharding=out_sharding,
        lowering=lowering,
        accumulator=accumulator,
    )


def _kernel_refusal(lhs: Factor, rhs: Factor, dims: Dims, out_sharding: Any, accumulator: str | None) -> str | None:
    if out_sharding is not None:
        return "the kernel knows no shardings"
    if accumulator is not None and jnp.dtype(accumulator) != jnp.float32:
        return f"the kernel accumulates in float32, not in {accumulator}"
    return native.refusal(lhs, rhs, dims)


def _by_xla(
    lhs: Factor,
    rhs: Factor,
    dims: Dims,
    *,
    dtype: Any,
    precision: Any = None,
    out_sharding: Any = None,
    lowering: str = "auto",
    accumulator: str | None = None,
) -> Array:
    """The product of operands of which one at least is a QArray, without kernels but for integers."""
    lhs, rhs = factor.whole(lhs), factor.whole(rhs)
    tiles = _contraction_tiles(lhs, rhs, dims)
    kind = None if tiles is None else factor.kind(lhs, rhs)
    if lowering == "kernel" and kind != "int":
        raise ValueError("lowering='kernel': of two QArrays the kernel multiplies integers without tiles alone")
    if tiles is None or kind is None:
        return _dequantized(lhs, rhs, dims, dtype, precision, out_sharding, accumulator)
    left, right, split = _sides(lhs, rhs, dims, tiles)
    wanted = out_sharding
    if left.has_zero_point or right.has_zero_point:
        out_sharding = _sharding.plain(out_sharding)  # of a sum that is not taken nothing can be subtracted
    if kind == "int":
        ql, qr, out_sharding = _split_shardings(left.integers(), right.integers(), split, dims, out_sharding)
        out = integer_dot(ql, qr, split, lowering=lowering, out_sharding=out_sharding)
        out = _correct(out, left, right, split).astype(jnp.float32)
    elif (
        factor.is_weight_only(lhs, rhs) and digits.worthwhile(lhs.shape, dims) and lowering != "plain" and dims == split
    ):
        assert not isinstance(lhs, QArray)
        out = digits.digit_dot(lhs, right.integers(), dims)
        kind = "int"
    else:
        ql, qr, out_sharding = _split_shardings(left.values(kind), right.values(kind), split, dims, out_sharding)
        out = float_dot(ql, qr, split, precision=precision, out_sharding=out_sharding, accumulator=accumulator)
        out = out.astype(jnp.float32)
    for side in (left, right):
        scale = side.scale(codes=isinstance(kind, str))
        if scale is not None:
            out = out * _sharding.beside(_beside(scale, split, after=side is right), out)
    counts = tuple(range(len(dims.lhs_batch), len(split.lhs_batch)))
    return _sharding.placed((_total(out, counts, accumulator) if counts else out).astype(dtype), wanted)


def _total(out: Array, axes: tuple[int, ...], accumulator: str | None) -> Array:
    """The sum of the products of tiles."""
    if accumulator is None:
        return jnp.sum(out, axis=axes)
    # jnp.sum would widen it: devices that have a tile each send what is added up here.
    return jax.lax.reduce(out.astype(accumulator), jnp.zeros((), accumulator), jax.lax.add, axes)


def describe(lhs: Factor, rhs: Factor, dims: Dims, lowering: str = "auto") -> str:
    """In a few words, how `multiply` runs this product."""
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu and native.refusal(lhs, rhs, dims) is None and is_large(rhs.shape):
        assert isinstance(rhs, QArray)
        return f"{rhs.qtype.name} weights, CPU kernel"
    lhs, rhs = factor.whole(lhs), factor.whole(rhs)
    tiles = _contraction_tiles(lhs, rhs, dims)
    kind = None if tiles is None else factor.kind(lhs, rhs)
    if kind is None:
        return "dequantized"
    if kind == "int":
        assert tiles is not None
        split = _sides(lhs, rhs, dims, tiles)[2]
        by_kernel = on_cpu and split == dims and is_large(rhs.shape) and layout_refusal(lhs.shape, dims) is None
        return "int8 -> int32" + (", CPU kernel" if by_kernel else "")
    return "float8" if kind == "native" else f"exact in {kind}"


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


def _dequantized(
    lhs: Factor, rhs: Factor, dims: Dims, dtype: Any, precision: Any, out_sharding: Any, accumulator: str | None
) -> Array:
    lhs, rhs = factor.dequantized(lhs, rhs)
    out = float_dot(lhs, rhs, dims, precision=precision, out_sharding=out_sharding, accumulator=accumulator)
    return out.astype(dtype)


def _sides(lhs: Factor, rhs: Factor, dims: Dims, tiles: tuple[int, ...]) -> "tuple[_Side, _Side, Dims]":
    """Both operands in split form, and the axes of their product."""
    left = _Side(lhs, dims.lhs_contract, dims.lhs_batch, tiles)
    right = _Side(rhs, dims.rhs_contract, dims.rhs_batch, tiles)
    return left, right, Dims(left.ndim, right.ndim, left.contract, right.contract, left.batch, right.batch)


def _split_shardings(lhs: Array, rhs: Array, split: Dims, dims: Dims, wanted: Any) -> tuple[Array, Array, Any]:
    """Operands in split form, which agree on where their tiles lie, and where their product is to lie.

    Beside its tiles, that is where the result is wanted, as far as devices are not taken.
    """
    first, last = len(dims.lhs_batch), len(split.lhs_batch)
    if first == last:
        return lhs, rhs, wanted
    if (left := _sharding.explicit(lhs)) is None or (right := _sharding.explicit(rhs)) is None:
        return lhs, rhs, None
    ours, theirs = list(_sharding.partitions(left, lhs.ndim)), list(_sharding.partitions(right, rhs.ndim))
    for a, b in zip(split.lhs_batch[first:], split.rhs_batch[first:], strict=True):
        ours[a] = theirs[b] = ours[a] or theirs[b]
    lhs = _sharding.placed(lhs, _sharding.yielding(left, ours, split.lhs_batch[first:]))
    rhs = _sharding.placed(rhs, _sharding.yielding(right, theirs, split.rhs_batch[first:]))
    if wanted is not None:
        parts = _sharding.partitions(wanted, dims.out_ndim)
        tiles = [ours[a] for a in split.lhs_batch[first:]]
        wanted = _sharding.yielding(wanted, [*parts[:first], *tiles, *parts[first:]], range(first, last))
    return lhs, rhs, wanted


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
        cuts: list[tuple[int, ...]] = []
        for axis, dim in enumerate(x.shape):
            if axis in self.cut:
                tile, size = self.cut[axis], self.x.shape[axis]
                cuts.append((size // tile, tile) if dim == size else (dim, 1))
            else:
                cuts.append((dim,))
        return _sharding.split(x, cuts)

    @property
    def has_zero_point(self) -> bool:
        return isinstance(self.x, QArray) and self.x.zero_point is not None

    def integers(self) -> Array:
        """Codes as int8, their zero point not yet subtracted."""
        assert isinstance(self.x, QArray)
        return self._split(factor.integers(self.x))

    def zero_point(self) -> Array | None:
        """The zero point of `integers`, as int32 in split form, one per value of the axes that are not contracted."""
        zero = factor.zero_point(self.x)
        return None if zero is None else self._split(self._spread(zero))

    def values(self, kind: Any) -> Array:
        """Codes as the floats that they stand for, exactly."""
        return self._split(factor.values(self.x, kind))

    def scale(self, *, codes: bool) -> Array | None:
        """The scale in split form, float32: that of the codes as integers, or that of the values they stand for."""
        scale = factor.scale(self.x, codes=codes)
        return None if scale is None else self._split(self._spread(scale))

    def _spread(self, part: Array) -> Array:
        """One entry per value on axes that are kept, one per tile or one for all on those that are contracted."""
        for axis, (count, size) in enumerate(zip(part.shape, self.x.shape, strict=True)):
            want = size // self.cut[axis] if axis in self.cut else (1 if axis in self.own_contract else size)
            if 1 < count < want:
                part = _sharding.repeat(part, want // count, axis)
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
    at = lambda part: _sharding.beside(part, out)  # noqa: E731
    if zl is not None:
        sums = jnp.sum(right.integers().astype(jnp.int32), axis=dims.rhs_contract, keepdims=True)
        out = out - at(_beside(zl, dims)) * at(_beside(sums, dims, after=True))
    if zr is not None:
        sums = jnp.sum(left.integers().astype(jnp.int32), axis=dims.lhs_contract, keepdims=True)
        out = out - at(_beside(zr, dims, after=True)) * at(_beside(sums, dims))
    if zl is not None and zr is not None:
        depth = math.prod(left.integers().shape[a] for a in dims.lhs_contract)
        out = out + depth * at(_beside(zl, dims)) * at(_beside(zr, dims, after=True))
    return out
