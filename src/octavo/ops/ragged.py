"""Expert matmuls: `lax.ragged_dot` and related operations in low precision, with separate scales for each expert."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from octavo import _sharding
from octavo._typing import Array, DTypeLike, PRNGKeyArray
from octavo.ops.config import DotConfig
from octavo.ops.lowerings import multiply
from octavo.ops.lowerings.grouped import Rows
from octavo.ops.lowerings.ragged import multiply_groups, multiply_rows
from octavo.ops.operands import ArrayOrQArray, Dims, MatmulOptions, dequantize, result_dtype
from octavo.ops.product import UNPLACED, Placement, Scaling
from octavo.ops.products.ragged import FloatCall, Ragged, float_ragged_dot
from octavo.ops.vjp import Call, masked, quantized_product, quantized_transpose
from octavo.qarray import QArray

GMM = "octavo.gmm"
"""The named scope by which rules distinguish a `gmm` from other ragged dots."""


def ragged_dot(
    lhs: ArrayOrQArray,
    rhs: ArrayOrQArray,
    group_sizes: Array,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: Array | None = None,
    out_sharding: Any = None,
    *,
    config: DotConfig | None = None,
    key: PRNGKeyArray | None = None,
    scaling: Scaling | None = None,
    sharding: Any = None,
    placement: Placement = UNPLACED,
) -> Array:
    """`jax.lax.ragged_dot` in low precision: each row of `lhs` [m, k] times its group's matrix in `rhs` [g, k, n].

    Rows are sorted by group; rows beyond the last group give zero, have no gradient and do not affect ranges. QArray
    operands are multiplied without requantization, with scales per row of `lhs` and per expert and column of `rhs`.

    Args:
      lhs: the rows.
      rhs: the matrices, one per group.
      group_sizes: the number of rows of each group, [g].
      precision: as in `jax.lax.ragged_dot`.
      preferred_element_type: the dtype of the result; by default the operands' promoted dtype.
      group_offset: the first group that `rhs` holds; rows of other groups count as rows of no group.
      out_sharding: the sharding of the result, for float operands only.
      config: quantizes float operands, and those of the two gradient matmuls.
      key: for stochastic rounding.
      scaling: external ranges, as in `octavo.dot_general`.
      sharding: an `octavo.distributed.ExpertSharding`: rows are sharded and sorted on each device, and `group_sizes` is
        [shards, groups of a device].
      placement: how the weight is all-gathered and its gradient reduced over devices.

    Returns:
      [m, n].

    >>> import functools, octavo
    >>> x, w = jnp.ones((3, 4)), jnp.stack([jnp.eye(4), 2 * jnp.eye(4)])
    >>> dot = jax.jit(functools.partial(ragged_dot, config=octavo.DotConfig.qt("int8")))
    >>> dot(x, w, jnp.asarray([1, 1])).round(1)[:, 0].tolist()
    [1.0, 2.0, 0.0]
    """
    kinds = (precision, preferred_element_type, group_offset, out_sharding)
    return _ragged_dot(lhs, rhs, group_sizes, *kinds, config, key, scaling, sharding, placement)


def gmm(
    lhs: ArrayOrQArray,
    rhs: ArrayOrQArray,
    group_sizes: Array,
    preferred_element_type: DTypeLike | None = None,
    *,
    group_offset: Array | None = None,
    transpose_rhs: bool = False,
    precision: Any = None,
    config: DotConfig | None = None,
    key: PRNGKeyArray | None = None,
    scaling: Scaling | None = None,
) -> Array:
    """`ragged_dot` with the name and options of Megablox; with `transpose_rhs`, `rhs` is [g, n, k].

    Args:
      lhs: the rows, sorted by group.
      rhs: the matrices, one per group.
      group_sizes: the number of rows of each group.
      preferred_element_type: the dtype of the result; by default the operands' promoted dtype.
      group_offset: as in `ragged_dot`, like the remaining arguments.
      transpose_rhs: whether `rhs` is [g, n, k] instead of [g, k, n].
      precision: the precision of float dots.
      config: the quantization of float operands.
      key: for stochastic rounding.
      scaling: external ranges.

    Returns:
      [m, n].

    >>> gmm(jnp.ones((2, 2)), jnp.stack([jnp.eye(2), 2 * jnp.eye(2)]), jnp.asarray([1, 1])).tolist()
    [[1.0, 1.0], [2.0, 2.0]]
    """
    if config is not None and transpose_rhs:
        rhs, transpose_rhs = rhs.swapaxes(1, 2), False
    with jax.named_scope(GMM):
        kinds = (precision, preferred_element_type, group_offset, None)
        contract = 2 if transpose_rhs else 1
        return _ragged_dot(lhs, rhs, group_sizes, *kinds, config, key, scaling, contract=contract)


def tgmm(
    lhs: ArrayOrQArray,
    rhs: ArrayOrQArray,
    group_sizes: Array,
    preferred_element_type: DTypeLike | None = None,
    *,
    rows_first: bool = False,
    precision: Any = None,
) -> Array:
    """For each group, the matmul of its columns of `lhs` [k, m] and its rows of `rhs` [m, n]: [g, k, n].

    Empty groups give zero, and rows beyond the last group are ignored, even if they are NaN.

    Args:
      lhs: the left operand, [k, m] as in Megablox.
      rhs: the right operand, [m, n].
      group_sizes: the number of rows of each group, [g].
      preferred_element_type: the dtype of the result; by default the operands' promoted dtype.
      rows_first: whether `lhs` is [m, k] instead of [k, m].
      precision: the precision of float dots.

    Returns:
      [g, k, n].

    >>> tgmm(jnp.ones((1, 3)), jnp.arange(3.0)[:, None], jnp.asarray([2, 0])).tolist()
    [[[1.0]], [[0.0]]]
    """
    lhs = lhs if rows_first else lhs.T
    if lhs.ndim != 2 or rhs.ndim != 2 or lhs.shape[0] != rhs.shape[0] or group_sizes.ndim != 1:
        raise ValueError(
            f"tgmm takes lhs [k, m] ([m, k] with rows_first=True), rhs [m, n] and group_sizes [g]; got an lhs that is "
            f"{lhs.shape} by rows, {rhs.shape} and {group_sizes.shape}"
        )
    dtype = result_dtype(lhs, rhs, preferred_element_type)
    lhs, rhs = _sharding.without_reduced((lhs, rhs))
    return multiply_rows(lhs, rhs, Rows(lhs.shape[0], group_sizes), MatmulOptions(dtype, precision))


def ragged_dot_general(
    lhs: ArrayOrQArray,
    rhs: ArrayOrQArray,
    group_sizes: Array,
    ragged_dot_dimension_numbers: Any = None,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: Array | None = None,
    out_sharding: Any = None,
    *,
    dimension_numbers: Any = None,
    config: DotConfig | None = None,
    key: PRNGKeyArray | None = None,
    scaling: Scaling | None = None,
    sharding: Any = None,
    placement: Placement = UNPLACED,
) -> Array:
    """`jax.lax.ragged_dot_general` in low precision, in its three modes: a ragged row, contracted or batch axis.

    Where the axes can be transposed to those of `ragged_dot` or `tgmm`, codes are multiplied; otherwise (batch axes, or
    several axes of one kind) QArrays are dequantized first, and a `config` is not supported.

    Args:
      lhs: the left operand.
      rhs: the right operand.
      group_sizes: the sizes of the groups along the ragged axis.
      ragged_dot_dimension_numbers: as in `jax.lax.ragged_dot_general`.
      precision: as in `ragged_dot`, like the following arguments.
      preferred_element_type: the dtype of the result.
      group_offset: the first group.
      out_sharding: the sharding of the result.
      dimension_numbers: Qwix's name for `ragged_dot_dimension_numbers`.
      config: the quantization of float operands.
      key: for stochastic rounding.
      scaling: external ranges.
      sharding: the `ExpertSharding` of the rows.
      placement: the collectives of the weight.

    Returns:
      As `jax.lax.ragged_dot_general`.

    >>> numbers = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
    >>> ragged_dot_general(jnp.ones((3, 4)), jnp.ones((2, 4, 5)), jnp.asarray([1, 2]), numbers).shape
    (3, 5)
    """
    if (ragged_dot_dimension_numbers is None) == (dimension_numbers is None):
        raise TypeError("ragged_dot_general takes ragged_dot_dimension_numbers, or dimension_numbers in its place")
    numbers: Any = dimension_numbers if ragged_dot_dimension_numbers is None else ragged_dot_dimension_numbers
    (lc, rc), (lb, _) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    dtype = result_dtype(lhs, rhs, preferred_element_type)
    simple = not lb and len(lc) == 1 and group_sizes.ndim == (1 if sharding is None else 2) and out_sharding is None
    if simple and ragged not in lc and (lhs.ndim, rhs.ndim) == (2, 3):
        (group,) = numbers.rhs_group_dimensions
        lhs = _transpose(lhs, (ragged, lc[0]))
        rhs = _transpose(rhs, (group, rc[0], 3 - group - rc[0]))
        kinds = (precision, dtype, group_offset, None)
        return _ragged_dot(lhs, rhs, group_sizes, *kinds, config, key, scaling, sharding, placement)
    is_float = not isinstance(lhs, QArray) and not isinstance(rhs, QArray)
    is_rows = simple and group_offset is None and (lhs.ndim, rhs.ndim) == (2, 2)
    if config is not None and is_rows and is_float and ragged in lc:
        lhs, rhs = _transpose(lhs, (ragged, 1 - ragged)), _transpose(rhs, (rc[0], 1 - rc[0]))
        swapped = config.replace(fwd=config.fwd.replace(lhs=config.fwd.rhs, rhs=config.fwd.lhs))
        options = MatmulOptions(dtype, precision)
        operands: Any = (rhs, lhs, group_sizes)
        return quantized_transpose(Ragged().transpose(False), *operands, config=swapped, options=options, key=key)
    if config is not None:
        raise NotImplementedError(
            "a config quantizes ragged_dot_general where the rows of a matrix are ragged or contracted, with no batch "
            f"axes and one contracted axis, got {numbers}: quantize the operands and leave the config out"
        )
    if is_float:
        return lax.ragged_dot_general(lhs, rhs, group_sizes, numbers, precision, dtype, group_offset, out_sharding)
    if ragged in lb:
        # A ragged batch axis: groups do not affect the result.
        dims = Dims.of(numbers.dot_dimension_numbers, lhs.ndim, rhs.ndim)
        lhs, rhs = _sharding.without_reduced((lhs, rhs))
        return multiply(lhs, rhs, dims, MatmulOptions(dtype, precision, out_sharding=out_sharding))
    if is_rows:
        lhs, rhs = _transpose(lhs, (ragged, 1 - ragged)), _transpose(rhs, (rc[0], 1 - rc[0]))
        return tgmm(lhs, rhs, group_sizes, dtype, rows_first=True, precision=precision)
    return lax.ragged_dot_general(
        *dequantize(lhs, rhs), group_sizes, numbers, precision, dtype, group_offset, out_sharding
    )


def _ragged_dot(
    lhs,
    rhs,
    group_sizes,
    precision,
    preferred_element_type,
    group_offset,
    out_sharding,
    config,
    key,
    scaling,
    sharding=None,
    placement=UNPLACED,
    *,
    contract=1,
) -> Array:
    _check_shapes(lhs, rhs, group_sizes, contract, group_offset, sharding)
    dtype = result_dtype(lhs, rhs, preferred_element_type)
    quantized = isinstance(lhs, QArray) or isinstance(rhs, QArray)
    if config is not None and quantized and contract != 1:
        raise NotImplementedError("a config and a QArray that contracts its last axis: transpose the QArray first")
    if out_sharding is not None and (quantized or config is not None):
        raise NotImplementedError("a quantized ragged_dot takes no out_sharding: use jax.shard_map over the experts")
    first = None
    if group_offset is not None:
        offset = jnp.asarray(group_offset, jnp.int32).reshape(())
        before = jnp.arange(group_sizes.shape[0], dtype=jnp.int32) < offset
        first = jnp.sum(jnp.where(before, group_sizes, jnp.zeros_like(group_sizes))).astype(jnp.int32)
        group_sizes = lax.dynamic_slice_in_dim(group_sizes, offset, rhs.shape[0])
        lhs = _roll(lhs, -first)
    rows = Rows(lhs.shape[0], group_sizes, sharding)
    if config is not None:
        # Rows of no group are masked in the input and the output, and thereby in the gradients as well.
        product = Ragged(sharding)
        product.check(config)
        call = Call(product, config, jnp.dtype(dtype), precision, None, placement)
        lhs = lhs if isinstance(lhs, QArray) else masked(lhs, rows.owned)
        out = quantized_product(call, lhs, rhs, group_sizes, key=key, scaling=scaling)
        out = masked(out, rows.owned)
    elif quantized:
        lhs, rhs = _sharding.without_reduced((lhs, rhs))
        out = multiply_groups(lhs, rhs, rows, MatmulOptions(dtype, precision), contract=contract)
    elif sharding is not None:
        out = float_ragged_dot(FloatCall(Ragged(sharding), jnp.dtype(dtype), precision), lhs, rhs, group_sizes)
    else:
        numbers = lax.RaggedDotDimensionNumbers((((1,), (contract,)), ((), ())), (0,), (0,))
        out = lax.ragged_dot_general(lhs, rhs, group_sizes, numbers, precision, dtype, out_sharding=out_sharding)
        out = rows.keep(out)
    return out if first is None else jnp.roll(out, first, axis=0)


def _check_shapes(
    lhs: ArrayOrQArray, rhs: ArrayOrQArray, sizes: Array, contract: int, offset: Any, sharding: Any = None
) -> None:
    if sharding is not None:
        wanted = (sharding.num_shards, rhs.shape[0] // sharding.num_devices(sharding.experts))
        if sizes.shape != wanted or lhs.shape[0] % sharding.num_shards or offset is not None:
            raise ValueError(
                f"rows in {sharding.num_shards} shards take group_sizes {wanted}, a multiple of that many rows "
                f"and no group_offset; got {sizes.shape}, {lhs.shape[0]} rows and group_offset={offset}"
            )
        sizes = sizes.reshape(-1)[: rhs.shape[0]]
    fits = lhs.ndim == 2 and rhs.ndim == 3 and sizes.ndim == 1 and lhs.shape[1] == rhs.shape[contract]
    if not fits or (rhs.shape[0] > sizes.shape[0] if offset is not None else rhs.shape[0] != sizes.shape[0]):
        matrices = "[g, k, n]" if contract == 1 else "[g, n, k]"
        raise ValueError(
            f"a ragged dot takes lhs [m, k], rhs {matrices} and group_sizes [g] (at least g with a group_offset); "
            f"got {lhs.shape}, {rhs.shape} and {sizes.shape}"
        )


def _roll(x: ArrayOrQArray, shift: Array) -> ArrayOrQArray:
    if not isinstance(x, QArray):
        return jnp.roll(x, shift, axis=0)
    return x[(jnp.arange(x.shape[0], dtype=jnp.int32) - shift) % x.shape[0]]


def _transpose(x: ArrayOrQArray, order: tuple[int, ...]) -> ArrayOrQArray:
    return x if order == tuple(range(x.ndim)) else x.transpose(order)
