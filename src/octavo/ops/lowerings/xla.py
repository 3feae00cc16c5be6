"""XLA's dots: `lax.dot_general` of codes, on CPUs in the one form that is fast there.

XLA's CPU backend has a fast path for integer dots (jax 0.12) where the left operand contracts its last axis, both are
row-major, and there are at least eight rows. Other forms are several times slower: `benchmarks/matmul.py` shows it in
the `drhs` of libraries that do not use this form. A layout constraint keeps XLA from folding the transpose back into
the dot.

Zero points of integers become correction terms: with l = ql - zl and r = qr - zr,

    sum l r = sum ql qr - zl sum qr - zr sum ql + n zl zr.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from octavo import _sharding
from octavo._typing import Array
from octavo.ops import codes
from octavo.ops.dims import Dims
from octavo.ops.layout import by_rows, is_explicit
from octavo.ops.lowerings.problem import DotProblem, Side, Split

type IntegerDot = Callable[[Array, Array, Dims], Array]


class Xla:
    """Any dot. "plain" is XLA's dot, unchanged; "rows" rearranges integer dots; "auto" does so on CPUs."""

    def __init__(self, name: str):
        self.name = name

    def reason(self, p: DotProblem) -> str | None:
        del p
        return None

    def is_default(self, p: DotProblem) -> bool:
        del p
        return True

    def run(self, p: DotProblem) -> Array:
        return multiply_codes(p, functools.partial(integer_dot, lowering=self.name))

    def describe(self, p: DotProblem) -> str:
        if p.split is None:
            return "dequantized"
        if p.is_integer:
            return "int8 -> int32"
        return "float8" if p.split.kind == "native" else f"exact in {p.split.kind}"


def multiply_codes(p: DotProblem, integer_dot: IntegerDot) -> Array:
    """The dot of codes with a scaled result, or the dot of dequantized operands."""
    s = p.split
    if s is None:
        lhs, rhs = codes.dequantize(*p.operands)
        return float_dot(lhs, rhs, p.dims, p.precision, p.out_sharding, p.accumulator).astype(p.dtype)
    out_sharding = p.out_sharding
    if s.left.has_zero_point or s.right.has_zero_point:
        out_sharding = _sharding.plain(out_sharding)  # an unreduced result supports no subtraction
    if p.is_integer:
        integers = s.left.integers(), s.right.integers()
        left, right, out_sharding = _split_shardings(*integers, s.dims, p.dims, out_sharding)
        if out_sharding is not None or is_explicit(left) or is_explicit(right):
            out = _plain_dot(left, right, s.dims, out_sharding)
        else:
            out = integer_dot(left, right, s.dims)
        out = _correct(out, s.left, s.right, s.dims).astype(jnp.float32)
    else:
        values = s.left.values(s.kind), s.right.values(s.kind)
        left, right, out_sharding = _split_shardings(*values, s.dims, p.dims, out_sharding)
        out = float_dot(left, right, s.dims, p.precision, out_sharding, p.accumulator).astype(jnp.float32)
    return scale_result(p, s, out, is_codes=isinstance(s.kind, str))


def scale_result(p: DotProblem, s: Split, out: Array, *, is_codes: bool) -> Array:
    """Multiply a dot of codes by both scales and sum it over tiles."""
    for side in (s.left, s.right):
        scale = side.scale(is_codes=is_codes)
        if scale is not None:
            out = out * _sharding.reshard_for_broadcast(_beside(scale, s.dims, after=side is s.right), out)
    counts = tuple(range(len(p.dims.lhs_batch), len(s.dims.lhs_batch)))
    if counts and p.accumulator is None:
        out = jnp.sum(out, axis=counts)
    elif counts:
        # jnp.sum would accumulate in float32; with one tile per device this sum is an all-reduce, in `accumulator`.
        zero = jnp.zeros((), p.accumulator)
        out = jax.lax.reduce(out.astype(p.accumulator), zero, jax.lax.add, counts)
    return _sharding.reshard_if_explicit(out.astype(p.dtype), p.out_sharding)


def _split_shardings(lhs: Array, rhs: Array, split: Dims, dims: Dims, wanted: Any) -> tuple[Array, Array, Any]:
    """Operands in split form with equal shardings of their tile axes, and the sharding of the result.

    Apart from the tile axes that is `wanted`, without the mesh axes that tiles use.
    """
    first, last = len(dims.lhs_batch), len(split.lhs_batch)
    if first == last:
        return lhs, rhs, wanted
    if (left := _sharding.explicit(lhs)) is None or (right := _sharding.explicit(rhs)) is None:
        return lhs, rhs, None
    ours, theirs = list(_sharding.partitions(left, lhs.ndim)), list(_sharding.partitions(right, rhs.ndim))
    for a, b in zip(split.lhs_batch[first:], split.rhs_batch[first:], strict=True):
        ours[a] = theirs[b] = ours[a] or theirs[b]
    lhs = _sharding.reshard_if_explicit(lhs, _sharding.drop_axes_used_by(left, ours, split.lhs_batch[first:]))
    rhs = _sharding.reshard_if_explicit(rhs, _sharding.drop_axes_used_by(right, theirs, split.rhs_batch[first:]))
    if wanted is not None:
        parts = _sharding.partitions(wanted, dims.out_ndim)
        tiles = [ours[a] for a in split.lhs_batch[first:]]
        wanted = _sharding.drop_axes_used_by(wanted, [*parts[:first], *tiles, *parts[first:]], range(first, last))
    return lhs, rhs, wanted


def _beside(part: Array, dims: Dims, *, after: bool = False) -> Array:
    """A scale in split form, broadcastable against the result [batch, lhs remaining, rhs remaining]."""
    batch = dims.rhs_batch if after else dims.lhs_batch
    remaining = dims.rhs_remaining if after else dims.lhs_remaining
    contract = dims.rhs_contract if after else dims.lhs_contract
    part = jnp.transpose(part, (*batch, *remaining, *contract))
    lead, kept = part.shape[: len(batch)], part.shape[len(batch) : len(batch) + len(remaining)]
    others = (1,) * len(dims.lhs_remaining if after else dims.rhs_remaining)
    return part.reshape(*lead, *others, *kept) if after else part.reshape(*lead, *kept, *others)


def _correct(out: Array, left: Side, right: Side, dims: Dims) -> Array:
    """Add the correction terms of zero points to an integer dot of codes."""
    zl, zr = left.zero_point(), right.zero_point()
    at = lambda part: _sharding.reshard_for_broadcast(part, out)  # noqa: E731
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


def integer_dot(lhs: Array, rhs: Array, dims: Dims, *, lowering: str = "auto") -> Array:
    """An int8 x int8 -> int32 dot."""
    if lowering == "plain":
        return _plain_dot(lhs, rhs, dims)
    if lowering == "rows":
        return _rows_dot(lhs, rhs, dims)
    rows, plain = (functools.partial(dot, dims=dims) for dot in (_rows_dot, _plain_dot))
    return jax.lax.platform_dependent(lhs, rhs, cpu=rows, default=plain)


def _plain_dot(lhs: Array, rhs: Array, dims: Dims, out_sharding: Any = None) -> Array:
    numbers, kinds = dims.numbers, {"preferred_element_type": jnp.int32, "out_sharding": out_sharding}
    return jax.lax.dot_general(lhs, rhs, numbers, **kinds)


def _rows_dot(lhs: Array, rhs: Array, dims: Dims) -> Array:
    batch = [lhs.shape[a] for a in dims.lhs_batch]
    left = [lhs.shape[a] for a in dims.lhs_remaining]
    right = [rhs.shape[a] for a in dims.rhs_remaining]
    depth = math.prod(lhs.shape[a] for a in dims.lhs_contract)
    lhs = _arrange(lhs, (*dims.lhs_batch, *dims.lhs_remaining, *dims.lhs_contract))
    lhs = lhs.reshape(math.prod(batch), math.prod(left), depth)
    # The right operand may have its contracted axes first or last; it is transposed only if they are neither.
    last = (*dims.rhs_batch, *dims.rhs_remaining, *dims.rhs_contract)
    first = (*dims.rhs_batch, *dims.rhs_contract, *dims.rhs_remaining)
    is_last = last == tuple(range(rhs.ndim))
    rhs = rhs if is_last else _arrange(rhs, first)
    columns = math.prod(right)
    rhs = rhs.reshape(math.prod(batch), columns, depth) if is_last else rhs.reshape(math.prod(batch), depth, columns)
    rows = lhs.shape[1]
    swapped = rows < 8 and is_last and math.prod(batch) == 1
    if rows < 8:
        # Fewer than eight rows miss the fast path and run at a tenth of float32's speed; padding is cheaper.
        lhs = jnp.pad(lhs, ((0, 0), (0, (4 if swapped and rows <= 4 else 8) - rows), (0, 0)))
    if swapped:
        # A row-major matrix needs no repacking if it is the left operand.
        numbers = (((1,), (1,)), ((), ()))
        out = jax.lax.dot_general(rhs[0], lhs[0], numbers, preferred_element_type=jnp.int32).T[None]
    elif math.prod(batch) == 1:
        numbers = (((1,), (1 if is_last else 0,)), ((), ()))
        out = jax.lax.dot_general(lhs[0], rhs[0], numbers, preferred_element_type=jnp.int32)[None]
    else:
        numbers = (((2,), (2 if is_last else 1,)), ((0,), (0,)))
        out = jax.lax.dot_general(lhs, rhs, numbers, preferred_element_type=jnp.int32)
    return out[:, :rows].reshape(*batch, *left, *right)


def _arrange(x: Array, order: tuple[int, ...]) -> Array:
    return x if order == tuple(range(x.ndim)) else by_rows(jnp.transpose(x, order))


def float_dot(
    lhs: Array, rhs: Array, dims: Dims, precision: Any = None, out_sharding: Any = None, accumulator: Any = None
) -> Array:
    """A dot of low-precision floats or decoded codes, accumulated in float32 unless `accumulator` is given.

    CPUs multiply float32 fastest and emulate narrower floats, so operands are widened first there; elementwise products
    are exact either way.
    """
    dot = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=dims.numbers,
        precision=precision,
        preferred_element_type=jnp.dtype(accumulator or jnp.float32),
        out_sharding=out_sharding,
    )
    if lhs.dtype == rhs.dtype == jnp.float32:
        return dot(lhs, rhs)

    def widened(lhs: Array, rhs: Array) -> Array:
        return dot(lhs.astype(jnp.float32), rhs.astype(jnp.float32))

    return jax.lax.platform_dependent(lhs, rhs, cpu=widened, default=dot)
