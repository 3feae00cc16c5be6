"""The two ragged dots, for operands that are arrays or QArrays: multiply codes, then scale the result.

Scales per row, and per expert and column, broadcast against [m, n], so codes are multiplied in their own precision and
zero points of integers become correction terms as in `octavo.ops.lowerings.xla`. Operands whose scale varies along the
contraction are dequantized first.
"""

from typing import Any

import jax
import jax.numpy as jnp

from octavo._typing import Array
from octavo.ops.lowerings.grouped import Rows, rows_by_groups, rows_by_rows
from octavo.ops.operands import ArrayOrQArray, Codes, MatmulOptions, accumulation_kind, code_pair, dequantize, unpack


def multiply_groups(
    lhs: ArrayOrQArray,
    rhs: ArrayOrQArray,
    rows: Rows,
    options: MatmulOptions,
    *,
    contract: int = 1,
    over: tuple[str, ...] = (),
) -> Array:
    """[m, k] x [g, k, n] -> [m, n], or with `contract` 2 of [g, n, k]; rows of no group are zero.

    `over`: the mesh axes along which the contraction is sharded.
    """
    lhs, rhs = unpack(lhs), unpack(rhs)
    if rows.sharding is not None:

        def local(lhs: ArrayOrQArray, rhs: ArrayOrQArray, sizes: Array, over: tuple[str, ...]) -> Array:
            return multiply_groups(lhs, rhs, Rows(lhs.shape[0], sizes), options, contract=contract, over=over)

        late = _is_exact(options.dtype)
        return rows.sharding.by_groups(local, lhs, rhs, rows.sizes, contract=contract, late=late)
    summed = lambda x: jax.lax.psum(x, over) if over else x  # noqa: E731
    left, right, kind = _codes(lhs, rhs, 1, contract)
    if kind is None:
        out = rows_by_groups(*dequantize(lhs, rhs), rows, options, contract=contract)
        return rows.keep(summed(out.astype(options.dtype)))

    def by_row(part: Array) -> Array:
        part = jnp.squeeze(part, contract)
        return rows.pick(part) if part.shape[0] > 1 else part

    codes = code_pair(left, right, kind)
    out = rows_by_groups(*codes, rows, options, contract=contract)
    if kind == "int":
        zl, zr = left.zero_point(), right.zero_point()
        if zl is not None:
            out = out - zl * by_row(jnp.sum(codes[1].astype(jnp.int32), axis=contract, keepdims=True))
        if zr is not None:
            out = out - by_row(zr) * jnp.sum(codes[0].astype(jnp.int32), axis=1, keepdims=True)
        if zl is not None and zr is not None:
            out = out + lhs.shape[1] * zl * by_row(zr)
    out = summed(out).astype(jnp.float32)
    if (scale := left.scale(is_codes=kind == "int")) is not None:
        out = out * scale
    if (scale := right.scale(is_codes=kind == "int")) is not None:
        out = out * by_row(scale)
    return rows.keep(out.astype(options.dtype))


def multiply_rows(
    lhs: ArrayOrQArray, rhs: ArrayOrQArray, rows: Rows, options: MatmulOptions, scales: tuple[Array, ...] = ()
) -> Array:
    """[m, k] x [m, n] -> [g, k, n], times `scales` of that rank."""
    lhs, rhs = unpack(lhs), unpack(rhs)
    if rows.sharding is not None and not _is_exact(options.dtype):

        def local(lhs: ArrayOrQArray, rhs: ArrayOrQArray, sizes: Array, scales: tuple[Array, ...]) -> Array:
            return multiply_rows(lhs, rhs, Rows(lhs.shape[0], sizes), options, scales)

        return rows.sharding.by_rows(local, lhs, rhs, rows.sizes, scales)[0]

    def dot(lhs: Array, rhs: Array) -> Array:
        if rows.sharding is None:
            return rows_by_rows(lhs, rhs, rows, options)
        raw = lambda lhs, rhs, sizes, _: rows_by_rows(lhs, rhs, Rows(lhs.shape[0], sizes), options)  # noqa: E731
        return rows.sharding.by_rows(raw, lhs, rhs, rows.sizes)[0]

    left, right, kind = _codes(lhs, rhs, 0, 0)
    if kind is None or left.has_zero_point or right.has_zero_point:
        out = dot(*dequantize(lhs, rhs))
    else:
        out = dot(*code_pair(left, right, kind)).astype(jnp.float32)
        if (scale := right.scale(is_codes=kind == "int")) is not None:
            out = out * scale[None]
        if (scale := left.scale(is_codes=kind == "int")) is not None:
            out = out * scale.T[None]
    for scale in scales:
        out = out * scale
    return out.astype(options.dtype)


def multiply_rows_reduced(
    reduction: Any,
    lhs: ArrayOrQArray,
    rhs: ArrayOrQArray,
    rows: Rows,
    options: MatmulOptions,
    scaling: dict[str, Any],
    scales: tuple[Array, ...],
) -> tuple[Array, dict[str, Any]]:
    """`multiply_rows` in float32 on sharded rows, reduced in low precision; also returns updates of `scaling`."""
    if rows.sharding is None:
        raise ValueError(
            f"reduce_qtype={reduction.qtype!r} reduces the gradient of experts over devices, but rows that are sorted "
            "as a whole are on no device in particular: give ragged_dot a sharding, or leave reduce_qtype out"
        )
    options = options._replace(dtype=jnp.float32)

    def local(lhs: ArrayOrQArray, rhs: ArrayOrQArray, sizes: Array, scales: tuple[Array, ...]) -> Array:
        return multiply_rows(lhs, rhs, Rows(lhs.shape[0], sizes), options, scales)

    return rows.sharding.by_rows(local, unpack(lhs), unpack(rhs), rows.sizes, scales, reduction, scaling)


def _is_exact(dtype: Any) -> bool:
    """Whether partial results are psummed before they are scaled, which makes integer dots bit-exact on any mesh.

    A narrower result is psummed in its own dtype, as XLA does for float dots.
    """
    return jnp.dtype(dtype).itemsize >= 4


def _codes(lhs: ArrayOrQArray, rhs: ArrayOrQArray, lhs_contract: int, rhs_contract: int) -> tuple[Codes, Codes, Any]:
    """Both operands, and their `accumulation_kind`; None also if a scale varies along the contraction."""
    left, right = Codes(lhs), Codes(rhs)
    if left.format is None and right.format is None:
        return left, right, None
    constant = left.is_constant_along(lhs_contract) and right.is_constant_along(rhs_contract)
    return left, right, accumulation_kind(left, right) if constant else None
