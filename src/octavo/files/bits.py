"""Codes of fewer than eight bits as a little-endian bit stream along the last axis, in NumPy.

`octavo.numerics.packing` packs in the same order on the device, into bytes and under jit. This module is for files:
on the host, for words of any width, and without a compilation for each shape.
"""

import numpy as np


def unpack(stream: np.ndarray, bits: int, size: int) -> np.ndarray:
    """Unpack the first `size` codes of a stream of integers, unsigned, to a byte each.

    >>> unpack(np.asarray([[0x76543210]], np.int32), 4, 8).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    data = np.ascontiguousarray(stream).view(np.uint8)
    if bits == 8:
        return data[..., :size]
    if 8 % bits == 0:
        fields = np.empty((*data.shape, 8 // bits), np.uint8)
        for i in range(8 // bits):
            np.bitwise_and(data >> np.uint8(i * bits), np.uint8(2**bits - 1), out=fields[..., i])
    else:
        count = 8 * data.shape[-1] // bits
        single = np.unpackbits(data, axis=-1, count=count * bits, bitorder="little")
        fields = np.packbits(single.reshape(*data.shape[:-1], count, bits), axis=-1, bitorder="little")
    return fields.reshape(*data.shape[:-1], fields.size // max(1, _rows(data)))[..., :size]


def pack(fields: np.ndarray, bits: int, dtype: object = np.uint8) -> np.ndarray:
    """Pack unsigned codes below `2**bits` into a stream of integers of `dtype`, padded with zeros.

    >>> [hex(x) for x in pack(np.arange(8, dtype=np.uint8), 4, np.int32)]
    ['0x76543210']
    """
    width = 8 * np.dtype(dtype).itemsize  # pyrefly: ignore
    size = -(-fields.shape[-1] * bits // width) * width // 8
    if 8 % bits == 0:
        per = 8 // bits
        fields = _padded(fields, size * per)
        data = np.zeros((*fields.shape[:-1], size), np.uint8)
        for i in range(per):
            data |= fields[..., i::per] << np.uint8(i * bits)
    else:
        single = np.unpackbits(fields[..., None], axis=-1, count=bits, bitorder="little")
        single = single.reshape(*fields.shape[:-1], fields.shape[-1] * bits)
        data = np.packbits(_padded(single, 8 * size), axis=-1, bitorder="little")
    return np.ascontiguousarray(data).view(np.dtype(dtype))  # pyrefly: ignore


def _rows(data: np.ndarray) -> int:
    return int(np.prod(data.shape[:-1], dtype=np.int64))


def _padded(fields: np.ndarray, size: int) -> np.ndarray:
    missing = size - fields.shape[-1]
    return np.pad(fields, [(0, 0)] * (fields.ndim - 1) + [(0, missing)]) if missing else fields
