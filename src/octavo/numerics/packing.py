"""Packing of codes of fewer than eight bits into bytes.

Codes form a little-endian bit stream: the first is in the lowest bits of the first byte. Two 4-bit codes, four 2-bit
codes or eight 1-bit codes fill a byte; 3, 5, 6 and 7-bit codes fill as many bytes per eight codes as they have bits.
"""

import math

import jax.numpy as jnp

from octavo._typing import Array, UInt8


def pack_bits(codes: UInt8[Array, "..."], bits: int, *, axis: int = -1) -> UInt8[Array, "..."]:
    """Unsigned codes below `2**bits` packed along an axis; the last byte is filled with zeros.

    >>> pack_bits(jnp.asarray([1, 2, 3], jnp.uint8), 4)
    Array([33,  3], dtype=uint8)
    """
    codes = jnp.moveaxis(codes, axis, -1)
    group = 8 // math.gcd(8, bits)
    codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % group)])
    codes = codes.reshape(*codes.shape[:-1], codes.shape[-1] // group, group)
    columns = []
    for byte in range(group * bits // 8):
        column = jnp.zeros(codes.shape[:-1], jnp.uint8)
        for place in range(group):
            shift = place * bits - 8 * byte
            if -bits < shift < 8:
                code = codes[..., place]
                column |= code << jnp.uint8(shift) if shift >= 0 else code >> jnp.uint8(-shift)
        columns.append(column)
    packed = jnp.stack(columns, axis=-1)
    return jnp.moveaxis(_flatten_last(packed), -1, axis)


def unpack_bits(packed: UInt8[Array, "..."], bits: int, size: int, *, axis: int = -1) -> UInt8[Array, "..."]:
    """The `size` codes that `pack_bits` packed along an axis.

    >>> unpack_bits(jnp.asarray([33, 3], jnp.uint8), 4, 3)
    Array([1, 2, 3], dtype=uint8)
    """
    packed = jnp.moveaxis(packed, axis, -1)
    group = 8 // math.gcd(8, bits)
    width = group * bits // 8
    packed = packed.reshape(*packed.shape[:-1], packed.shape[-1] // width, width)
    mask = jnp.uint8(2**bits - 1)
    columns = []
    for place in range(group):
        first, shift = divmod(place * bits, 8)
        code = packed[..., first] >> jnp.uint8(shift)
        if shift + bits > 8:
            code |= packed[..., first + 1] << jnp.uint8(8 - shift)
        columns.append(code & mask)
    codes = _flatten_last(jnp.stack(columns, axis=-1))[..., :size]
    return jnp.moveaxis(codes, -1, axis)


def _flatten_last(x: UInt8[Array, "..."]) -> UInt8[Array, "..."]:
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
