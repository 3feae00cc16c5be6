"""The product of rows with rows, group by group, on TPUs: [m, k] x [m, n] -> [g, k, n].

    out[i] = lhs[rows of i].T @ rhs[rows of i] * scales

The grid goes over depth, columns and visits of blocks of rows (`visits.py`). A group's blocks follow each other, so
that its sum stays in memory until the last of them; a group without rows is visited once, to be set to zero.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from octavo._typing import Array, DTypeLike
from octavo.kernels.pallas import tiles, visits
from octavo.kernels.pallas.blocks import accumulator, block_dot, masked, multiplied, native, type_refusal, typed


def tgmm(
    lhs: Array,
    rhs: Array,
    sizes: Array,
    *,
    scales: Sequence[Array] = (),
    dtype: DTypeLike | None = None,
    tiling: tuple[int, int, int] | None = None,
    precision: Any = None,
    interpret: bool = False,
) -> Array:
    """[m, k] x [m, n] -> [g, k, n] as a TPU kernel; groups without rows are zero, rows of no group count for none.

    The types of operands are those of `gmm`. Each of the `scales` is float32, [g or 1, k or 1, n or 1] with one of the
    last two equal to one, and they come in one after the other.

    >>> x, y = jnp.ones((3, 2), jnp.int8), jnp.ones((3, 4), jnp.int8)
    >>> tgmm(x, y, jnp.asarray([2, 0]), scales=[jnp.full((1, 1, 1), 0.5)], interpret=True)[:, 0, 0].tolist()
    [1.0, 0.0]
    """
    if (why := tgmm_refusal(lhs, rhs, sizes, scales)) is not None:
        raise ValueError(f"tgmm: {why}")
    (m, k), n, groups = lhs.shape, rhs.shape[1], sizes.shape[0]
    dtype = jnp.dtype(dtype or (jnp.float32 if scales else accumulator(lhs.dtype, rhs.dtype)))
    if not m * k * n * groups:
        return jnp.zeros((groups, k, n), dtype)
    problem = tiles.Problem(m, k, n, groups, lhs.dtype, rhs.dtype, dtype, transposed=True)
    return _tgmm(
        lhs,
        rhs,
        sizes,
        tuple(jnp.broadcast_to(s, (groups, *s.shape[1:])) for s in scales),
        dtype=dtype,
        tiling=tiles.resolve("tgmm", problem, tiling),
        native=native(lhs.dtype, rhs.dtype),
        precision=precision,
        interpret=interpret,
    )


def tgmm_refusal(lhs: Any, rhs: Any, sizes: Any, scales: Sequence[Any] = ()) -> str | None:
    """Why the kernel cannot multiply operands of these shapes and types; None if it can."""
    if (why := type_refusal(lhs.dtype, rhs.dtype)) is not None:
        return why
    if len(lhs.shape) != 2 or len(rhs.shape) != 2 or lhs.shape[0] != rhs.shape[0]:
        return f"operands are [m, k] and [m, n], got {lhs.shape} and {rhs.shape}"
    whole = (sizes.shape[0], lhs.shape[1], rhs.shape[1])
    for scale in scales:
        fits = len(scale.shape) == 3 and all(a in (1, b) for a, b in zip(scale.shape, whole, strict=True))
        if not fits or 1 not in scale.shape[1:]:
            return f"a scale is [g or 1, k or 1, n or 1], one of the last two 1, for {whole}; got {scale.shape}"
    return None


@functools.partial(jax.jit, static_argnames=("dtype", "tiling", "native", "precision", "interpret"))
def _tgmm(lhs, rhs, sizes, scales, *, dtype, tiling, native, precision, interpret):
    rows, least = lhs.shape[0], max(tiles.sublanes(lhs.dtype), tiles.sublanes(rhs.dtype))
    if rows < least:
        lhs, rhs = (jnp.pad(x, ((0, least - x.shape[0]), (0, 0))) for x in (lhs, rhs))
    (m, k), n, groups = lhs.shape, rhs.shape[1], sizes.shape[0]
    tm, tk, tn = tiling
    plan = visits.to_groups(sizes, m, tm)
    total = accumulator(lhs.dtype, rhs.dtype)
    wide = multiplied(lhs.dtype, rhs.dtype, native=native)

    def kernel(group_ref, block_ref, bound_ref, count_ref, lhs_ref, rhs_ref, *rest):
        *scale_refs, out_ref, sum_ref = rest
        visit = pl.program_id(2)
        group, block = group_ref[visit], block_ref[visit]
        first = (visit == 0) | (group_ref[jnp.maximum(visit - 1, 0)] != group)
        last = visit == count_ref[0] - 1
        last |= group_ref[jnp.minimum(visit + 1, count_ref[0] - 1)] != group

        @pl.when(first)
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        @pl.when(bound_ref[group] < bound_ref[group + 1])
        def _():
            def own(x: Array) -> Array:
                row = block * tm + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
                return masked(x, (row >= bound_ref[group]) & (row < bound_ref[group + 1]))

            x, y = own(lhs_ref[...]), rhs_ref[...]
            # Of integers one zero is enough; of floats the other factor may be NaN.
            y = y if total == jnp.int32 else own(y)
            sum_ref[...] += block_dot(x, y, (0, 0), wide=wide, precision=precision)

        @pl.when(last)
        def _():
            out = sum_ref[...]
            out = out.astype(jnp.float32) if scale_refs else out
            for ref in scale_refs:
                out = out * ref[...]
            out_ref[...] = out.astype(out_ref.dtype)

    def of_scale(scale: Array) -> pl.BlockSpec:
        deep, wide = scale.shape[1] > 1, scale.shape[2] > 1
        return pl.BlockSpec(
            (None, tk if deep else 1, tn if wide else 1),
            lambda i, j, v, g, b, e, c: (g[v], i if deep else 0, j if wide else 0),
        )

    return pl.pallas_call(
        kernel,
        out_shape=typed((groups, k, n), dtype, lhs, rhs, sizes, *scales),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pl.cdiv(k, tk), pl.cdiv(n, tn), plan.count),
            in_specs=[
                pl.BlockSpec((tm, tk), lambda i, j, v, g, b, e, c: (b[v], i)),
                pl.BlockSpec((tm, tn), lambda i, j, v, g, b, e, c: (b[v], j)),
                *map(of_scale, scales),
            ],
            out_specs=pl.BlockSpec((None, tk, tn), lambda i, j, v, g, b, e, c: (g[v], i, j)),
            scratch_shapes=[pltpu.VMEM((tk, tn), total)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * k * n,
            bytes_accessed=lhs.nbytes + rhs.nbytes + groups * k * n * dtype.itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
        name="octavo_tgmm",
    )(plan.group, plan.block, plan.bounds, plan.count[None], lhs, rhs, *scales)
