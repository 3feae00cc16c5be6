"""The convolution of two operands, each an array or a QArray, without derivatives.

A scale per example of the input, per output feature of the kernel, or per tensor is constant along the sums of a
convolution: codes are convolved in their own precision and the output is scaled. Operands with other scales are
dequantized first. Zero points of integers become correction terms: with l = ql - zl and r = qr - zr,

    l * r = ql * qr - zl (1 * qr) - zr (ql * 1) + zl zr (1 * 1),

where the ones have the spatial shape of the operand they replace, so that padding does not count; one example or one
output feature (per group) of them is enough.
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
        # With explicit shardings each of these convolutions needs an out_sharding; they are small, so replicated.
        conv = functools.partial(dims, dtype=jnp.int32, out_sharding=None if out_sharding is None else PartitionSpec())
        out = _correct(out, left, right, lhs, rhs, dims, conv).astype(jnp.float32)
    else:
        if kind == "native" and lhs.qvalue.dtype != rhs.qvalue.dtype:  # pyrefly: ignore
            kind = jnp.bfloat16  # lax convolves operands of one dtype; e4m3 and e5m2 are both exact in bfloat16
        out = float_conv(codes.values(lhs, kind), codes.values(rhs, kind))
        out = out.astype(codes.wider(out.dtype, jnp.dtype(jnp.float32)))
    scales = [codes.scale(x, codes=kind == "int") for x in (lhs, rhs)]
    if scales[0] is not None:
        out = out * per_example(scales[0], dims, out.shape).astype(out.dtype)
    if scales[1] is not None:
        out = out * per_feature(scales[1], dims, out.shape).astype(out.dtype)
    return out.astype(dtype)


def per_example(part: Array, dims: ConvDims, out_shape: tuple[int, ...]) -> Array:
    """Values per example of the input (or one for all), broadcastable against the output."""
    if part.size == 1:
        return part.reshape((1,) * part.ndim)
    features = out_shape[dims.out[1]]
    examples = out_shape[dims.out[0]] * dims.batch_groups
    part = _spread(part, examples)
    # Each batch group gives its own group of output features.
    part = part.reshape(dims.batch_groups, -1).T
    if dims.batch_groups > 1:
        part = jnp.repeat(part, features // dims.batch_groups, axis=1)
    return _place(part, dims)


def per_feature(part: Array, dims: ConvDims, out_shape: tuple[int, ...]) -> Array:
    """Values per output feature of the kernel (or one for all), broadcastable against the output."""
    if part.size == 1:
        return part.reshape((1,) * part.ndim)
    return _place(_spread(part, out_shape[dims.out[1]])[None], dims)


def _spread(part: Array, size: int) -> Array:
    return part.reshape(-1) if part.size == size else jnp.repeat(part.reshape(-1), size // part.size)


def _place(part: Array, dims: ConvDims) -> Array:
    """A matrix [examples, features] transposed and expanded to the output's axes."""
    if dims.out[0] > dims.out[1]:
        part = part.T
    return jax.lax.broadcast_in_dim(
        part,
        [part.shape[sorted(dims.out[:2]).index(a)] if a in dims.out[:2] else 1 for a in range(len(dims.out))],
        sorted(dims.out[:2]),
    )


def _is_outer(x: ArrayOrQArray, axis: int) -> bool:
    """Whether scales and zero points vary along this axis only."""
    if not isinstance(x, QArray):
        return True
    parts = [part for part in (x.scale, x.zero_point, x.outer_scale) if part is not None]
    return all(size == 1 for part in parts for a, size in enumerate(part.shape) if a != axis)


def _correct(
    out: Array, left: Array, right: Array, lhs: ArrayOrQArray, rhs: ArrayOrQArray, dims: ConvDims, conv
) -> Array:
    """Add the correction terms of zero points to an integer convolution of codes."""
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
    """A convolution of floats of one dtype, widened first on CPUs, which emulate narrower floats."""
    wide = codes.wider(lhs.dtype, jnp.dtype(jnp.float32))
    dtype = wide if accumulator is None else jnp.dtype(accumulator)
    conv = functools.partial(dims, dtype=dtype, precision=precision, out_sharding=out_sharding)
    if lhs.dtype == wide:
        return dims(lhs, rhs, precision=precision, out_sharding=out_sharding).astype(dtype)

    def widened(lhs: Array, rhs: Array) -> Array:
        return dims(lhs.astype(wide), rhs.astype(wide), precision=precision, out_sharding=out_sharding).astype(dtype)

    return jax.lax.platform_dependent(lhs, rhs, cpu=widened, default=conv)
