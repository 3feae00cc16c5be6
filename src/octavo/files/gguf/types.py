"""The tensor types of ggml: number in the file, name, block size and decoder."""

import dataclasses

import ml_dtypes
import numpy as np

from octavo.files.gguf import blocks
from octavo.files.gguf.blocks import SUPER, Splitter, record


@dataclasses.dataclass(frozen=True)
class TensorType:
    """A type: `values` numbers to a block of `block.itemsize` bytes.

    Plain types have no `split`. Types that are known by size only, so that a file with them can be opened, have
    neither: `readable` is false.
    """

    number: int
    name: str
    values: int
    block: np.dtype
    split: Splitter | None = None

    @property
    def readable(self) -> bool:
        return self.split is not None or self.values == 1

    @property
    def quantized(self) -> bool:
        return self.values > 1

    def nbytes(self, count: int) -> int:
        """Bytes of a number of values, a multiple of the block size."""
        return count // self.values * self.block.itemsize


def _plain(number: int, name: str, dtype: type[np.generic]) -> TensorType:
    return TensorType(number, name, 1, np.dtype(dtype).newbyteorder("<"))


def _opaque(number: int, name: str, values: int, nbytes: int) -> TensorType:
    return TensorType(number, name, values, np.dtype(f"V{nbytes}"))


_D, _DMIN, _M = ("d", "<f2", 1), ("dmin", "<f2", 1), ("m", "<f2", 1)
_QS16 = ("qs", "u1", 16)

_ALL = (
    _plain(0, "F32", np.float32),
    _plain(1, "F16", np.float16),
    TensorType(2, "Q4_0", 32, record(_D, _QS16), blocks.q4_0),
    TensorType(3, "Q4_1", 32, record(_D, _M, _QS16), blocks.q4_1),
    TensorType(6, "Q5_0", 32, record(_D, ("qh", "u1", 4), _QS16), blocks.q5_0),
    TensorType(7, "Q5_1", 32, record(_D, _M, ("qh", "u1", 4), _QS16), blocks.q5_1),
    TensorType(8, "Q8_0", 32, record(_D, ("qs", "i1", 32)), blocks.q8_0),
    TensorType(10, "Q2_K", SUPER, record(("scales", "u1", 16), ("qs", "u1", 64), _D, _DMIN), blocks.q2_k),
    TensorType(11, "Q3_K", SUPER, record(("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), _D), blocks.q3_k),
    TensorType(12, "Q4_K", SUPER, record(_D, _DMIN, ("scales", "u1", 12), ("qs", "u1", 128)), blocks.q4_k),
    TensorType(
        13,
        "Q5_K",
        SUPER,
        record(_D, _DMIN, ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)),
        blocks.q5_k,
    ),
    TensorType(14, "Q6_K", SUPER, record(("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), _D), blocks.q6_k),
    TensorType(15, "Q8_K", SUPER, record(("d", "<f4", 1), ("qs", "i1", 256), ("bsums", "<i2", 16)), blocks.q8_0),
    _opaque(16, "IQ2_XXS", SUPER, 66),
    _opaque(17, "IQ2_XS", SUPER, 74),
    _opaque(18, "IQ3_XXS", SUPER, 98),
    _opaque(19, "IQ1_S", SUPER, 50),
    TensorType(20, "IQ4_NL", 32, record(_D, _QS16), blocks.iq4_nl),
    _opaque(21, "IQ3_S", SUPER, 110),
    _opaque(22, "IQ2_S", SUPER, 82),
    TensorType(
        23,
        "IQ4_XS",
        SUPER,
        record(_D, ("scales_h", "<u2", 1), ("scales_l", "u1", 4), ("qs", "u1", 128)),
        blocks.iq4_xs,
    ),
    _plain(24, "I8", np.int8),
    _plain(25, "I16", np.int16),
    _plain(26, "I32", np.int32),
    _plain(27, "I64", np.int64),
    _plain(28, "F64", np.float64),
    _opaque(29, "IQ1_M", SUPER, 56),
    TensorType(30, "BF16", 1, np.dtype(ml_dtypes.bfloat16)),
    TensorType(34, "TQ1_0", SUPER, record(("qs", "u1", 48), ("qh", "u1", 4), _D), blocks.tq1_0),
    TensorType(35, "TQ2_0", SUPER, record(("qs", "u1", 64), _D), blocks.tq2_0),
    TensorType(39, "MXFP4", 32, record(("e", "u1", 1), _QS16), blocks.mxfp4),
    TensorType(40, "NVFP4", 64, record(("d", "u1", 4), ("qs", "u1", 32)), blocks.nvfp4),
    _opaque(41, "Q1_0", 128, 18),
)

TYPES: dict[str, TensorType] = {kind.name: kind for kind in _ALL}
BY_NUMBER: dict[int, TensorType] = {kind.number: kind for kind in _ALL}

# Numbers of types that ggml removed; llama.cpp does not read them either.
REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4"}
REMOVED |= {37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}
