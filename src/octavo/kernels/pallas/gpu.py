"""The grouped products for NVIDIA GPUs, in Pallas' Triton backend: the same interface as `gmm` and `tgmm`.

A Triton program has its block of the output for itself. For rows times groups that is a visit (`visits.py`) and some
columns, of which it writes the rows that its group owns; for rows times rows it is a group's own block, summed over as
many rows as the group has. Loads are masked, so that what is beyond an operand, or another group's, is never read.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from octavo._typing import Array, DTypeLike
from octavo.kernels.pallas import visits
from octavo.kernels.pallas.blocks import accumulator, block_dot, multiplied, typed
from octavo.kernels.pallas.grouped import columns, depth_of, gmm_refusal
from octavo.kernels.pallas.tiles import Tiling
from octavo.kernels.pallas.transposed import tgmm_refusal

# Of the sizes that Triton's own tutorials tune over, one that fits the shared memory of every GPU since 2020.
BLOCK = Tiling(64, 64, 128)
_WARPS, _STAGES = 4, 3


def gpu_gmm(
    lhs: Array,
    rhs: Array,
    sizes: Array,
    *,
    lhs_scale: Array | None = None,
    rhs_scale: Array | None = None,
    transposed: bool = False,
    dtype: DTypeLike | None = None,
    tiling: tuple[int, int, int] = BLOCK,
    precision: Any = None,
    interpret: bool = False,
) -> Array:
    """What `gmm` gives, on a GPU; `tiling` is in powers of two from 16 (32 in depth, for integers).

    >>> x, w = jnp.ones((3, 4), jnp.int8), jnp.ones((2, 4, 5), jnp.int8)
    >>> gpu_gmm(x, w, jnp.asarray([1, 1]), interpret=True)[:, 0].tolist()
    [4, 4, 0]
    """
    if (why := gmm_refusal(lhs, rhs, lhs_scale, rhs_scale, transposed=transposed)) is not None:
        raise ValueError(f"gpu_gmm: {why}")
    (m, k), groups, n = lhs.shape, rhs.shape[0], rhs.shape[1 if transposed else 2]
    scaled = lhs_scale is not None or rhs_scale is not None
    dtype = jnp.dtype(dtype or (jnp.float32 if scaled else accumulator(lhs.dtype, rhs.dtype)))
    if not m * k * n * groups:
        return jnp.zeros((m, n), dtype)
    tiling = check(tiling, "gpu_gmm")
    return _gmm(
        _bytes(lhs),
        _bytes(rhs),
        sizes,
        None if lhs_scale is None else jnp.broadcast_to(lhs_scale, (m, lhs_scale.shape[1])),
        None if rhs_scale is None else columns(rhs_scale, groups, n, transposed),
        transposed=transposed,
        dtype=dtype,
        tiling=tiling,
        depth=depth_of(k, lhs_scale, rhs_scale, transposed),
        precision=precision,
        interpret=interpret,
    )


def gpu_tgmm(
    lhs: Array,
    rhs: Array,
    sizes: Array,
    *,
    scales: Sequence[Array] = (),
    dtype: DTypeLike | None = None,
    tiling: tuple[int, int, int] = BLOCK,
    precision: Any = None,
    interpret: bool = False,
) -> Array:
    """What `tgmm` gives, on a GPU; `tiling` is in powers of two from 16 (32 rows, for integers).

    >>> x, y = jnp.ones((3, 2), jnp.int8), jnp.ones((3, 4), jnp.int8)
    >>> gpu_tgmm(x, y, jnp.asarray([2, 0]), interpret=True)[:, 0, 0].tolist()
    [2, 0]
    """
    if (why := tgmm_refusal(lhs, rhs, sizes, scales)) is not None:
        raise ValueError(f"gpu_tgmm: {why}")
    (m, k), n, groups = lhs.shape, rhs.shape[1], sizes.shape[0]
    dtype = jnp.dtype(dtype or (jnp.float32 if scales else accumulator(lhs.dtype, rhs.dtype)))
    if not m * k * n * groups:
        return jnp.zeros((groups, k, n), dtype)
    how = {"dtype": dtype, "tiling": check(tiling, "gpu_tgmm"), "precision": precision, "interpret": interpret}
    wide = tuple(jnp.broadcast_to(s, (groups, *s.shape[1:])) for s in scales)
    return _tgmm(_bytes(lhs), _bytes(rhs), sizes, wide, **how)


def check(tiling: tuple[int, int, int], name: str) -> Tiling:
    """Blocks that Triton takes."""
    if any(t < 16 or t & (t - 1) for t in tiling) or len(tiling) != 3:
        raise ValueError(f"{name}: blocks of {tuple(tiling)} are not three powers of two from 16; try {tuple(BLOCK)}")
    return Tiling(*tiling)


def _bytes(x: Array) -> Array:
    """Triton addresses bytes."""
    return x.astype(jnp.int8) if x.dtype == jnp.int4 else x


@functools.partial(jax.jit, static_argnames=("transposed", "dtype", "tiling", "depth", "precision", "interpret"))
def _gmm(lhs, rhs, sizes, lhs_scale, rhs_scale, *, transposed, dtype, tiling, depth, precision, interpret):
    (m, k), groups, n = lhs.shape, rhs.shape[0], rhs.shape[1 if transposed else 2]
    tm, tk, tn = tiling.m, tiling.k if depth is None else _within(tiling.k, depth), tiling.n
    plan = visits.to_blocks(sizes, m, tm)
    total = accumulator(lhs.dtype, rhs.dtype) if depth is None else jnp.dtype(jnp.float32)
    wide = multiplied(lhs.dtype, rhs.dtype, native=accumulator(lhs.dtype, rhs.dtype) == jnp.int32)
    names = [name for name, scale in (("lhs", lhs_scale), ("rhs", rhs_scale)) if scale is not None]
    extra = [scale for scale in (lhs_scale, rhs_scale) if scale is not None]

    def kernel(group_ref, block_ref, bound_ref, count_ref, lhs_ref, rhs_ref, *rest):
        refs, out_ref = dict(zip(names, rest[:-1], strict=True)), rest[-1]
        visit, column = pl.program_id(0), pl.program_id(1)
        group, block = group_ref[visit], block_ref[visit]
        low, high = bound_ref[group], bound_ref[group + 1]
        rows, cols = block * tm + jnp.arange(tm), column * tn + jnp.arange(tn)
        real = visit < count_ref[0]
        mine, inside = (rows >= low) & (rows < high) & real, cols < n
        matrix = jnp.minimum(group, groups - 1)

        def scaled(out: Array, step: Any) -> Array:
            out = out.astype(jnp.float32) if refs else out
            if "lhs" in refs:
                at = (step * tk * lhs_scale.shape[1]) // k
                out = out * _load(refs["lhs"], (rows, at), mine)[:, None]
            if "rhs" in refs:
                at = (step * tk * rhs_scale.shape[1]) // k
                out = out * _load(refs["rhs"], (matrix, at, cols), inside)[None, :]
            return out

        def add(step: Any, sums: Array) -> Array:
            deep = step * tk + jnp.arange(tk)
            x = _load(lhs_ref, (rows[:, None], deep[None, :]), mine[:, None] & (deep < k)[None, :])
            if transposed:
                w = _load(rhs_ref, (matrix, cols[:, None], deep[None, :]), inside[:, None] & (deep < k)[None, :])
            else:
                w = _load(rhs_ref, (matrix, deep[:, None], cols[None, :]), (deep < k)[:, None] & inside[None, :])
            part = block_dot(x, w, (1, int(transposed)), wide=wide, precision=precision)
            return sums + (part if depth is None else scaled(part, step))

        steps = jnp.where(real & (group < groups), -(-k // tk), 0)
        out = lax.fori_loop(0, steps, add, jnp.zeros((tm, tn), total))
        out = (scaled(out, 0) if depth is None else out).astype(out_ref.dtype)
        out = jnp.where(group < groups, out, jnp.zeros_like(out))
        plgpu.store(out_ref.at[rows[:, None], cols[None, :]], out, mask=mine[:, None] & inside[None, :])

    return pl.pallas_call(
        kernel,
        out_shape=typed((m, n), dtype, lhs, rhs, sizes, *extra),
        grid=(len(plan.group), pl.cdiv(n, tn)),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * k * n, bytes_accessed=lhs.nbytes + rhs.nbytes + m * n * dtype.itemsize, transcendentals=0
        ),
        interpret=interpret,
        name="octavo_gmm",
    )(plan.group, plan.block, plan.bounds, plan.count[None], lhs, rhs, *extra)


@functools.partial(jax.jit, static_argnames=("dtype", "tiling", "precision", "interpret"))
def _tgmm(lhs, rhs, sizes, scales, *, dtype, tiling, precision, interpret):
    (m, k), n, groups = lhs.shape, rhs.shape[1], sizes.shape[0]
    tm, tk, tn = tiling
    ends = jnp.minimum(jnp.cumsum(sizes.astype(jnp.int32)), m)
    bounds = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
    total = accumulator(lhs.dtype, rhs.dtype)
    wide = multiplied(lhs.dtype, rhs.dtype, native=accumulator(lhs.dtype, rhs.dtype) == jnp.int32)

    def kernel(bound_ref, lhs_ref, rhs_ref, *rest):
        *scale_refs, out_ref = rest
        group = pl.program_id(2)
        low, high = bound_ref[group], bound_ref[group + 1]
        deep, cols = pl.program_id(0) * tk + jnp.arange(tk), pl.program_id(1) * tn + jnp.arange(tn)

        def add(step: Any, sums: Array) -> Array:
            rows = low + step * tm + jnp.arange(tm)
            mine = (rows < high)[:, None]
            x = _load(lhs_ref, (rows[:, None], deep[None, :]), mine & (deep < k)[None, :])
            y = _load(rhs_ref, (rows[:, None], cols[None, :]), mine & (cols < n)[None, :])
            return sums + block_dot(x, y, (0, 0), wide=wide, precision=precision)

        out = lax.fori_loop(0, (high - low + (tm - 1)) // tm, add, jnp.zeros((tk, tn), total))
        out = out.astype(jnp.float32) if scale_refs else out
        for ref, scale in zip(scale_refs, scales, strict=True):
            if scale.shape[1] > 1:
                out = out * _load(ref, (group, deep, 0), deep < k)[:, None]
            elif scale.shape[2] > 1:
                out = out * _load(ref, (group, 0, cols), cols < n)[None, :]
            else:
                out = out * ref[group, 0, 0]
        inside = (deep < k)[:, None] & (cols < n)[None, :]
        plgpu.store(out_ref.at[group, deep[:, None], cols[None, :]], out.astype(out_ref.dtype), mask=inside)

    return pl.pallas_call(
        kernel,
        out_shape=typed((groups, k, n), dtype, lhs, rhs, sizes, *scales),
        grid=(pl.cdiv(k, tk), pl.cdiv(n, tn), groups),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * k * n,
            bytes_accessed=lhs.nbytes + rhs.nbytes + groups * k * n * dtype.itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
        name="octavo_tgmm",
    )(bounds, lhs, rhs, *scales)


def _within(tile: int, depth: int) -> int:
    """The largest power of two up to a tile that divides the depth of one scale."""
    return min(tile, depth & -depth)


def _load(ref: Any, at: tuple[Any, ...], mask: Array) -> Array:
    return plgpu.load(ref.at[at], mask=mask, other=jnp.zeros((), ref.dtype))
