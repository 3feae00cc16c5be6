"""Sums over devices in low precision, inside `jax.shard_map`.

A sum over n devices is a reduce-scatter and an all-gather. Here every device sends each other one its part of the
array in low precision (all-to-all), adds up what it gets in float32, and sends the sum of its part to all, in low
precision again: a quarter of the bytes in eight bits. What rounding loses is known where it is lost, and with error
feedback it is added to what is sent the next time, so that it is late and not gone.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from octavo._typing import Array
from octavo.numerics import FormatLike
from octavo.ops.gather import sent_as_it_is
from octavo.qarray import QArray, Quantizer

BLOCK = 256
"""Values that share a scale."""


def quantized_psum(
    x: Array,
    axis_name: Any,
    qtype: FormatLike = "int8",
    *,
    error: Array | None = None,
    block: int = BLOCK,
) -> tuple[Array, Array]:
    """The sum of `x` over an axis of devices, sent in low precision, and what rounding lost of it on this device.

    The second result has the shape of `x`; added to what is summed next (`error`), it is made up for.

    >>> import jax, numpy as np
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    >>> def total(x):
    ...     return quantized_psum(x, "data")[0]
    >>> jax.shard_map(total, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)(jnp.ones(8)).round(1)
    Array([2., 2., 2., 2.], dtype=float32)
    """
    ways = jax.lax.axis_size(axis_name)
    flat = _with_error(x, error).reshape(-1)
    parts = _padded(_padded(flat, ways).reshape(ways, -1), block)
    part, lost = _exchanged(parts, axis_name, qtype, block)
    codes = _quantized(part, qtype, block)
    # The sum of a part is rounded by one device, which remembers what that lost along with its own.
    mine = jax.lax.axis_index(axis_name)
    lost = lost.at[mine].add(part - codes.dequantize(jnp.float32))
    whole = _sent(codes, lambda y: jax.lax.all_gather(y, axis_name)).dequantize(jnp.float32)
    whole, lost = (y[:, : -(-x.size // ways)].reshape(-1)[: x.size].reshape(x.shape) for y in (whole, lost))
    return whole, lost


def quantized_psum_scatter(
    x: Array,
    axis_name: Any,
    qtype: FormatLike = "int8",
    *,
    scatter_dimension: int = 0,
    error: Array | None = None,
    block: int = BLOCK,
) -> tuple[Array, Array]:
    """This device's part, along one axis of the array, of the sum of `x` over an axis of devices; and what was lost.

    The parts are those of `jax.lax.psum_scatter(tiled=True)`.
    """
    wide, ways, axis = _with_error(x, error), jax.lax.axis_size(axis_name), scatter_dimension
    if x.shape[axis] % ways:
        raise ValueError(f"axis {axis} of an array {x.shape} has no {ways} equal parts: use quantized_psum")
    cut = wide.reshape(*x.shape[:axis], ways, x.shape[axis] // ways, *x.shape[axis + 1 :])
    parts = jnp.moveaxis(cut, axis, 0)
    shape, size = parts.shape, x.size // ways
    part, lost = _exchanged(_padded(parts.reshape(ways, -1), block), axis_name, qtype, block)
    lost = jnp.moveaxis(lost[:, :size].reshape(shape), 0, axis)
    return part[:size].reshape(shape[1:]), lost.reshape(x.shape)


def _with_error(x: Array, error: Array | None) -> Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"a sum in low precision is one of floats, got {x.dtype}: use jax.lax.psum")
    return x.astype(jnp.float32) if error is None else x.astype(jnp.float32) + error.astype(jnp.float32)


def _exchanged(parts: Array, axis_name: Any, qtype: FormatLike, block: int) -> tuple[Array, Array]:
    """Of the parts [devices, values] for each device: the sum of this one's, and what rounding lost of all."""
    codes = _quantized(parts, qtype, block)
    lost = parts - codes.dequantize(jnp.float32)
    got = _sent(codes, lambda y: jax.lax.all_to_all(y, axis_name, 0, 0))
    return jnp.sum(got.dequantize(jnp.float32), axis=0), lost


def _quantized(x: Array, qtype: FormatLike, block: int) -> QArray:
    """Codes with a scale for each block of the last axis."""
    *kept, last = range(x.ndim)
    return Quantizer(qtype, channelwise_axes=tuple(kept), tiled_axes={last: block}).quantize(x)


def _padded(x: Array, block: int) -> Array:
    """The last axis brought to a multiple, by zeros."""
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, -x.shape[-1] % block),))


def _sent(codes: QArray, send: Callable[[Array], Array]) -> QArray:
    """Codes and scales as they arrive."""
    return codes._map(lambda x: sent_as_it_is(x, send))
