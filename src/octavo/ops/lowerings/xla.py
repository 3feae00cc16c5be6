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
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from octavo import _sharding
from octavo._typing import Array
from octavo.ops.lowerings.quantize import dequantize_operand
from octavo.ops.operands import Codes, Dims, DotProblem, Split, at_least, code_pair, dequantize
from octavo.qarray import QArray

type IntegerDot = Callable[[Array, Array, Dims], Array]

int32_dot = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.int32)
"""`lax.dot_general` of int8 codes, unchanged."""


class Xla:
    """Any dot. "plain" is XLA's dot, unchanged; "rows" rearranges integer dots; "auto" does so on CPUs."""

    def __init__(self, name: str = "auto", dot: IntegerDot | None = None):
        self._integer_dot: IntegerDot = dot or functools.partial(integer_dot, lowering=name)

    def describe(self, p: DotProblem) -> str:
        if p.split is None:
            return "dequantized"
        return {"int": "int8 -> int32", "native": "float8"}.get(p.split.kind, f"exact in {p.split.kind}")

    def run(self, p: DotProblem) -> Array:
        """The dot of codes with a scaled result, or the dot of dequantized operands."""
        s, options = p.split, p.options
        if s is None:
            lhs, rhs = dequantize(*(dequantize_operand(x) if isinstance(x, QArray) else x for x in p.operands))
            out = float_dot(lhs, rhs, p.dims, options.precision, options.out_sharding, options.accumulator)
            return out.astype(options.dtype)
        sharding, is_integer = options.out_sharding, s.kind == "int"
        has_zero_points = s.left.has_zero_point or s.right.has_zero_point
        if has_zero_points:
            sharding = _sharding.plain(sharding)  # an unreduced result supports no subtraction
        left, right = code_pair(s.left, s.right, s.kind)
        if len(s.dims.lhs_batch) > len(p.dims.lhs_batch):
            left, right, sharding = _split_shardings(left, right, s.dims, p.dims, sharding)
        if not is_integer:
            out = float_dot(left, right, s.dims, options.precision, sharding, options.accumulator)
        elif sharding is not None or _sharding.explicit(left) or _sharding.explicit(right):
            out = int32_dot(left, right, s.dims.numbers, out_sharding=sharding)
        else:
            out = self._integer_dot(left, right, s.dims)
        if is_integer and has_zero_points:
            out = _correct(out, s.left, s.right, s.dims)
        return scale_result(p, s, out.astype(jnp.float32), is_codes=isinstance(s.kind, str))


def scale_result(p: DotProblem, s: Split, out: Array, *, is_codes: bool) -> Array:
    """Multiply a dot of codes by both scales and sum it over tiles."""
    both = [
        _sharding.reshard_for_broadcast(_to_result_axes(scale, s.dims, right=side is s.right), out)
        for side in (s.left, s.right)
        if (scale := side.scale(is_codes=is_codes)) is not None
    ]
    single = s.kind == "native" and len(both) == 2 and all(scale.size == 1 for scale in both)
    if single and not _sharding.is_typed(out, *both):
        out = _scale.bind(out, *both)
    else:
        for scale in both:
            out = out * scale
    counts, accumulator = tuple(range(len(p.dims.lhs_batch), len(s.dims.lhs_batch))), p.options.accumulator
    if counts and accumulator is None:
        out = jnp.sum(out, axis=counts)
    elif counts:
        # jnp.sum would accumulate in float32; with one tile per device this sum is an all-reduce, in `accumulator`.
        out = jax.lax.reduce(out.astype(accumulator), jnp.zeros((), accumulator), jax.lax.add, counts)
    out = out.astype(p.options.dtype)
    return out if p.options.out_sharding is None else _sharding.reshard_if_explicit(out, p.options.out_sharding)


def _split_shardings(lhs: Array, rhs: Array, split: Dims, dims: Dims, wanted: Any) -> tuple[Array, Array, Any]:
    """Operands in split form with equal shardings of their tile axes, and the sharding of the result.

    Apart from the tile axes that is `wanted`, without the mesh axes that tiles use.
    """
    first, last = len(dims.lhs_batch), len(split.lhs_batch)
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


def _to_result_axes(part: Array, dims: Dims, *, right: bool = False) -> Array:
    """A scale in split form, broadcastable against the result [batch, lhs remaining, rhs remaining]."""
    batch = dims.rhs_batch if right else dims.lhs_batch
    remaining = dims.rhs_remaining if right else dims.lhs_remaining
    lead, kept = [part.shape[a] for a in batch], [part.shape[a] for a in remaining]
    long = [a for a in (*batch, *remaining) if part.shape[a] not in (0, 1)]
    if long != sorted(long):
        part = jnp.transpose(part, (*batch, *remaining, *(dims.rhs_contract if right else dims.lhs_contract)))
    others = (1,) * len(dims.lhs_remaining if right else dims.rhs_remaining)
    return part.reshape(*lead, *others, *kept) if right else part.reshape(*lead, *kept, *others)


def _correct(out: Array, left: Codes, right: Codes, dims: Dims) -> Array:
    """Add the correction terms of zero points to an integer dot of codes."""
    zl, zr = left.zero_point(), right.zero_point()
    at = lambda part: _sharding.reshard_for_broadcast(part, out)  # noqa: E731
    if zl is not None:
        sums = jnp.sum(right.integers().astype(jnp.int32), axis=dims.rhs_contract, keepdims=True)
        out = out - at(_to_result_axes(zl, dims)) * at(_to_result_axes(sums, dims, right=True))
    if zr is not None:
        sums = jnp.sum(left.integers().astype(jnp.int32), axis=dims.lhs_contract, keepdims=True)
        out = out - at(_to_result_axes(zr, dims, right=True)) * at(_to_result_axes(sums, dims))
    if zl is not None and zr is not None:
        depth = math.prod(left.integers().shape[a] for a in dims.lhs_contract)
        out = out + depth * at(_to_result_axes(zl, dims)) * at(_to_result_axes(zr, dims, right=True))
    return out


def integer_dot(lhs: Array, rhs: Array, dims: Dims, *, lowering: str = "auto") -> Array:
    """An int8 x int8 -> int32 dot."""
    if lowering == "plain":
        return int32_dot(lhs, rhs, dims.numbers)
    if at_least(math.prod(lhs.shape[a] for a in dims.lhs_remaining), 8):
        lhs, rhs, dims = _arrange(lhs, rhs, dims)
        return int32_dot(lhs, rhs, dims.numbers)
    if lowering == "rows":
        return _few_rows_dot(lhs, rhs, dims)
    few, plain = (
        functools.partial(_few_rows_dot, dims=dims),
        functools.partial(int32_dot, dimension_numbers=dims.numbers),
    )
    return jax.lax.platform_dependent(lhs, rhs, cpu=few, default=plain)


def _arrange(lhs: Array, rhs: Array, dims: Dims) -> tuple[Array, Array, Dims]:
    """The same dot with operands that XLA reshapes, without a copy, to matrices in the form that is fast on CPUs.

    The left operand contracts its last axes, the right one its first or last; CPUs copy an operand that does not. On
    other platforms XLA folds these transposes back into the dot.
    """
    left = (*dims.lhs_batch, *dims.lhs_remaining, *dims.lhs_contract)
    last = (*dims.rhs_batch, *dims.rhs_remaining, *dims.rhs_contract)
    first = (*dims.rhs_batch, *dims.rhs_contract, *dims.rhs_remaining)
    right = last if last == tuple(range(rhs.ndim)) else first
    lhs, rhs = (x if o == (*range(x.ndim),) else row_major(x.transpose(o)) for x, o in ((lhs, left), (rhs, right)))
    at = lambda order, axes: tuple(order.index(a) for a in axes)  # noqa: E731
    contract, batch = (at(left, dims.lhs_contract), at(right, dims.rhs_contract)), tuple(range(len(dims.lhs_batch)))
    return lhs, rhs, Dims(lhs.ndim, rhs.ndim, *contract, batch, batch)


def _few_rows_dot(lhs: Array, rhs: Array, dims: Dims) -> Array:
    """A dot of fewer than eight rows, padded: they miss the fast path and run at a tenth of float32's speed."""
    left, right = [lhs.shape[a] for a in dims.lhs_remaining], [rhs.shape[a] for a in dims.rhs_remaining]
    lhs, rhs, dims = _arrange(lhs, rhs, dims)
    batch, depth, rows = (
        [lhs.shape[a] for a in dims.lhs_batch],
        [lhs.shape[a] for a in dims.lhs_contract],
        math.prod(left),
    )
    lead = [math.prod(batch)] if math.prod(batch) != 1 else []
    first, k, n = len(lead), math.prod(depth), math.prod(right)
    is_last = dims.rhs_contract == tuple(range(rhs.ndim - len(depth), rhs.ndim))
    lhs, rhs = lhs.reshape(*lead, rows, k), rhs.reshape(*lead, *((n, k) if is_last else (k, n)))
    swapped = is_last and not lead
    lhs = jnp.pad(lhs, (*[(0, 0)] * first, (0, (4 if swapped and rows <= 4 else 8) - rows), (0, 0)))
    if swapped:
        # A row-major matrix needs no repacking if it is the left operand.
        out = int32_dot(rhs, lhs, (((1,), (1,)), ((), ()))).T
    else:
        contract = ((first + 1,), (first + 1 if is_last else first,))
        out = int32_dot(lhs, rhs, (contract, (tuple(range(first)), tuple(range(first)))))
    return jax.lax.slice_in_dim(out, 0, rows, axis=first).reshape(*batch, *left, *right)


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


_row_major = core.Primitive("octavo_row_major")
_row_major.def_impl(lambda x, **_: x)
_row_major.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_row_major, lambda ctx, x, **_: [x])


def _lower_row_major(lowered_for: str) -> Any:
    barrier = mlir.lower_fun(jax.lax.optimization_barrier, multiple_results=False)

    @functools.partial(mlir.lower_fun, multiple_results=False)
    def constrain(x: Array, *, order: tuple[int, ...], copied: bool) -> Array:
        if not copied:
            return with_layout_constraint(x, Layout(order))
        # An axis of one entry is enough: the layout of `x` itself is then assigned by its other uses.
        inner = with_layout_constraint(x[None], Layout((0, *(axis + 1 for axis in order))))
        return inner.reshape(x.shape)

    def lower(ctx: Any, x: Any, *, order: tuple[int, ...], platform: str, copied: bool) -> Any:
        # jax.export gives no guarantee for the constraint. Without it TPUs copy once more, and CPUs, on which a barrier
        # still materializes the array, may compute dots in a slower form.
        if platform != lowered_for:
            return [x]
        if ctx.module_context.lowering_parameters.for_export:
            return [x] if lowered_for == "tpu" else barrier(ctx, x)
        return constrain(ctx, x, order=order, copied=copied)

    return lower


mlir.register_lowering(_row_major, _lower_row_major("cpu"), platform="cpu")
mlir.register_lowering(_row_major, _lower_row_major("tpu"), platform="tpu")
ad.deflinear(_row_major, lambda g, **_: [g])


def _batch_row_major(args: Any, dims: Any, *, order: tuple[int, ...], **params: Any) -> tuple[Array, int]:
    (x,), (at,) = args, dims
    return _row_major.bind(x, order=(at, *(axis + (axis >= at) for axis in order)), **params), at


batching.primitive_batchers[_row_major] = _batch_row_major


def row_major(x: Array, *, platform: str = "cpu", copied: bool = False) -> Array:
    """Constrain an array to row-major order on one platform; a no-op on the others.

    On CPUs this materializes it, as a fusion barrier. On TPUs it is the layout in which a fusion writes it.

    Args:
      x: The array.
      platform: The platform.
      copied: Whether only the result has this layout, so that other uses of `x` read it as it was written.

    Returns:
      The same array.
    """
    if x.size in (0, 1) or _sharding.explicit(x) is not None:
        return x
    return _row_major.bind(x, order=tuple(range(x.ndim)), platform=platform, copied=copied)


# cuBLAS multiplies the result of a float8 matmul by one number. Scales that are multiplied first are that number; one
# after the other, the second would be a pass over the result.
_scale = core.Primitive("octavo_scale")
_one_by_one = lambda out, left, right: out * left * right  # noqa: E731
_scale.def_impl(_one_by_one)
_scale.def_abstract_eval(lambda out, *scales: out)
mlir.register_lowering(_scale, mlir.lower_fun(_one_by_one, multiple_results=False))
_joined = mlir.lower_fun(lambda out, left, right: out * (left * right), multiple_results=False)
mlir.register_lowering(_scale, _joined, platform="cuda")
ad.defjvp(
    _scale,
    lambda g, out, left, right: g * left * right,
    lambda g, out, left, right: out * g * right,
    lambda g, out, left, right: out * left * g,
)
batching.primitive_batchers[_scale] = lambda args, dims: (jax.vmap(_one_by_one, in_axes=dims)(*args), 0)


_own_values = core.Primitive("octavo_own_values")
_own_values.multiple_results = True
_own_values.def_impl(lambda *arrays: list(arrays))
_own_values.def_abstract_eval(lambda *arrays: list(arrays))
mlir.register_lowering(_own_values, lambda ctx, *arrays: arrays)
_barrier = mlir.lower_fun(lambda *arrays: jax.lax.optimization_barrier(arrays), multiple_results=True)
mlir.register_lowering(_own_values, _barrier, platform="tpu")
batching.primitive_batchers[_own_values] = lambda args, dims: (_own_values.bind(*args), dims)


def own_values(*arrays: Array) -> list[Array]:
    """The same arrays, of which a TPU program shares none with expressions elsewhere that are equal; else a no-op."""
    return _own_values.bind(*arrays)
