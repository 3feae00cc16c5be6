"""Sums over devices in low precision, inside `jax.shard_map`.

A sum over n devices is a reduce-scatter and an all-gather. Here every device sends each other one its part of the
array in low precision (all-to-all), adds up what it gets in float32, and sends the sum of its part to all, in low
precision again: a quarter of the bytes in eight bits. What rounding loses is known where it is lost, and with error
feedback it is added to what is sent the next time, so that it is late and not gone.
"""

import math
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
    part, lost = quantized_psum_scatter(x, axis_name, qtype, error=error, block=block)
    codes = _quantized(part, qtype)
    # The sum of a part is rounded by one device, which remembers what that lost along with its own.
    mine = jax.lax.axis_index(axis_name)
    parts = lost.at[mine].add(part - codes.dequantize(jnp.float32))
    whole = _sent(codes, lambda y: jax.lax.all_gather(y, axis_name)).dequantize(jnp.float32)
    return _unfolded(whole, x), _unfolded(parts, x)


def quantized_psum_scatter(
    x: Array,
    axis_name: Any,
    qtype: FormatLike = "int8",
    *,
    error: Array | None = None,
    block: int = BLOCK,
) -> tuple[Array, Array]:
    """This device's part of the sum of `x` over an axis, in blocks [blocks, block] of the flattened and padded array,
    and what rounding lost on this device, in blocks of all parts [devices, blocks, block]."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"a sum in low precision is one of floats, got {x.dtype}: use jax.lax.psum")
    wide = x.astype(jnp.float32) if error is None else x.astype(jnp.float32) + error.astype(jnp.float32)
    parts = _folded(wide, jax.lax.axis_size(axis_name), block)
    codes = _quantized(parts, qtype)
    lost = parts - codes.dequantize(jnp.float32)
    got = _sent(codes, lambda y: jax.lax.all_to_all(y, axis_name, 0, 0))
    return jnp.sum(got.dequantize(jnp.float32), axis=0), lost


def _quantized(blocks: Array, qtype: FormatLike) -> QArray:
    """Blocks [..., block] with a scale each."""
    return Quantizer(qtype, channelwise_axes=tuple(range(blocks.ndim - 1))).quantize(blocks)


def _folded(x: Array, parts: int, block: int) -> Array:
    """An array as [parts, blocks, block], padded with zeros."""
    blocks = math.ceil(x.size / (parts * block))
    flat = jnp.pad(x.reshape(-1), (0, parts * blocks * block - x.size))
    return flat.reshape(parts, blocks, block)


def _unfolded(blocks: Array, like: Array) -> Array:
    return blocks.reshape(-1)[: like.size].reshape(like.shape)


def _sent(codes: QArray, send: Callable[[Array], Array]) -> QArray:
    """Codes and scales as they arrive."""
    return codes._map(lambda x: sent_as_it_is(x, send))
