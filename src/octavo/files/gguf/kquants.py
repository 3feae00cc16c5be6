"""K-quants: blocks of 256 values in groups of 16 or 32, whose scales are quantized to small integers."""

import numpy as np

from octavo.files.gguf.blocks import SUPER, Blocks, Codes, bits, f32, signed


def _times(d: np.ndarray, small: np.ndarray) -> np.ndarray:
    """The scale of each group, its block's scale times a small integer: [blocks, groups, 1]."""
    with np.errstate(all="ignore"):
        return (f32(d) * small.astype(np.float32))[:, :, None]


def q2_k(blocks: Blocks) -> Codes:
    scales = blocks["scales"]
    codes = bits(blocks["qs"].reshape(-1, 2, 32), (0, 2, 4, 6), 2).reshape(-1, 16, 16)
    return Codes(codes, _times(blocks["d"], scales & np.uint8(15)), -_times(blocks["dmin"], scales >> np.uint8(4)))


def q3_k(blocks: Blocks) -> Codes:
    packed = blocks["scales"]
    low = bits(packed[:, None, :8], (0, 4), 4).reshape(-1, 16)
    high = bits(packed[:, None, 8:], (0, 2, 4, 6), 2).reshape(-1, 16)
    scales = signed(low | (high << np.uint8(4)), 32)
    two = bits(blocks["qs"].reshape(-1, 2, 32), (0, 2, 4, 6), 2).reshape(-1, 8, 32)
    third = bits(blocks["hmask"][:, None, :], range(8), 1).reshape(-1, 8, 32)
    codes = signed(two | (third << np.uint8(2)), 4)
    return Codes(codes.reshape(-1, 16, 16), _times(blocks["d"], scales))


def _scales_and_minima(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight minima of six bits in twelve bytes.

    The first four of each are in the low bits of bytes 0-3 and 4-7; of the last four the low nibbles are in bytes 8-11
    and the upper two bits above the first ones.
    """
    first, second, last = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    six, top, four = np.uint8(63), np.uint8(6), np.uint8(4)
    scales = [first & six, (last & np.uint8(15)) | ((first >> top) << four)]
    minima = [second & six, (last >> four) | ((second >> top) << four)]
    return np.concatenate(scales, axis=-1), np.concatenate(minima, axis=-1)


def q4_k(blocks: Blocks) -> Codes:
    scales, minima = _scales_and_minima(blocks["scales"])
    codes = bits(blocks["qs"].reshape(-1, 4, 32), (0, 4), 4).reshape(-1, 8, 32)
    return Codes(codes, _times(blocks["d"], scales), -_times(blocks["dmin"], minima))


def q5_k(blocks: Blocks) -> Codes:
    four = q4_k(blocks)
    fifth = bits(blocks["qh"][:, None, :], range(8), 1).reshape(-1, 8, 32)
    return Codes(four.codes | (fifth << np.uint8(4)), four.scale, four.minimum)


def q6_k(blocks: Blocks) -> Codes:
    four = bits(blocks["ql"].reshape(-1, 2, 64), (0, 4), 4).reshape(-1, SUPER)
    two = bits(blocks["qh"].reshape(-1, 2, 32), (0, 2, 4, 6), 2).reshape(-1, SUPER)
    codes = signed(four | (two << np.uint8(4)), 32)
    return Codes(codes.reshape(-1, 16, 16), _times(blocks["d"], blocks["scales"]))
