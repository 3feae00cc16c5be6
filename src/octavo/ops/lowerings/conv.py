"""The convolution of two operands, each an array or a QArray, without derivatives.

A scale per example of the input, per output feature of the kernel, or per tensor is constant along the sums of a
convolution: codes are convolved in their own precision and the output is scaled. Operands with other scales are
dequantized first. Zero points of integers become correction terms: with l = ql - zl and r = qr - zr,

    l * r = ql * qr - zl (1 * qr) - zr (ql * 1) + zl zr (1 * 1),

where the ones have the spatial shape of the operand they replace, so that padding does not count; one example or one
output feature (per group) of them is enough.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from octavo._typing import Array
from octavo.ops.operands import ArrayOrQArray, Codes, MatmulOptions, accumulation_kind, dequantize, unpack, wider
from octavo.ops.products.conv_dims import ConvDims


def convolve(lhs: ArrayOrQArray, rhs: ArrayOrQArray, dims: ConvDims, options: MatmulOptions) -> Array:
    """The convolution in `options.dtype`; `options.lowering` applies to dots only."""
    lhs, rhs = unpack(lhs), unpack(rhs)
    left, right = Codes(lhs), Codes(rhs)
    kind = accumulation_kind(left, right)
    sides = (left, dims.lhs[0]), (right, dims.rhs[0])
    outer = all(side.is_constant_along(a) for side, axis in sides for a in range(lhs.ndim) if a != axis)
    if kind is None or not outer:
        return _float_conv(*dequantize(lhs, rhs), dims, options).astype(options.dtype)
    if kind == "int":
        sharding = options.out_sharding
        out = dims(left.integers(), right.integers(), dtype=jnp.int32, out_sharding=sharding)
        # With explicit shardings each of these convolutions needs an out_sharding; they are small, so replicated.
        conv = functools.partial(dims, dtype=jnp.int32, out_sharding=None if sharding is None else PartitionSpec())
        out = _correct(out, left, right, dims, conv).astype(jnp.float32)
    else:
        if kind == "native" and lhs.qvalue.dtype != rhs.qvalue.dtype:  # pyrefly: ignore
            kind = jnp.bfloat16  # lax convolves operands of one dtype; e4m3 and e5m2 are both exact in bfloat16
        out = _float_conv(left.values(kind), right.values(kind), dims, options)
        out = out.astype(wider(out.dtype, jnp.dtype(jnp.float32)))
    if (scale := left.scale(is_codes=kind == "int")) is not None:
        out = out * per_example(scale, dims, out.shape).astype(out.dtype)
    if (scale := right.scale(is_codes=kind == "int")) is not None:
        out = out * per_feature(scale, dims, out.shape).astype(out.dtype)
    return out.astype(options.dtype)


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


def _correct(out: Array, left: Codes, right: Codes, dims: ConvDims, conv: Callable[[Array, Array], Array]) -> Array:
    """Add the correction terms of zero points to an integer convolution of codes."""
    zl, zr = left.zero_point(), right.zero_point()
    one_each = _ones(left.x, dims.lhs[0], dims.batch_groups)
    one_out = _ones(right.x, dims.rhs[0], dims.groups)
    zl = None if zl is None else per_example(zl, dims, out.shape)
    zr = None if zr is None else per_feature(zr, dims, out.shape)
    spread = functools.partial(jnp.repeat, repeats=out.shape[dims.out[1]] // dims.groups, axis=dims.out[1])
    if zl is not None:
        out = out - zl * conv(one_each, right.integers())
    if zr is not None:
        out = out - zr * spread(conv(left.integers(), one_out))
    if zl is not None and zr is not None:
        out = out + zl * zr * spread(conv(one_each, one_out))
    return out


def _ones(like: ArrayOrQArray, axis: int, size: int) -> Array:
    return jnp.ones([size if a == axis else n for a, n in enumerate(like.shape)], jnp.int8)


def _float_conv(lhs: Array, rhs: Array, dims: ConvDims, options: MatmulOptions) -> Array:
    """A convolution of floats of one dtype, widened first on CPUs, which emulate narrower floats."""
    wide = wider(lhs.dtype, jnp.dtype(jnp.float32))
    dtype = wide if options.accumulator is None else jnp.dtype(options.accumulator)
    conv = functools.partial(dims, precision=options.precision, out_sharding=options.out_sharding)
    if lhs.dtype == wide:
        return conv(lhs, rhs).astype(dtype)

    def widened(lhs: Array, rhs: Array) -> Array:
        return conv(lhs.astype(wide), rhs.astype(wide)).astype(dtype)

    return jax.lax.platform_dependent(lhs, rhs, cpu=widened, default=functools.partial(conv, dtype=dtype))
