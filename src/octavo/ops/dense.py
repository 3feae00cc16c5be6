"""A dense product as a Pallas kernel: of two operands with codes, or of float rows that the kernel quantizes itself.

Only `lowering="pallas"` comes here. XLA multiplies int8 on TPUs by itself, and fuses the scales; what it cannot do is
keep the codes of an activation out of memory, and sum tiles with scales of their own without a product for each.
"""

import functools
import math
from typing import Any

import jax.numpy as jnp

from octavo._typing import Array
from octavo.calibration import AbsMax
from octavo.kernels import pallas
from octavo.ops import accelerated, factor
from octavo.ops.accelerated import Codes, Ways
from octavo.ops.config import DotConfig, Operand
from octavo.ops.dims import Dims
from octavo.ops.factor import Factor
from octavo.ops.lowering import is_explicit, is_transposed
from octavo.qarray import QArray


def product(lhs: Factor, rhs: Factor, dims: Dims, *, dtype: Any, precision: Any) -> Array:
    """The product of two operands of which one at least is a QArray; an error that says why where it cannot be."""
    lhs, rhs = factor.whole(lhs), factor.whole(rhs)
    if (why := _axes_refusal(lhs, rhs, dims)) is not None:
        accelerated.refuse("pallas", why)
    found = accelerated.codes_of(lhs, rhs)
    if found is None:
        accelerated.refuse("pallas", "the kernel multiplies codes without zero points, whose values are exact")
    assert found is not None
    left, right = found
    shape = [lhs.shape[a] for a in dims.lhs_remaining] + [rhs.shape[a] for a in dims.rhs_remaining]
    transposed = bool(is_transposed(dims))
    order = (dims.rhs_remaining, dims.rhs_contract) if transposed else (dims.rhs_contract, dims.rhs_remaining)
    a = _matrix(left, dims.lhs_remaining, dims.lhs_contract, dims.lhs_contract)
    b = _matrix(right, *order, dims.rhs_contract)
    if a is None or b is None:
        accelerated.refuse("pallas", "the scales of the kernel have tiles along one contracted axis at most")
    assert a is not None
    assert b is not None
    scale = None if b.scale is None else b.scale[None]
    accelerated.refuse("pallas", pallas.gmm_refusal(a.values, b.values[None], a.scale, scale, transposed=transposed))

    def kernel(which: Any, x: Array, w: Array, *scales: Array, **how: Any) -> Array:
        at = iter(scales)
        how["lhs_scale"] = None if a.scale is None else next(at)
        how["rhs_scale"] = None if scale is None else next(at)
        rows = jnp.asarray([x.shape[0]], jnp.int32)
        return which(x, w[None], rows, transposed=transposed, dtype=dtype, precision=precision, **how)

    ways = Ways(functools.partial(kernel, pallas.gmm), functools.partial(kernel, pallas.gpu_gmm))
    args = [x for x in (a.values, b.values, a.scale, scale) if x is not None]
    return accelerated.choose("pallas", ways, *args).reshape(shape)


def _axes_refusal(lhs: Factor, rhs: Factor, dims: Dims) -> str | None:
    if dims.lhs_batch:
        return "the kernel has no batch axes"
    if is_transposed(dims) is None:
        return "the kernel contracts the first axes of a matrix or its last ones, in order"
    if any(is_explicit(x.qvalue if isinstance(x, QArray) else x) for x in (lhs, rhs)):
        return "the kernel knows no explicit shardings: use jax.shard_map"
    return None


def _matrix(x: Codes, first: tuple[int, ...], last: tuple[int, ...], contract: tuple[int, ...]) -> Codes | None:
    """An operand as a matrix, and its scale as one of as few columns and rows as can be; None if tiles forbid it."""
    shape, order = x.values.shape, (*first, *last)
    fold = lambda y: jnp.transpose(y, order).reshape(*(math.prod(y.shape[a] for a in axes) for axes in (first, last)))  # noqa: E731
    scale = x.scale
    if scale is not None:
        if len(contract) > 1 and any(scale.shape[a] > 1 for a in contract):
            return None
        kept = [a for a in order if a not in contract]
        if any(scale.shape[a] > 1 for a in kept):
            for a in kept:
                scale = jnp.repeat(scale, shape[a] // scale.shape[a], axis=a)
        scale = fold(scale)
    return Codes(fold(x.values), scale)


def is_fused(config: DotConfig, lhs: Any, dims: Dims, out_sharding: Any) -> bool:
    """Whether a config asks for a forward product whose left operand the kernel quantizes."""
    fwd = config.fwd
    if config.lowering != "pallas" or fwd.lhs is None or isinstance(lhs, QArray) or out_sharding is not None:
        return False
    plain = fwd.rotate is None and config.smooth is None and fwd.accumulator in (None, "float32")
    last = dims.lhs_contract == (dims.lhs_ndim - 1,) and not dims.lhs_batch and dims.rhs_ndim == 2
    there = fwd.rhs is None or fwd.rhs.dequant == "output"
    return plain and last and there and _by_rows(fwd.lhs) and not is_explicit(lhs)


def fused(operand: Operand, lhs: Array, rhs: Factor, dims: Dims, *, dtype: Any, precision: Any) -> Array | None:
    """The product of rows that the kernel quantizes with a quantized matrix; None where the matrix does not fit it.

    For a product that is not differentiated: nothing of what is quantized here is kept.
    """
    if not isinstance(rhs, QArray):
        return None
    rhs = factor.whole(rhs)
    assert isinstance(rhs, QArray)
    transposed = dims.rhs_contract == (1,)
    integers = factor.is_integer(rhs)
    if rhs.zero_point is not None or not (integers or rhs.qvalue.dtype in pallas.FLOAT8):
        return None
    if integers != (operand.qtype.storage == jnp.int8):
        return None
    right = accelerated.codes_of(rhs, rhs)
    assert right is not None
    w, scale = right[0].values, right[0].scale
    assert scale is not None
    scale = scale.T if transposed else scale
    x = lhs.reshape(-1, lhs.shape[-1])
    if pallas.matmul_refusal(x, w, scale, transposed=transposed) is not None:
        return None

    def tpu(x: Array, w: Array, scale: Array, *, interpret: bool) -> Array:
        how = {"dtype": dtype, "precision": precision, "transposed": transposed, "interpret": interpret}
        return pallas.quantized_matmul(x, w, quantize=_quantize(operand), rhs_scale=scale, **how)

    def cuda(x: Array, w: Array, scale: Array) -> Array:
        codes, rows = _quantize(operand)(x)
        sizes = jnp.asarray([x.shape[0]], jnp.int32)
        how = {"dtype": dtype, "precision": precision, "transposed": transposed}
        scale = scale.T[None] if transposed else scale[None]
        return pallas.gpu_gmm(codes, w[None], sizes, lhs_scale=rows, rhs_scale=scale, **how)

    out = accelerated.choose("pallas", Ways(tpu, cuda), x, w, scale)
    return out.reshape(*lhs.shape[:-1], out.shape[-1])


def _by_rows(operand: Operand) -> bool:
    """Whether each row's codes and scale depend on that row alone."""
    own = operand.tile is None and operand.tracker is None and not operand.per_tensor and operand.dequant == "output"
    simple = isinstance(operand.calibration, AbsMax) and not operand.rounding.stochastic
    codes = operand.qtype.storage in (jnp.int8, *pallas.FLOAT8) and operand.qtype.signed and operand.qtype.has_zero
    return own and simple and codes and operand.arithmetic == "float32"


@functools.cache
def _quantize(operand: Operand) -> Any:
    """The quantization of rows; one function for equal operands, so that jit's caches know it again."""
    how = operand.quantizer(2, contracting=(1,))

    def rows(x: Array) -> tuple[Array, Array]:
        q = how.quantize(x)
        scale = factor.scale(q, codes=factor.is_integer(q))
        assert scale is not None
        return q.qvalue, scale

    return rows
