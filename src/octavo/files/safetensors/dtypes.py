"""The dtypes of safetensors as those of NumPy and ml_dtypes.

Values of four and six bits are a little-endian bit stream in the file, the first in the lowest bits of the first byte,
as in `torch.float4_e2m1fn_x2`; in memory they take a byte each.
"""

import dataclasses
import math

import ml_dtypes
import numpy as np

from octavo._names import unknown_name
from octavo.files.bits import pack, unpack
from octavo.files.errors import FileError

# In the order of the reference implementation, which sorts tensors by it, last first, so that all are aligned.
_TYPES = {
    "BOOL": np.bool_,
    "F4": ml_dtypes.float4_e2m1fn,
    "F6_E2M3": ml_dtypes.float6_e2m3fn,
    "F6_E3M2": ml_dtypes.float6_e3m2fn,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "I16": np.int16,
    "U16": np.uint16,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I32": np.int32,
    "U32": np.uint32,
    "F32": np.float32,
    "C64": np.complex64,
    "F64": np.float64,
    "I64": np.int64,
    "U64": np.uint64,
}
DTYPES = {name: np.dtype(dtype) for name, dtype in _TYPES.items()}
ORDER = {name: i for i, name in enumerate(DTYPES)}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NARROW = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
LARGEST = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Info:
    """The dtype and shape of an array, and its bytes in the file.

    >>> Info.of(np.zeros((2, 3), np.float16))
    Info(dtype=dtype('float16'), shape=(2, 3), nbytes=12)
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def make(cls, dtype: object, shape: tuple[int, ...]) -> "Info":
        """The info of an array of a dtype that safetensors has; raises `FileError` for any other."""
        dtype = np.dtype(dtype)  # pyrefly: ignore
        return cls(dtype, tuple(shape), nbytes(name_of(dtype), shape))

    @classmethod
    def of(cls, array: object) -> "Info":
        """The info of an array, of NumPy or JAX."""
        return cls.make(array.dtype, array.shape)  # pyrefly: ignore


def bits_of(name: str) -> int:
    """Bits per value in the file."""
    return _NARROW.get(name, 8 * DTYPES[name].itemsize)


def nbytes(name: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array in the file."""
    bits = bits_of(name) * math.prod(shape)
    if bits % 8:
        raise FileError(f"{math.prod(shape)} values of {name} do not fill whole bytes; give them another shape")
    return bits // 8


def name_of(dtype: np.dtype) -> str:
    """The name of a dtype in safetensors."""
    if dtype not in _NAMES:
        hint = "pack the codes, see octavo.files.layouts" if dtype.name in ("int2", "int4", "uint2", "uint4") else ""
        raise FileError(f"safetensors has no dtype for {dtype.name}; {hint or unknown_name(dtype.name, list(DTYPES))}")
    return _NAMES[dtype]


def decode(data: np.ndarray, name: str, shape: tuple[int, ...], label: str) -> np.ndarray:
    """The array of bytes of a file, without a copy if possible; `label` names it in errors."""
    dtype = DTYPES[name]
    if name == "BOOL" and data.size and data.max() > 1:
        raise FileError(f"{label} is BOOL but has bytes other than 0 and 1; the file is damaged, fetch it again")
    if name in _NARROW:
        return unpack(data, _NARROW[name], math.prod(shape)).view(dtype).reshape(shape)
    return data.view(dtype).reshape(shape)


def encode(array: np.ndarray) -> np.ndarray:
    """The bytes of an array in the file, without a copy where possible."""
    name = name_of(array.dtype)
    flat = np.ascontiguousarray(array).reshape(-1)
    if name in _NARROW:
        return pack(flat.view(np.uint8), _NARROW[name])
    return flat.view(np.uint8)
