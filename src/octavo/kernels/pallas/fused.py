"""Float rows times a quantized matrix on TPUs, the rows quantized on the way: [m, k] x [k, n] -> [m, n].

    out = (codes(lhs) @ rhs) * scale(lhs) * rhs_scale

A block of whole rows is read once, so that each row's range is known, and its codes stay in memory for every block of
columns: neither codes nor scales of the left operand are ever written out.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from octavo._typing import Array, DTypeLike
from octavo.kernels.pallas import tiles
from octavo.kernels.pallas.blocks import accumulator, block_dot, multiplied, native, over_steps, type_refusal, typed

type Quantize = Callable[[Array], tuple[Array, Array]]


def quantized_matmul(
    lhs: Array,
    rhs: Array,
    *,
    quantize: Quantize,
    rhs_scale: Array,
    transposed: bool = False,
    dtype: DTypeLike | None = None,
    tiling: tuple[int, int, int] | None = None,
    precision: Any = None,
    interpret: bool = False,
) -> Array:
    """[m, k] x [k, n] -> [m, n] as a TPU kernel, or `transposed` of [n, k], the rows of `lhs` quantized inside.

    `quantize` takes rows [r, k] and gives their codes [r, k] and float32 scales [r, 1]; it is part of the kernel, and
    must look at each row by itself. `rhs` is int8 or float8, `rhs_scale` [1, n or 1] in float32.

    >>> halves = lambda x: ((2 * x).astype(jnp.int8), jnp.full((x.shape[0], 1), 0.5))
    >>> w, scale = jnp.ones((4, 3), jnp.int8), jnp.full((1, 3), 2.0)
    >>> quantized_matmul(jnp.full((2, 4), 1.5), w, quantize=halves, rhs_scale=scale, interpret=True)[0].tolist()
    [12.0, 12.0, 12.0]
    """
    if (why := matmul_refusal(lhs, rhs, rhs_scale, transposed=transposed)) is not None:
        raise ValueError(f"quantized_matmul: {why}")
    (m, k), n = lhs.shape, rhs.shape[0 if transposed else 1]
    dtype = jnp.dtype(dtype or lhs.dtype)
    if not m * k * n:
        return jnp.zeros((m, n), dtype)
    problem = tiles.Problem(m, k, n, 1, lhs.dtype, rhs.dtype, dtype, fused=True)
    return _matmul(
        lhs,
        rhs,
        jnp.broadcast_to(rhs_scale, (1, n)),
        quantize=quantize,
        transposed=transposed,
        dtype=dtype,
        tiling=tiles.resolve("matmul", problem, tiling),
        precision=precision,
        interpret=interpret,
    )


def matmul_refusal(lhs: Any, rhs: Any, rhs_scale: Any, *, transposed: bool = False) -> str | None:
    """Why the kernel cannot multiply operands of these shapes and types; None if it can."""
    if (why := type_refusal(lhs.dtype, rhs.dtype)) is not None:
        return why
    if not jnp.issubdtype(lhs.dtype, jnp.floating):
        return f"the left operand is quantized inside and must be of floats, not {lhs.dtype}"
    if len(lhs.shape) != 2 or len(rhs.shape) != 2 or lhs.shape[1] != rhs.shape[1 if transposed else 0]:
        return f"operands are [m, k] and {'[n, k]' if transposed else '[k, n]'}, got {lhs.shape} and {rhs.shape}"
    (m, k), n = lhs.shape, rhs.shape[0 if transposed else 1]
    if rhs_scale.shape not in ((1, 1), (1, n)):
        return f"the scale of the matrix is [1, 1] or [1, {n}], got {rhs_scale.shape}"
    if tiles.fitting(tiles.Problem(m, k, n, 1, lhs.dtype, rhs.dtype, lhs.dtype, fused=True)) is None:
        return f"rows of {k} values are too long to be quantized as a whole"
    return None


@functools.partial(jax.jit, static_argnames=("quantize", "transposed", "dtype", "tiling", "precision", "interpret"))
def _matmul(lhs, rhs, rhs_scale, *, quantize, transposed, dtype, tiling, precision, interpret):
    rows, k = lhs.shape
    least = tiles.sublanes(jnp.int8)
    lhs = jnp.pad(lhs, ((0, max(0, least - rows)), (0, 0)))
    m, n = lhs.shape[0], rhs.shape[0 if transposed else 1]
    tm, tk, tn = tiling
    deep = k // tk
    codes, _ = jax.eval_shape(quantize, jax.ShapeDtypeStruct((tm, k), lhs.dtype))
    wide = multiplied(codes.dtype, rhs.dtype, native=native(codes.dtype, rhs.dtype))
    total = accumulator(codes.dtype, rhs.dtype)

    def kernel(lhs_ref, rhs_ref, scale_ref, out_ref, codes_ref, row_scale_ref, *sums):
        column, step = pl.program_id(1), pl.program_id(2)

        @pl.when((column == 0) & (step == 0))
        def _():
            values, scale = quantize(lhs_ref[...])
            row_scale_ref[...] = scale.astype(jnp.float32)
            for i in range(deep):
                codes_ref[i] = values[:, i * tk : (i + 1) * tk]

        def write(out: Array) -> None:
            out = out.astype(jnp.float32) * row_scale_ref[...] * scale_ref[...]
            out_ref[...] = out.astype(out_ref.dtype)

        part = block_dot(codes_ref[step], rhs_ref[...], (1, int(transposed)), wide=wide, precision=precision)
        over_steps(part, step, deep, sums, write)

    matrix = (
        pl.BlockSpec((tn, tk), lambda i, j, s: (j, s)) if transposed else pl.BlockSpec((tk, tn), lambda i, j, s: (s, j))
    )
    out = pl.pallas_call(
        kernel,
        out_shape=typed((m, n), dtype, lhs, rhs, rhs_scale),
        grid=(pl.cdiv(m, tm), pl.cdiv(n, tn), deep),
        in_specs=[
            pl.BlockSpec((tm, k), lambda i, j, s: (i, 0)),
            matrix,
            pl.BlockSpec((1, tn), lambda i, j, s: (0, j)),
        ],
        out_specs=pl.BlockSpec((tm, tn), lambda i, j, s: (i, j)),
        scratch_shapes=[
            pltpu.VMEM((deep, tm, tk), codes.dtype),
            pltpu.VMEM((tm, 1), jnp.float32),
            *([pltpu.VMEM((tm, tn), total)] if deep > 1 else []),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * k * n, bytes_accessed=lhs.nbytes + rhs.nbytes + m * n * dtype.itemsize, transcendentals=0
        ),
        interpret=interpret,
        name="octavo_matmul",
    )(lhs, rhs, rhs_scale)
    return out[:rows]
