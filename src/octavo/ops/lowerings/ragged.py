"""The two ragged dots, for operands that are arrays or QArrays: multiply codes, then scale the result.

Scales per row, and per expert and column, broadcast against [m, n], so codes are multiplied in their own precision and
zero points of integers become correction terms as in `octavo.ops.lowerings.xla`. Operands whose scale varies along the
contraction are dequantized first.
"""

from typing import Any

import jax
import jax.numpy as jnp

from octavo._typing import Array
from octavo.ops import codes
from octavo.ops.codes import ArrayOrQArray
from octavo.ops.lowerings.grouped import Rows, rows_by_groups, rows_by_rows
from octavo.qarray import QArray


def multiply_groups(
    lhs: ArrayOrQArray,
    rhs: ArrayOrQArray,
    rows: Rows,
    *,
    contract: int = 1,
    dtype: Any,
    precision: Any = None,
    lowering: str = "auto",
    over: tuple[str, ...] = (),
) -> Array:
    """[m, k] x [g, k, n] -> [m, n], or with `contract` 2 of [g, n, k]; rows of no group are zero.

    `over`: the mesh axes along which the contraction is sharded.
    """
    how = {"contract": contract, "precision": precision, "lowering": lowering}
    lhs, rhs = codes.unpack(lhs), codes.unpack(rhs)
    if rows.sharding is not None:

        def local(lhs: ArrayOrQArray, rhs: ArrayOrQArray, sizes: Array, over: tuple[str, ...]) -> Array:
            return multiply_groups(lhs, rhs, Rows(lhs.shape[0], sizes), dtype=dtype, over=over, **how)

        return rows.sharding.by_groups(local, lhs, rhs, rows.sizes, contract=contract, late=_is_exact(dtype))
    return _groups(lhs, rhs, rows, dtype, how, over)


def _groups(
    lhs: ArrayOrQArray, rhs: ArrayOrQArray, rows: Rows, dtype: Any, how: dict[str, Any], over: tuple[str, ...] = ()
) -> Array:
    contract = how["contract"]
    kind = _kind(lhs, rhs, 1, contract)
    if kind is None:
        out = rows_by_groups(*codes.dequantize(lhs, rhs), rows, **how)
        return rows.keep(_summed(out.astype(dtype), over))

    def by_row(part: Array) -> Array:
        part = jnp.squeeze(part, contract)
        return rows.pick(part) if part.shape[0] > 1 else part

    if kind == "int":
        assert isinstance(lhs, QArray)
        assert isinstance(rhs, QArray)
        left, right = codes.integers(lhs), codes.integers(rhs)
        out = rows_by_groups(left, right, rows, **how)
        zl, zr = (_spread(codes.zero_point(x), x) for x in (lhs, rhs))
        if zl is not None:
            out = out - zl * by_row(jnp.sum(right.astype(jnp.int32), axis=contract, keepdims=True))
        if zr is not None:
            out = out - by_row(zr) * jnp.sum(left.astype(jnp.int32), axis=1, keepdims=True)
        if zl is not None and zr is not None:
            out = out + lhs.shape[1] * zl * by_row(zr)
        out = _summed(out, over).astype(jnp.float32)
    else:
        out = _summed(rows_by_groups(codes.values(lhs, kind), codes.values(rhs, kind), rows, **how), over)
    scale = _spread(codes.scale(lhs, codes=kind == "int"), lhs)
    out = out if scale is None else out * scale
    scale = _spread(codes.scale(rhs, codes=kind == "int"), rhs)
    out = out if scale is None else out * by_row(scale)
    return rows.keep(out.astype(dtype))


def multiply_rows(
    lhs: ArrayOrQArray,
    rhs: ArrayOrQArray,
    rows: Rows,
    *,
    dtype: Any,
    precision: Any = None,
    lowering: str = "auto",
    scales: tuple[Array, ...] = (),
) -> Array:
    """[m, k] x [m, n] -> [g, k, n], times `scales` of that rank."""
    how = {"precision": precision, "lowering": lowering}
    lhs, rhs = codes.unpack(lhs), codes.unpack(rhs)
    if rows.sharding is not None and not _is_exact(dtype):

        def local(lhs: ArrayOrQArray, rhs: ArrayOrQArray, sizes: Array, scales: tuple[Array, ...]) -> Array:
            return multiply_rows(lhs, rhs, Rows(lhs.shape[0], sizes), dtype=dtype, scales=scales, **how)

        return rows.sharding.by_rows(local, lhs, rhs, rows.sizes, scales)
    return _rows(lhs, rhs, rows, scales, dtype, how)


def multiply_rows_reduced(
    reduction: Any,
    lhs: ArrayOrQArray,
    rhs: ArrayOrQArray,
    rows: Rows,
    scaling: dict[str, Any],
    *,
    precision: Any = None,
    lowering: str = "auto",
    scales: tuple[Array, ...] = (),
) -> tuple[Array, dict[str, Any]]:
    """`multiply_rows` in float32 on sharded rows, reduced in low precision; also returns updates of `scaling`."""
    if rows.sharding is None:
        raise ValueError(
            f"reduce_qtype={reduction.qtype!r} reduces the gradient of experts over devices, but rows that are sorted "
            "as a whole are on no device in particular: give ragged_dot a sharding, or leave reduce_qtype out"
        )

    def local(lhs: ArrayOrQArray, rhs: ArrayOrQArray, sizes: Array, scales: tuple[Array, ...]) -> Array:
        how = {"precision": precision, "lowering": lowering, "scales": scales}
        return multiply_rows(lhs, rhs, Rows(lhs.shape[0], sizes), dtype=jnp.float32, **how)

    lhs, rhs = codes.unpack(lhs), codes.unpack(rhs)
    return rows.sharding.by_rows_reduced(reduction, local, lhs, rhs, rows.sizes, scales, scaling)


def _rows(
    lhs: ArrayOrQArray, rhs: ArrayOrQArray, rows: Rows, scales: tuple[Array, ...], dtype: Any, how: dict[str, Any]
) -> Array:
    kind = None if _is_asymmetric(lhs) or _is_asymmetric(rhs) else _kind(lhs, rhs, 0, 0)

    def product(lhs: Array, rhs: Array) -> Array:
        if rows.sharding is None:
            return rows_by_rows(lhs, rhs, rows, **how)
        raw = lambda lhs, rhs, sizes, _: rows_by_rows(lhs, rhs, Rows(lhs.shape[0], sizes), **how)  # noqa: E731
        return rows.sharding.by_rows(raw, lhs, rhs, rows.sizes, ())

    if kind is None:
        out = product(*codes.dequantize(lhs, rhs))
    else:
        if kind == "int":
            assert isinstance(lhs, QArray)
            assert isinstance(rhs, QArray)
            out = product(codes.integers(lhs), codes.integers(rhs)).astype(jnp.float32)
        else:
            out = product(codes.values(lhs, kind), codes.values(rhs, kind))
        scale = _spread(codes.scale(rhs, codes=kind == "int"), rhs)
        out = out if scale is None else out * scale[None]
        scale = _spread(codes.scale(lhs, codes=kind == "int"), lhs)
        out = out if scale is None else out * scale.T[None]
    for scale in scales:
        out = out * scale
    return out.astype(dtype)


def _is_exact(dtype: Any) -> bool:
    """Whether partial results are psummed before they are scaled, which makes integer dots bit-exact on any mesh.

    A narrower result is psummed in its own dtype, as XLA does for float dots.
    """
    return jnp.dtype(dtype).itemsize >= 4


def _summed(x: Array, over: tuple[str, ...]) -> Array:
    return jax.lax.psum(x, over) if over else x


def _kind(lhs: ArrayOrQArray, rhs: ArrayOrQArray, lhs_contract: int, rhs_contract: int) -> Any:
    """The `codes.accumulation_kind`; None if there is none, or if a scale varies along the contraction."""
    quantized = [(x, axis) for x, axis in ((lhs, lhs_contract), (rhs, rhs_contract)) if isinstance(x, QArray)]
    parts = [(part, axis) for x, axis in quantized for part in (x.scale, x.zero_point, x.outer_scale)]
    constant = all(part is None or part.shape[axis] == 1 for part, axis in parts)
    return codes.accumulation_kind(lhs, rhs) if quantized and constant else None


def _is_asymmetric(x: ArrayOrQArray) -> bool:
    return isinstance(x, QArray) and x.zero_point is not None


def _spread(part: Array | None, x: ArrayOrQArray) -> Array | None:
    """A scale or zero point with one entry per axis or one per value: tiles are repeated."""
    if part is None:
        return None
    for axis, (count, size) in enumerate(zip(part.shape, x.shape, strict=True)):
        part = jnp.repeat(part, size // count, axis=axis) if 1 < count < size else part
    return part
