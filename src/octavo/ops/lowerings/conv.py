"""The convolution of two operands, each an array or a QArray, with nothing left to differentiate.

A scale per example of the input, per output feature of the kernel, or for all of either, is constant along the sums of
a convolution: the codes are convolved in their own precision and the scales come in on the output. Operands with other
scales are dequantized first. Zero points of integers become correction terms: with l = ql - zl and r = qr - zr,

    l * r = ql * qr - zl (1 * qr) - zr (ql * 1) + zl zr (1 * 1),

where the ones have the shape of what they stand for, so that the padding counts for nothing, and one example or one
output feature is enough of them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from octavo._typing import Array
from octavo.ops import codes
from octavo.ops.codes import ArrayOrQArray
from octavo.ops.products.conv_dims import ConvDims
from octavo.qarray import QArray


def convolve(
    lhs: ArrayOrQArray,
    rhs: ArrayOrQArray,
    dims: ConvDims,
    *,
    dtype: Any,
    precision: Any = None,
    out_sharding: Any = None,
    accumulator: str | None = None,
) -> Array:
    """The convolution in `dtype`."""
    float_conv = functools.partial(
        _float_conv, dims=dims, precision=precision, out_sharding=out_sharding, accumulator=accumulator
    )
    lhs, rhs = codes.unpack(lhs), codes.unpack(rhs)
    kind = codes.accumulation_kind(lhs, rhs)
    if kind is None or not _is_outer(lhs, dims.lhs[0]) or not _is_outer(rhs, dims.rhs[0]):
        return float_conv(*codes.dequantize(lhs, rhs)).astype(dtype)
    if kind == "int":
        assert isinstance(lhs, QArray)
        assert isinstance(rhs, QArray)
        left, right = codes.integers(lhs), codes.integers(rhs)
        out = dims(left, right, dtype=jnp.int32, out_sharding=out_sharding)
        # With shardings in types, each of these sums must be told its own; they are small enough to be everywhere.
        conv = functools.partial(dims, dtype=jnp.int32, out_sharding=None if out_sharding is None else PartitionSpec())
        out = _correct(out, left, right, lhs, rhs, dims, conv).astype(jnp.float32)
    else:
        if kind == "native" and lhs.qvalue.dtype != rhs.qvalue.dtype:  # pyrefly: ignore
            kind = jnp.bfloat16  # lax convolves one dtype; e4m3 and e5m2 are both exact in this one
        out = float_conv(codes.values(lhs, kind), codes.values(rhs, kind))
        out = out.astype(codes.wider(out.dtype, jnp.dtype(jnp.float32)))
    scales = [codes.scale(x, codes=kind == "int") for x in (lhs, rhs)]
    if scales[0] is not None:
        out = out * per_example(scales[0], dims, out.shape).astype(out.dtype)
    if scales[1] is not None:
        out = out * per_feature(scales[1], dims, out.shape).astype(out.dtype)
    return out.astype(dtype)


def per_example(part: Array, dims: ConvDims, out_shape: tuple[int, ...]) -> Array:
    """Values that belong to the examples of the input, one each or one for all, as they stand beside the output."""
    if part.size == 1:
        return part.reshape((1,) * part.ndim)
    features = out_shape[dims.out[1]]
    examples = out_shape[dims.out[0]] * dims.batch_groups
    part = _spread(part, examples)
    # Each group of examples makes its own group of output features.
    part = part.reshape(dims.batch_groups, -1).T
    if dims.batch_groups > 1:
        part = jnp.repeat(part, features // dims.batch_groups, axis=1)
    return _place(part, dims)


def per_feature(part: Array, dims: ConvDims, out_shape: tuple[int, ...]) -> Array:
    """Values that belong to the output features of the kernel, one each or one for all, beside the output."""
    if part.size == 1:
        return part.reshape((1,) * part.ndim)
    return _place(_spread(part, out_shape[dims.out[1]])[None], dims)


def _spread(part: Array, size: int) -> Array:
    return part.reshape(-1) if part.size == size else jnp.repeat(part.reshape(-1), size // part.size)


def _place(part: Array, dims: ConvDims) -> Array:
    """A matrix of examples and features, in the output's order of axes."""
    if dims.out[0] > dims.out[1]:
        part = part.T
    return jax.lax.broadcast_in_dim(
        part,
        [part.shape[sorted(dims.out[:2]).index(a)] if a in dims.out[:2] else 1 for a in range(len(dims.out))],
        sorted(dims.out[:2]),
    )


def _is_outer(x: ArrayOrQArray, axis: int) -> bool:
    """Whether scales and zero points run along this axis at most."""
    if not isinstance(x, QArray):
        return True
    parts = [part for part in (x.scale, x.zero_point, x.outer_scale) if part is not None]
    return all(size == 1 for part in parts for a, size in enumerate(part.shape) if a != axis)


def _correct(
    out: Array, left: Array, right: Array, lhs: ArrayOrQArray, rhs: ArrayOrQArray, dims: ConvDims, conv
) -> Array:
    """An integer convolution of codes, with the terms that their zero points make."""
    zl, zr = codes.zero_point(lhs), codes.zero_point(rhs)
    if zl is None and zr is None:
        return out
    one_each = _ones(left, dims.lhs[0], dims.batch_groups)
    one_out = _ones(right, dims.rhs[0], dims.groups)
    zl = None if zl is None else per_example(zl, dims, out.shape)
    zr = None if zr is None else per_feature(zr, dims, out.shape)
    spread = functools.partial(jnp.repeat, repeats=out.shape[dims.out[1]] // dims.groups, axis=dims.out[1])
    if zl is not None:
        out = out - zl * conv(one_each, right)
    if zr is not None:
        out = out - zr * spread(conv(left, one_out))
    if zl is not None and zr is not None:
        out = out + zl * zr * spread(conv(one_each, one_out))
    return out


def _ones(like: Array, axis: int, size: int) -> Array:
    return jnp.ones([size if a == axis else n for a, n in enumerate(like.shape)], jnp.int8)


def _float_conv(
    lhs: Array, rhs: Array, *, dims: ConvDims, precision: Any, out_sharding: Any, accumulator: str | None
) -> Array:
    """A convolution of floats of one dtype, widened first on CPUs, which would emulate the rest."""
    wide = codes.wider(lhs.dtype, jnp.dtype(jnp.float32))
    dtype = wide if accumulator is None else jnp.dtype(accumulator)
    conv = functools.partial(dims, dtype=dtype, precision=precision, out_sharding=out_sharding)
    if lhs.dtype == wide:
        return dims(lhs, rhs, precision=precision, out_sharding=out_sharding).astype(dtype)

    def widened(lhs: Array, rhs: Array) -> Array:
        return dims(lhs.astype(wide), rhs.astype(wide), precision=precision, out_sharding=out_sharding).astype(dtype)

    return jax.lax.platform_dependent(lhs, rhs, cpu=widened, default=conv)
