"""Matmuls of a few rows and a quantized matrix with the native CPU kernels (`octavo.kernels`).

The kernels read the codes once, in the layout in which they are stored, packed or not.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from octavo import _sharding, kernels
from octavo._typing import Array, Shape
from octavo.numerics import Format, IntFormat
from octavo.ops.lowerings.xla import Xla, int32_dot
from octavo.ops.operands import ArrayOrQArray, Dims, DotProblem, MatmulOptions, element
from octavo.qarray import QArray

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


# With more rows XLA's dot is faster; for float rows, even including the dequantization of the matrix.
MOST_ROWS, MOST_FLOAT_ROWS = 16, 64


# A smaller matrix fits in the cache, and its matmul takes less time than starting a custom call.
FEWEST_WEIGHTS = 1 << 15


class CpuFfi:
    """A few rows times a large quantized matrix on CPUs; other platforms use XLA's dot."""

    def reason(self, p: DotProblem) -> str | None:
        lhs, rhs, accumulator = p.lhs, p.rhs, p.options.accumulator
        if p.options.out_sharding is not None:
            return "the kernel knows no shardings"
        if accumulator is not None and jnp.dtype(accumulator) != jnp.float32 and not _is_integer(p):
            return f"the kernel accumulates in float32, not in {accumulator}"
        if isinstance(lhs, QArray) and isinstance(rhs, QArray):
            if _is_tiled(p):
                return _unsupported_tiles(lhs, rhs, p.dims)
            if p.split is None or p.split.kind != "int":
                return "of two QArrays the kernel multiplies integers"
            if _sharding.explicit(lhs.qvalue) or _sharding.explicit(rhs.qvalue):
                return "the kernel knows no shardings"
            return _unsupported_axes(p.split.left.shape, p.split.dims, MOST_ROWS)
        if isinstance(lhs, QArray) or not isinstance(rhs, QArray):
            return "the kernel multiplies a float array by a QArray, in this order"
        if lhs.dtype not in _FLOATS:
            return f"the kernel takes rows of float32, bfloat16 or float16, not {lhs.dtype}"
        if (reason := _unsupported_axes(lhs.shape, p.dims, MOST_FLOAT_ROWS)) is not None:
            return reason
        if _sharding.explicit(lhs) or _sharding.explicit(rhs.qvalue):
            return "the kernel does not know explicit shardings"
        return _unsupported_codes(rhs, p.dims)

    def run(self, p: DotProblem) -> Array:
        if isinstance(p.lhs, QArray) and not _is_tiled(p):
            return Xla(dot=_integer_dot).run(p)
        assert isinstance(p.rhs, QArray)

        def elsewhere(lhs: ArrayOrQArray, rhs: QArray) -> Array:
            return _XLA.run(DotProblem(lhs, rhs, p.dims, MatmulOptions(jnp.float32, p.options.precision)))

        return _product(p.lhs, p.rhs, p.dims, elsewhere).astype(p.options.dtype)

    def describe(self, p: DotProblem) -> str:
        if jax.default_backend() != "cpu":
            return _XLA.describe(p)
        assert isinstance(p.rhs, QArray)
        if isinstance(p.lhs, QArray) and _is_tiled(p):
            return f"{p.lhs.qtype.name} x {p.rhs.qtype.name} in tiles, CPU kernel"
        if isinstance(p.lhs, QArray):
            return f"{_XLA.describe(p)}, CPU kernel"
        return f"{p.rhs.qtype.name} weights, CPU kernel"


_XLA = Xla("auto")


def is_partitioned() -> bool:
    """Whether the traced program will be partitioned over devices, judging by the current mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(
        size > 1 and kind != AxisType.Manual for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    )


def is_transposed(dims: Dims) -> bool | None:
    """False for a matrix [K, N], True for [N, K], None for any other order of axes."""
    every = tuple(range(dims.rhs_ndim))
    if dims.rhs_contract + dims.rhs_remaining == every:
        return False
    return True if dims.rhs_remaining + dims.rhs_contract == every else None


def _unsupported_axes(shape: Shape, dims: Dims, most: float) -> str | None:
    """The reason the kernel does not support these axes and this shape of `lhs`; None if it does."""
    if not kernels.available():
        return kernels.status()
    if is_partitioned():
        return "XLA cannot partition the kernel over the devices of the mesh: use jax.shard_map"
    rows = math.prod(shape[a] for a in dims.lhs_remaining)
    if dims.lhs_batch:
        return "the kernel has no batch axes"
    if not isinstance(rows, int):
        return "the kernel is for a known number of rows"
    if not 0 < rows <= most or math.prod(shape) == 0:
        return f"the kernel is for 1 to {most} rows, got an operand of shape {shape} with {rows}"
    if is_transposed(dims) is None:
        return "the kernel contracts the first axes of a matrix or its last ones, in order"
    return None


def _is_integer(p: DotProblem) -> bool:
    """Whether the dot is one of integers alone, which is exact whatever floats are accumulated in."""
    return isinstance(p.lhs, QArray) and isinstance(p.rhs, QArray) and not _is_tiled(p)


def _is_tiled(p: DotProblem) -> bool:
    """Whether scales vary along the contraction."""
    return p.split is None or p.split.dims != p.dims


def _unsupported_tiles(lhs: QArray, rhs: QArray, dims: Dims) -> str | None:
    """The reason the kernel does not multiply two QArrays with scales along the contraction; None if it does."""
    if is_transposed(dims) is not False or is_transposed(dims.swap()) is not True:
        return "the kernel contracts the last axes of rows with the first ones of a matrix, in order"
    if (reason := _unsupported_axes(lhs.shape, dims, math.inf) or _unsupported_codes(rhs, dims)) is not None:
        return reason
    if _sharding.explicit(lhs.qvalue) or _sharding.explicit(rhs.qvalue):
        return "the kernel knows no shardings"
    if not _is_plain_int8(lhs):
        return "the rows of the kernel are int8, packed as nothing, without zero points and padding"
    return _unsupported_tiled_matrix(rhs, dims, _group(lhs, lhs.scale, dims.swap()))


def _unsupported_tiled_matrix(rhs: QArray, dims: Dims, group: int) -> str | None:
    """The same for a matrix whose codes the kernel takes, and rows in groups of `group` values."""
    if rhs.padding or (rhs.qtype.bits == 4 and _table(element(rhs)) != kernels.INT4):
        return "the kernel multiplies int8 by int8 and int4 without padding"
    if rhs.zero_point is not None and not _has_byte_levels(rhs, dims) and not _has_float_zeros(rhs, dims):
        return "the kernel knows no zero points but those of e3m4 and float32"
    groups = group, _group(rhs, rhs.scale, dims)
    if any(size % 4 or max(groups) % size for size in groups):
        return f"of two groups one is a multiple of the other, and both of 4, not {groups[0]} and {groups[1]}"
    return None


def _is_plain_int8(q: QArray) -> bool:
    fmt = q.qtype
    is_int8 = isinstance(fmt, IntFormat) and fmt.storage == jnp.int8 and fmt.has_zero and fmt.unit == 1.0
    return is_int8 and q.zero_point is None and q.outer_scale is None and not q.padding and q.packed is None


def _integer_dot(lhs: Array, rhs: Array, dims: Dims) -> Array:
    kernel = functools.partial(_kernel_dot, dims=dims)
    plain = functools.partial(int32_dot, dimension_numbers=dims.numbers)
    return jax.lax.platform_dependent(lhs, rhs, cpu=kernel, default=plain)


def _kernel_dot(lhs: Array, rhs: Array, dims: Dims) -> Array:
    left = [lhs.shape[a] for a in dims.lhs_remaining]
    right = [rhs.shape[a] for a in dims.rhs_remaining]
    transposed = bool(is_transposed(dims))
    lhs = jnp.transpose(lhs, (*dims.lhs_remaining, *dims.lhs_contract)).reshape(math.prod(left), -1)
    rhs = rhs.reshape((math.prod(right), -1) if transposed else (-1, math.prod(right)))
    return kernels.int_matvec(lhs, rhs, transposed=transposed).reshape(*left, *right)


def _unsupported_codes(q: QArray, dims: Dims) -> str | None:
    fmt, last = element(q), dims.rhs_contract[-1]
    if q.qtype.bits == 8:
        if not (isinstance(fmt, IntFormat) and fmt.signed and fmt.has_zero and fmt.unit == 1.0):
            return f"the kernel takes int8 and packed 4-bit codes, not {q.qtype.name}"
    elif q.qtype.bits != 4:
        return f"the kernel takes int8 and packed 4-bit codes, not {q.qtype.name}"
    elif q.packed is None or q.packed[0] % q.ndim != last:
        return "4-bit codes are packed along the contraction for the kernel: QArray.pack"
    if q.size == 0 or any(a % q.ndim != last for a, _ in q.padding):
        return "only a contraction of one axis may have padding in the kernel"
    if q.padding and len(dims.rhs_contract) > 1:
        return "only a contraction of one axis may have padding in the kernel"
    if q.qtype.bits == 4 and len(dims.rhs_contract) > 1 and q.shape[last] % 2:
        return "an odd number of packed codes does not lie in whole bytes"
    for part in (q.scale, q.zero_point, q.outer_scale):
        if part is None:
            continue
        group = _group(q, part, dims)
        if q.qtype.bits == 4 and group % 2 and group != _depth(q, dims):
            return f"groups of packed codes are even in the kernel, not of {group}"
    return None


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _product(lhs: ArrayOrQArray, rhs: QArray, dims: Dims, otherwise: Callable[[Any, QArray], Array]) -> Array:
    leaves, structure = jax.tree.flatten((lhs, rhs))

    def on_cpu(*leaves: Array) -> Array:
        x, q = jax.tree.unflatten(structure, leaves)
        return _tiled(x, q, dims) if isinstance(x, QArray) else _by_kernel(x, q, dims)

    def elsewhere(*leaves: Array) -> Array:
        x, q = jax.tree.unflatten(structure, leaves)
        return otherwise(x, q)

    return jax.lax.platform_dependent(*leaves, cpu=on_cpu, default=elsewhere)


@_product.defjvp
def _product_jvp(dims: Dims, otherwise: Callable[[Any, QArray], Array], primals, tangents):
    def reference(lhs: ArrayOrQArray, rhs: QArray) -> Array:
        x = lhs.dequantize(jnp.float32) if isinstance(lhs, QArray) else lhs.astype(jnp.float32)
        return jax.lax.dot_general(x, rhs.dequantize(jnp.float32), dims.numbers)

    return _product(*primals, dims, otherwise), jax.jvp(reference, primals, tangents)[1]


def unsupported_matrix(q: QArray) -> str | None:
    """The reason `matrix` does not support an [in, out] matrix; None if it does."""
    if q.ndim != 2:
        return f"the kernel takes matrices, not an array of shape {q.shape}"
    if q.padding or (
        q.zero_point is not None and not _has_byte_levels(q, _MATRIX) and not _has_float_zeros(q, _MATRIX)
    ):
        return "the kernel knows no padding here, and no zero points but those of e3m4 and float32"
    return _unsupported_codes(q, _MATRIX)


def unsupported_tiles(q: QArray, group: int) -> str | None:
    """The reason an [in, out] matrix is not multiplied by int8 rows in groups of `group`; None if it is."""
    return unsupported_matrix(q) or _unsupported_tiled_matrix(q, _MATRIX, group)


def matrix(q: QArray) -> kernels.Matrix:
    """The kernels' operands for an [in, out] matrix."""
    return _operands(q, _MATRIX)


_MATRIX = Dims(2, 2, (1,), (0,))


def _has_byte_levels(q: QArray, dims: Dims) -> bool:
    """Whether the kernel takes scales and zero points as they are stored, in float8_e3m4, with a scale of them."""
    parts = [q.scale, *(() if q.zero_point is None else (q.zero_point,))]
    if is_transposed(dims) or any(part.dtype != jnp.float8_e3m4 or part.shape != q.scale.shape for part in parts):
        return False
    return q.outer_scale is None or all(q.outer_scale.shape[a] == 1 for a in dims.rhs_contract)


def _has_float_zeros(q: QArray, dims: Dims) -> bool:
    """Whether the kernel takes zero points as they are stored, in float32 and like scales of at least 16 bits."""
    zero, fmt = q.zero_point, element(q)
    if zero is None or is_transposed(dims) or zero.dtype != jnp.float32 or zero.shape != q.scale.shape:
        return False
    return q.outer_scale is None and q.scale.dtype in _FLOATS and isinstance(fmt, IntFormat) and fmt.signed


def _operands(q: QArray, dims: Dims) -> kernels.Matrix:
    """The arrays of a matrix; without zero points, unless they are float8_e3m4 as the scales are, or float32."""
    transposed, width = bool(is_transposed(dims)), math.prod(q.shape[a] for a in dims.rhs_remaining)
    codes = q.qvalue.reshape((width, -1) if transposed else (-1, width))
    scale, table = _matrix(q, q.scale, dims), _table(element(q)) if q.qtype.bits == 4 else None
    if _has_byte_levels(q, dims):
        zero = None if q.zero_point is None else _matrix(q, q.zero_point, dims)
        outer = q.outer_scale
        if outer is not None:  # one for all is not broadcast: that would be a program for each matmul
            outer = (outer if outer.size == 1 else _matrix(q, outer, dims)).reshape(-1)
        return kernels.Matrix(codes, scale, table, zero, outer)
    if q.zero_point is not None and _has_float_zeros(q, dims):
        return kernels.Matrix(codes, scale, table, _matrix(q, q.zero_point, dims))
    if scale.dtype not in _FLOATS:
        scale = scale.astype(jnp.float32)
    if q.outer_scale is not None:
        groups = scale.shape[1 if transposed else 0]
        scale = scale.astype(jnp.float32) * _matrix(q, q.outer_scale, dims, groups).astype(jnp.float32)
    return kernels.Matrix(codes, scale, table)


def _by_kernel(x: Array, q: QArray, dims: Dims) -> Array:
    kept = [x.shape[a] for a in dims.lhs_remaining]
    columns = [q.shape[a] for a in dims.rhs_remaining]
    x = jnp.transpose(x.astype(jnp.float32), (*dims.lhs_remaining, *dims.lhs_contract))
    x = x.reshape(math.prod(kept), math.prod(x.shape[len(kept) :]))
    x = jnp.pad(x, ((0, 0), (0, sum(count for _, count in q.padding))))
    w = _operands(q, dims)
    out = kernels.matvec(x, w.codes, w.scale, w.zero, w.outer, table=w.table, transposed=bool(is_transposed(dims)))
    if q.zero_point is not None and w.zero is None:
        out = out - _of_zero_points(x, q, w.scale, dims)
    return out.reshape(*kept, *columns)


def _tiled(x: QArray, q: QArray, dims: Dims) -> Array:
    kept = [x.shape[a] for a in dims.lhs_remaining]
    rows, w = _operands(x, dims.swap()), _operands(q, dims)
    out = kernels.tiled_matmul(rows.codes, rows.scale.astype(jnp.float32), w.codes, w.scale, w.zero, w.outer)
    return out.reshape(*kept, *(q.shape[a] for a in dims.rhs_remaining))


def _of_zero_points(x: Array, q: QArray, scale: Array, dims: Dims) -> Array:
    """The correction term of zero points: the sum of x over each group, times zero point and scale."""
    transposed, fmt = bool(is_transposed(dims)), element(q)
    assert q.zero_point is not None
    zero = _matrix(q, q.zero_point, dims).astype(jnp.float32) - _middle(fmt)
    zero, scale = (zero.T, scale.T) if transposed else (zero, scale)
    groups = math.lcm(zero.shape[0], scale.shape[0])
    spread = lambda part: jnp.repeat(part.astype(jnp.float32), groups // part.shape[0], axis=0)  # noqa: E731
    sums = jnp.sum(x.reshape(x.shape[0], groups, x.shape[1] // groups), axis=2)
    return jax.lax.dot(sums, spread(zero) * spread(scale), precision=jax.lax.Precision.HIGHEST)


def _depth(q: QArray, dims: Dims) -> int:
    return math.prod(q._stored_shape[a] for a in dims.rhs_contract)


def _group(q: QArray, part: Any, dims: Dims) -> int:
    """How many adjacent values along the flattened contraction share an entry."""
    shape, group, split = q._stored_shape, 1, False
    for axis in reversed(dims.rhs_contract):
        if not split:
            group *= shape[axis] // part.shape[axis]
            split = part.shape[axis] > 1
    return group


def _matrix(q: QArray, part: Array, dims: Dims, groups: int = 0) -> Array:
    """A scale or zero point in the kernel's layout: [groups, N], or [N, groups] for [N, K]."""
    shape = q._stored_shape
    contract = [part.shape[a] for a in dims.rhs_contract]
    first = next((i for i in reversed(range(len(contract))) if contract[i] > 1), None)
    wanted = dict(zip(dims.rhs_contract, contract, strict=True))
    wanted |= {a: shape[a] for a in dims.rhs_contract[: first or 0]} | {a: shape[a] for a in dims.rhs_remaining}
    for axis, size in wanted.items():
        part = part if part.shape[axis] == size else jnp.repeat(part, size // part.shape[axis], axis=axis)
    width = math.prod(shape[a] for a in dims.rhs_remaining)
    part = part.reshape((width, -1) if is_transposed(dims) else (-1, width))
    axis = 1 if is_transposed(dims) else 0
    return jnp.repeat(part, groups // part.shape[axis], axis=axis) if groups > part.shape[axis] else part


def _middle(fmt: Format) -> float:
    """The offset subtracted from unsigned codes, which keeps partial sums small."""
    return float(1 << (fmt.bits - 1)) if isinstance(fmt, IntFormat) and not fmt.signed else 0.0


@functools.cache
def _table(fmt: Format) -> tuple[float, ...]:
    """The values of the sixteen codes, in bit order."""
    with jax.ensure_compile_time_eval():
        values = fmt.decode(fmt.from_bits(jnp.arange(16, dtype=jnp.uint8)))
        return tuple(float(v) - _middle(fmt) for v in values)
