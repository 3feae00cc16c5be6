"""Codes and scales of ggml's blocks.

A block is a NumPy record. The layouts are those of ggml-common.h, and the order of roundings is that of
dequantize_row_* in ggml-quants.c, so that values are bit-equal.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

type Blocks = np.ndarray

SUPER = 256


@dataclasses.dataclass(frozen=True)
class Codes:
    """Blocks with values `scale * (table[code] or code) + minimum`, as arrays of shape [blocks, groups, values]."""

    codes: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray | None = None
    table: np.ndarray | None = None

    def values(self, out: np.ndarray) -> None:
        """Write the float32 values into `out`, which has as many elements as there are codes."""
        numbers = self.codes if self.table is None else self.table[self.codes]
        out = out.reshape(self.codes.shape)
        with np.errstate(all="ignore"):  # a scale may be inf or NaN
            np.multiply(numbers, self.scale, out=out, dtype=np.float32)
            if self.minimum is not None:
                np.add(out, self.minimum, out=out)


type Splitter = Callable[[Blocks], Codes]


def record(*fields: tuple[str, str, int]) -> np.dtype:
    """The dtype of a block: (name, dtype, count) in the order of the bytes."""
    return np.dtype([(name, kind, (count,)) for name, kind, count in fields])


def f32(halves: np.ndarray) -> np.ndarray:
    return halves.astype(np.float32)


def bits(packed: np.ndarray, shifts: Sequence[int], width: int) -> np.ndarray:
    """Bit fields of `width` bits of bytes [blocks, chunks, n] at each of the shifts: [blocks, chunks, shifts, n]."""
    amounts = np.asarray(shifts, np.uint8)[:, None]
    return (packed[:, :, None, :] >> amounts) & np.uint8((1 << width) - 1)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """Bytes [blocks, n] as codes [blocks, 1, 2n]: all low nibbles, then all high nibbles."""
    return bits(packed[:, None, :], (0, 4), 4).reshape(len(packed), 1, -1)


def signed(codes: np.ndarray, zero: int) -> np.ndarray:
    return codes.astype(np.int8) - np.int8(zero)


def _scale(blocks: Blocks) -> np.ndarray:
    return f32(blocks["d"])[:, :, None]


def _minimum(blocks: Blocks) -> np.ndarray:
    return f32(blocks["m"])[:, :, None]


def _fifth(blocks: Blocks) -> np.ndarray:
    """The codes of Q5_0 and Q5_1: four bits in nibbles, the fifth in a word of 32."""
    high = np.unpackbits(blocks["qh"], axis=-1, bitorder="little")[:, None, :]
    return nibbles(blocks["qs"]) | (high << np.uint8(4))


def q4_0(blocks: Blocks) -> Codes:
    return Codes(signed(nibbles(blocks["qs"]), 8), _scale(blocks))


def q4_1(blocks: Blocks) -> Codes:
    return Codes(nibbles(blocks["qs"]), _scale(blocks), _minimum(blocks))


def q5_0(blocks: Blocks) -> Codes:
    return Codes(signed(_fifth(blocks), 16), _scale(blocks))


def q5_1(blocks: Blocks) -> Codes:
    return Codes(_fifth(blocks), _scale(blocks), _minimum(blocks))


def q8_0(blocks: Blocks) -> Codes:
    return Codes(blocks["qs"][:, None, :], _scale(blocks))


# IQ4: a table of 16 values that are denser around zero.
IQ4_TABLE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def iq4_nl(blocks: Blocks) -> Codes:
    return Codes(nibbles(blocks["qs"]), _scale(blocks), table=IQ4_TABLE)


def iq4_xs(blocks: Blocks) -> Codes:
    low = bits(blocks["scales_l"][:, :, None], (0, 4), 4).reshape(-1, 8)
    high = (blocks["scales_h"] >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & np.uint8(3)
    scales = signed(low | (high << np.uint8(4)), 32).astype(np.float32)
    codes = bits(blocks["qs"].reshape(-1, 8, 16), (0, 4), 4).reshape(-1, 8, 32)
    return Codes(codes, (f32(blocks["d"]) * scales)[:, :, None], table=IQ4_TABLE)


# e2m1 values times two, so that all are integers; the scales below are halved accordingly.
FP4_TABLE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def mxfp4(blocks: Blocks) -> Codes:
    # 2**(e - 128) from bits; the two smallest exponents are subnormal numbers.
    exponent = blocks["e"].astype(np.uint32)
    word = np.where(exponent < 2, np.uint32(0x200000) << exponent, (np.maximum(exponent, 1) - 1) << np.uint32(23))
    return Codes(nibbles(blocks["qs"]), word.astype(np.uint32).view(np.float32)[:, :, None], table=FP4_TABLE)


def nvfp4(blocks: Blocks) -> Codes:
    byte = blocks["d"] & np.uint8(0x7F)
    exponent, mantissa = (byte >> 3).astype(np.int32), (byte & np.uint8(7)).astype(np.int32)
    significand = np.where(exponent == 0, mantissa, mantissa + 8).astype(np.float32)
    scale = np.ldexp(significand, np.maximum(exponent, 1) - 11)  # 7 of bias, 3 of mantissa, 1 for the table
    scale = np.where(byte == 0x7F, np.float32(0), scale)
    codes = bits(blocks["qs"].reshape(-1, 4, 8), (0, 4), 4).reshape(-1, 4, 16)
    return Codes(codes, scale[:, :, None], table=FP4_TABLE)


# Ternary.


def tq2_0(blocks: Blocks) -> Codes:
    codes = bits(blocks["qs"].reshape(-1, 2, 32), (0, 2, 4, 6), 2).reshape(-1, 1, SUPER)
    return Codes(signed(codes, 1), _scale(blocks))


def tq1_0(blocks: Blocks) -> Codes:
    """Five ternary digits to a byte as a fraction of 256: multiply by a power of three, and the top digit is next."""

    def digits(packed: np.ndarray, count: int) -> np.ndarray:
        powers = (3 ** np.arange(count)).astype(np.uint8)[:, None]
        shifted = (packed[:, None, :] * powers).astype(np.uint16)  # modulo 256
        return ((shifted * np.uint16(3)) >> np.uint16(8)).reshape(len(packed), -1)

    qs = blocks["qs"]
    codes = np.concatenate([digits(qs[:, :32], 5), digits(qs[:, 32:], 5), digits(blocks["qh"], 4)], axis=-1)
    return Codes(signed(codes[:, None, :], 1), _scale(blocks))


# K-quants: blocks of 256 values in groups of 16 or 32, whose scales are quantized to small integers.


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
