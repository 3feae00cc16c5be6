"""Rows times the matrix of their group on TPUs: [m, k] x [g, k, n] -> [m, n].

    out[i] = sum_t (lhs[i, tile t] @ rhs[group of i, tile t]) * lhs_scale[i, t] * rhs_scale[group of i, t]

with one tile unless scales change along k. The grid goes over columns, visits of blocks of rows (`visits.py`) and
depth; the blocks that each step loads are chosen by the visits, which are there before the kernel starts. A block of
rows that several groups share stays in memory while they follow each other, and each writes the rows it owns.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from octavo._typing import Array, DTypeLike
from octavo.kernels.pallas import tiles, visits
from octavo.kernels.pallas.blocks import (
    accumulator,
    block_dot,
    masked,
    multiplied,
    native,
    over_steps,
    type_refusal,
    typed,
)


def gmm(
    lhs: Array,
    rhs: Array,
    sizes: Array,
    *,
    lhs_scale: Array | None = None,
    rhs_scale: Array | None = None,
    transposed: bool = False,
    dtype: DTypeLike | None = None,
    tiling: tuple[int, int, int] | None = None,
    precision: Any = None,
    interpret: bool = False,
) -> Array:
    """[m, k] x [g, k, n] -> [m, n] as a TPU kernel, or `transposed` of [g, n, k]; rows of no group are zero.

    Operands are int8, int4, float8, bfloat16 or float32, of one type or two. Two of integers are summed in int32,
    others in float32. The scales are float32: [m or 1, t] and [g or 1, t, n or 1] (transposed: [g or 1, n or 1, t]),
    where t is one, or the number of equal tiles of k, multiples of 128, that have a scale each. `tiling` are the rows,
    depth and columns of a block. `interpret` runs it on any platform, slowly.

    >>> x, w, scale = jnp.ones((3, 4), jnp.int8), jnp.ones((2, 4, 5), jnp.int8), jnp.asarray([[[0.5]], [[2.0]]])
    >>> gmm(x, w, jnp.asarray([1, 1]), rhs_scale=scale, interpret=True)[:, 0].tolist()
    [2.0, 8.0, 0.0]
    """
    if (why := gmm_refusal(lhs, rhs, lhs_scale, rhs_scale, transposed=transposed)) is not None:
        raise ValueError(f"gmm: {why}")
    m, k, groups, n = *lhs.shape, rhs.shape[0], rhs.shape[1 if transposed else 2]
    scaled = lhs_scale is not None or rhs_scale is not None
    dtype = jnp.dtype(dtype or (jnp.float32 if scaled else accumulator(lhs.dtype, rhs.dtype)))
    if not m * k * n * groups:
        return jnp.zeros((m, n), dtype)
    depth = depth_of(k, lhs_scale, rhs_scale, transposed)
    problem = tiles.Problem(m, k, n, groups, lhs.dtype, rhs.dtype, dtype, depth=depth)
    chosen = tiles.resolve("gmm", problem, tiling)
    return _gmm(
        lhs,
        rhs,
        sizes,
        None if lhs_scale is None else jnp.broadcast_to(lhs_scale, (m, lhs_scale.shape[1])),
        None if rhs_scale is None else columns(rhs_scale, groups, n, transposed),
        transposed=transposed,
        dtype=dtype,
        tiling=chosen,
        depth=depth,
        native=native(lhs.dtype, rhs.dtype),
        precision=precision,
        interpret=interpret,
    )


def gmm_refusal(
    lhs: Any, rhs: Any, lhs_scale: Any = None, rhs_scale: Any = None, *, transposed: bool = False
) -> str | None:
    """Why the kernel cannot multiply operands of these shapes and types; None if it can."""
    if (why := type_refusal(lhs.dtype, rhs.dtype)) is not None:
        return why
    if len(lhs.shape) != 2 or len(rhs.shape) != 3 or lhs.shape[1] != rhs.shape[2 if transposed else 1]:
        return f"operands are [m, k] and {'[g, n, k]' if transposed else '[g, k, n]'}, got {lhs.shape} and {rhs.shape}"
    k, counts = lhs.shape[1], _counts(lhs_scale, rhs_scale, transposed)
    for count in counts:
        if k % count or (count > 1 and (k // count) % tiles.LANES):
            return f"tiles of a scale are multiples of {tiles.LANES} along k, not {count} to a depth of {k}"
    if max(counts, default=1) % min(counts, default=1):
        return f"the tiles of the two scales do not nest: {counts[0]} and {counts[1]} along a depth of {k}"
    return None


def _counts(lhs_scale: Any, rhs_scale: Any, transposed: bool) -> list[int]:
    counts = [] if lhs_scale is None else [lhs_scale.shape[1]]
    return counts if rhs_scale is None else [*counts, rhs_scale.shape[2 if transposed else 1]]


def depth_of(k: int, lhs_scale: Any, rhs_scale: Any, transposed: bool) -> int | None:
    """The tile of k in which both scales are constant; None if they are along all of it."""
    most = max(_counts(lhs_scale, rhs_scale, transposed), default=1)
    return None if most == 1 else k // most


def columns(scale: Array, groups: int, n: int, transposed: bool) -> Array:
    """The scale of the matrices as [g, t, n]."""
    scale = scale.swapaxes(1, 2) if transposed else scale
    return jnp.broadcast_to(scale, (groups, scale.shape[1], n))


@functools.partial(
    jax.jit, static_argnames=("transposed", "dtype", "tiling", "depth", "native", "precision", "interpret")
)
def _gmm(lhs, rhs, sizes, lhs_scale, rhs_scale, *, transposed, dtype, tiling, depth, native, precision, interpret):
    rows, k = lhs.shape
    least = tiles.sublanes(lhs.dtype)
    if rows < least:
        lhs = jnp.pad(lhs, ((0, least - rows), (0, 0)))
        lhs_scale = None if lhs_scale is None else jnp.pad(lhs_scale, ((0, least - rows), (0, 0)))
    m, groups, n = lhs.shape[0], rhs.shape[0], rhs.shape[1 if transposed else 2]
    tm, tk, tn = tiling
    deep, parts = pl.cdiv(k, tk), 1 if depth is None else tk // depth
    plan = visits.to_blocks(sizes, m, tm)
    total = accumulator(lhs.dtype, rhs.dtype) if depth is None else jnp.dtype(jnp.float32)
    wide = multiplied(lhs.dtype, rhs.dtype, native=native)

    def kernel(group_ref, block_ref, bound_ref, lhs_ref, rhs_ref, *rest):
        scales, (out_ref, *sums) = rest[: len(extra)], rest[len(extra) :]
        left, right = (scales[names.index(name)] if name in names else None for name in ("lhs", "rhs"))
        visit, step = pl.program_id(1), pl.program_id(2)
        group, block = group_ref[visit], block_ref[visit]

        def product(j: int) -> Array:
            at = slice(j * (tk // parts), (j + 1) * (tk // parts))
            x, w = lhs_ref[:, at], rhs_ref[:, at] if transposed else rhs_ref[at, :]
            if k % tk:
                depths = lambda shape, axis: jax.lax.broadcasted_iota(jnp.int32, shape, axis) < k - step * tk  # noqa: E731
                x, w = masked(x, depths(x.shape, 1)), masked(w, depths(w.shape, int(transposed)))
            return block_dot(x, w, (1, int(transposed)), wide=wide, precision=precision)

        def scaled(out: Array, j: int) -> Array:
            out = out.astype(jnp.float32) if extra else out
            out = out if left is None else out * left[:, j : j + 1]
            return out if right is None else out * right[j : j + 1, :]

        def write(out: Array) -> None:
            row = block * tm + jax.lax.broadcasted_iota(jnp.int32, out.shape, 0)
            mine = (row >= bound_ref[group]) & (row < bound_ref[group + 1])
            out = scaled(out, 0) if depth is None else out
            out = out.astype(out_ref.dtype)
            fresh = (visit == 0) | (block_ref[jnp.maximum(visit - 1, 0)] != block)

            @pl.when(fresh)
            def _():
                out_ref[...] = masked(out, mine)

            @pl.when(jnp.logical_not(fresh))
            def _():
                out_ref[...] = jnp.where(mine, out, out_ref[...])

        @pl.when(group < groups)
        def _():
            part = functools.reduce(jnp.add, (scaled(product(j), j) for j in range(parts))) if depth else product(0)
            over_steps(part, step, deep, sums, write)

        @pl.when((group == groups) & (step == deep - 1))
        def _():
            write(jnp.zeros((tm, tn), total))

    of = lambda group: jnp.minimum(group, groups - 1)  # noqa: E731
    names, extra, extra_specs = [], [], []
    if lhs_scale is not None:
        # One slab for each step of depth, as a block of so few columns must be all there are.
        lhs_scale = _repeated(lhs_scale, deep * parts, 1).reshape(m, deep, parts).swapaxes(0, 1)
        names.append("lhs")
        extra.append(lhs_scale)
        extra_specs.append(pl.BlockSpec((None, tm, parts), lambda j, v, s, g, b, e: (s, b[v], 0)))
    if rhs_scale is not None:
        rhs_scale = _repeated(rhs_scale, deep * parts, 1).reshape(groups, deep, parts, n)
        names.append("rhs")
        extra.append(rhs_scale)
        extra_specs.append(pl.BlockSpec((None, None, parts, tn), lambda j, v, s, g, b, e: (of(g[v]), s, 0, j)))
    matrix = (
        pl.BlockSpec((None, tn, tk), lambda j, v, s, g, b, e: (of(g[v]), j, s))
        if transposed
        else pl.BlockSpec((None, tk, tn), lambda j, v, s, g, b, e: (of(g[v]), s, j))
    )
    out = pl.pallas_call(
        kernel,
        out_shape=typed((m, n), dtype, lhs, rhs, sizes, *extra),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(n, tn), plan.count, deep),
            in_specs=[pl.BlockSpec((tm, tk), lambda j, v, s, g, b, e: (b[v], s)), matrix, *extra_specs],
            out_specs=pl.BlockSpec((tm, tn), lambda j, v, s, g, b, e: (b[v], j)),
            scratch_shapes=[pltpu.VMEM((tm, tn), total)] if deep > 1 else [],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * k * n,
            bytes_accessed=lhs.nbytes + rhs.nbytes + m * n * dtype.itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
        name="octavo_gmm",
    )(plan.group, plan.block, plan.bounds, lhs, rhs, *extra)
    return out[:rows]


def _repeated(scale: Array, count: int, axis: int) -> Array:
    return jnp.repeat(scale, count // scale.shape[axis], axis=axis)
