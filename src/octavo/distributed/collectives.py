"""Collectives in low precision, inside `jax.shard_map`.

An all-reduce over n devices is a reduce-scatter followed by an all-gather. Here the reduce-scatter is an all-to-all of
codes, which each device sums in float32, and the all-gather is one of codes too: a quarter of float32's bytes with
eight bits. The rounding error is known on the device that rounds; error feedback adds it to the next sum.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from octavo._typing import Array
from octavo.numerics import FormatLike
from octavo.qarray import QArray, Quantizer

BLOCK = 256
"""The number of values that share a scale."""


def quantized_psum(
    x: Array,
    axis_name: Any,
    qtype: FormatLike = "int8",
    *,
    error: Array | None = None,
    block: int = BLOCK,
) -> tuple[Array, Array]:
    """`jax.lax.psum` in low precision.

    Args:
      x: the floats to sum.
      axis_name: the mesh axis, or axes, to sum over.
      qtype: the format of the transferred codes.
      error: this device's rounding error of the previous sum (error feedback).
      block: how many values share a scale.

    Returns:
      The sum, and this device's rounding error, in the shape of `x`.

    >>> import jax, numpy as np
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    >>> def total(x):
    ...     return quantized_psum(x, "data")[0]
    >>> jax.shard_map(total, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)(jnp.ones(8)).round(1)
    Array([2., 2., 2., 2.], dtype=float32)
    """
    devices = jax.lax.axis_size(axis_name)
    flat = _with_error(x, error).reshape(-1)
    shards = _pad(_pad(flat, devices).reshape(devices, -1), block)
    shard, error = _reduce_scatter(shards, axis_name, qtype, block)
    codes = _quantize(shard, qtype, block)
    # The sum of a shard is rounded on one device, which adds this to its rounding error.
    error = error.at[jax.lax.axis_index(axis_name)].add(shard - codes.dequantize(jnp.float32))
    total = _transfer(codes, lambda y: jax.lax.all_gather(y, axis_name)).dequantize(jnp.float32)
    total, error = (y[:, : -(-x.size // devices)].reshape(-1)[: x.size].reshape(x.shape) for y in (total, error))
    return total, error


def quantized_psum_scatter(
    x: Array,
    axis_name: Any,
    qtype: FormatLike = "int8",
    *,
    scatter_dimension: int = 0,
    error: Array | None = None,
    block: int = BLOCK,
) -> tuple[Array, Array]:
    """`jax.lax.psum_scatter(tiled=True)` in low precision.

    Args:
      x: the floats to sum.
      axis_name: the mesh axis, or axes, to sum over.
      qtype: the format of the transferred codes.
      scatter_dimension: the axis of `x` that is scattered; the number of devices divides its size.
      error: this device's rounding error of the previous sum (error feedback).
      block: how many values share a scale.

    Returns:
      This device's shard of the sum, and its rounding error, in the shape of `x`.
    """
    wide, devices, axis = _with_error(x, error), jax.lax.axis_size(axis_name), scatter_dimension
    if x.shape[axis] % devices:
        raise ValueError(f"axis {axis} of an array {x.shape} has no {devices} equal shards: use quantized_psum")
    split = wide.reshape(*x.shape[:axis], devices, x.shape[axis] // devices, *x.shape[axis + 1 :])
    shards = jnp.moveaxis(split, axis, 0)
    shape, size = shards.shape, x.size // devices
    shard, error = _reduce_scatter(_pad(shards.reshape(devices, -1), block), axis_name, qtype, block)
    error = jnp.moveaxis(error[:, :size].reshape(shape), 0, axis)
    return shard[:size].reshape(shape[1:]), error.reshape(x.shape)


def transfer(x: Any, collective: Callable[[Any], Any]) -> Any:
    """`collective(x)`, with float8 transferred as uint8 behind optimization barriers.

    Otherwise XLA, on a backend without float8, would transfer the wider floats that it computes with.
    """
    if not (jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1):
        return collective(x)
    bits = jnp.uint4 if jnp.finfo(x.dtype).bits == 4 else jnp.uint8
    codes = jax.lax.bitcast_convert_type(x, bits).astype(jnp.uint8)
    received = jax.lax.optimization_barrier(collective(jax.lax.optimization_barrier(codes)))
    return jax.lax.bitcast_convert_type(received.astype(bits), x.dtype)


def _with_error(x: Array, error: Array | None) -> Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"a sum in low precision takes floats, got {x.dtype}: use jax.lax.psum")
    return x.astype(jnp.float32) if error is None else x.astype(jnp.float32) + error.astype(jnp.float32)


def _reduce_scatter(shards: Array, axis_name: Any, qtype: FormatLike, block: int) -> tuple[Array, Array]:
    """Reduce-scatter [devices, values]: the sum of this device's shard, and the rounding error of all shards."""
    codes = _quantize(shards, qtype, block)
    error = shards - codes.dequantize(jnp.float32)
    received = _transfer(codes, lambda y: jax.lax.all_to_all(y, axis_name, 0, 0))
    return jnp.sum(received.dequantize(jnp.float32), axis=0), error


def _quantize(x: Array, qtype: FormatLike, block: int) -> QArray:
    """Codes with a scale for each block of the last axis."""
    *kept, last = range(x.ndim)
    return Quantizer(qtype, channelwise_axes=tuple(kept), tiled_axes={last: block}).quantize(x)


def _pad(x: Array, block: int) -> Array:
    """Pad the last axis with zeros to a multiple of `block`."""
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, -x.shape[-1] % block),))


def _transfer(codes: QArray, collective: Callable[[Array], Array]) -> QArray:
    """Apply a collective to codes and scales."""
    return codes._map(lambda x: transfer(x, collective))
