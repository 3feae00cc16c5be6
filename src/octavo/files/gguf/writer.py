"""Writing GGUF files: atomically, one tensor in memory at a time.

Not by `gguf.GGUFWriter`, which cannot write empty arrays, types Python ints as int32 where llama.cpp reads uint32, and
opens the destination itself, so that a failure leaves a partial file. Tests compare the bytes of both.
"""

import dataclasses
import math
import os
import struct
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

from octavo._io import atomic_file
from octavo._names import unknown_name
from octavo.files.errors import FileError
from octavo.files.gguf.encode import ENCODERS, encode_codes
from octavo.files.gguf.header import ALIGNMENT, ARRAY, MAGIC, MAX_NAME, MAX_RANK, SCALARS, STRING
from octavo.files.gguf.kquants_encode import KQUANTS
from octavo.files.gguf.types import TYPES, TensorType
from octavo.qarray import QArray

_NUMBERS: dict[Any, int] = {dtype: number for number, dtype in SCALARS.items()}
_VALUES_AT_ONCE = 1 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor to write.

    Args:
      values: An array, a QArray, or a function that returns one when it is written. A QArray keeps its codes and scales
        if `kind` can hold them (int8 as Q8_0, int4 as Q4_0, tiles of 32 or multiples, scales that are float16 numbers).
      kind: The type in the file.
      shape: Needed with a function.
      importance: The weight of the squared error of each column (the last axis), or of each value: the mean square of
        the inputs of a matmul. Only K-quants use it.
    """

    values: Any
    kind: str = "F32"
    shape: tuple[int, ...] | None = None
    importance: np.ndarray | None = None

    def __post_init__(self):
        known = [*ENCODERS, *(name for name, kind in TYPES.items() if not kind.quantized and name not in ENCODERS)]
        if self.kind not in known:
            raise FileError(f"tensors of type {self.kind!r} cannot be written: {unknown_name(self.kind, known)}")
        if self.shape is None:
            if not hasattr(self.values, "shape"):
                raise FileError("a tensor that is loaded later needs its shape")
            object.__setattr__(self, "shape", tuple(self.values.shape))
        if self.importance is not None and self.kind in KQUANTS:
            _check_importance(self.importance, self.shape or ())

    @property
    def type(self) -> TensorType:
        return TYPES[self.kind]

    def load(self) -> Any:
        return self.values() if callable(self.values) else self.values


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor | np.ndarray],
) -> None:
    """Write a GGUF file of version 3.

    Args:
      path: The file, replaced atomically.
      metadata: Bools, strings, numbers (ints become uint32, or as wide as they need; floats float32; NumPy scalars keep
        their type), NumPy arrays, and lists of one type of these.
      tensors: By name. Arrays keep their dtype, which ggml must have; `Tensor` converts.
    """
    entries = {
        name: value if isinstance(value, Tensor) else _untyped_tensor(name, value) for name, value in tensors.items()
    }
    head = _head(metadata, entries)
    with atomic_file(path) as file:
        file.write(head)
        _pad(file)
        for name, entry in entries.items():
            _write_tensor(file, name, entry)
            _pad(file)


def _untyped_tensor(name: str, array: Any) -> Tensor:
    dtype = np.dtype(array.dtype)
    for kind in TYPES.values():
        if not kind.quantized and kind.block == dtype:
            return Tensor(array, kind.name)
    raise FileError(f"tensor {name!r}: ggml has no type for {dtype}; give Tensor(values, kind)")


def _head(metadata: Mapping[str, Any], entries: Mapping[str, Tensor]) -> bytes:
    if (alignment := metadata.get("general.alignment", ALIGNMENT)) != ALIGNMENT:
        raise FileError(f"general.alignment is {alignment!r} in the metadata, but files are written with {ALIGNMENT}")
    parts = [MAGIC, struct.pack("<IQQ", 3, len(entries), len(metadata))]
    for key, value in metadata.items():
        number, data = _encode_value(value, f"metadata {key!r}")
        parts += [_text(key, "a key", MAX_NAME), struct.pack("<I", number), data]
    offset = 0
    for name, entry in entries.items():
        shape, kind = entry.shape or (), entry.type
        if len(shape) > MAX_RANK or 0 in shape:
            raise FileError(f"tensor {name!r}: a shape has at most {MAX_RANK} axes, none of length 0, got {shape}")
        if (shape[-1] if shape else 1) % kind.values:
            raise FileError(f"tensor {name!r}: rows of {kind.name} are multiples of {kind.values}, got {shape}")
        parts.append(_text(name, "a name", MAX_NAME))
        parts.append(struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind.number, offset))
        nbytes = kind.nbytes(math.prod(shape))
        offset += nbytes + -nbytes % ALIGNMENT
    return b"".join(parts)


def _pad(file: IO[bytes]) -> None:
    file.write(b"\0" * (-file.tell() % ALIGNMENT))


def _write_tensor(file: IO[bytes], name: str, entry: Tensor) -> None:
    values, kind = entry.load(), entry.type
    if tuple(values.shape) != entry.shape:
        raise FileError(f"tensor {name!r}: has shape {tuple(values.shape)}, but {entry.shape} was announced")
    if isinstance(values, QArray):
        file.write(encode_codes(name, values, kind))
        return
    array = np.asarray(values)
    if kind.name not in ENCODERS:
        if array.dtype != kind.block:
            raise FileError(f"tensor {name!r}: {kind.name} needs {kind.block}, got {array.dtype}")
        file.write(np.ascontiguousarray(array).ravel().view(np.uint8))
        return
    if array.dtype.kind not in "fiuV":  # V: bfloat16 and its like
        raise FileError(f"tensor {name!r}: {kind.name} is made of numbers, got {array.dtype}")
    flat = np.ascontiguousarray(array).reshape(-1)
    for first in range(0, flat.size, _VALUES_AT_ONCE):
        piece = flat[first : first + _VALUES_AT_ONCE]
        if entry.importance is None or kind.name not in KQUANTS:
            file.write(ENCODERS[kind.name](name, piece))
        else:
            place = np.arange(first, first + piece.size) % entry.importance.size
            file.write(ENCODERS[kind.name](name, piece, entry.importance.reshape(-1)[place]))


def _check_importance(importance: np.ndarray, shape: tuple[int, ...]) -> None:
    if tuple(importance.shape) not in (shape[-1:], shape):
        raise FileError(f"an importance of shape {importance.shape} fits neither {shape} nor its columns")
    if not np.isfinite(importance).all() or (importance < 0).any():
        raise FileError("importances are finite and at least 0: they are means of squares")


def _text(text: str, what: str, limit: int | None = None) -> bytes:
    data = text.encode()
    if limit is not None and not 0 < len(data) <= limit:
        raise FileError(f"{what} has 1 to {limit} bytes, got {len(data)}")
    return struct.pack("<Q", len(data)) + data


def _encode_value(value: Any, what: str) -> tuple[int, bytes]:
    """The number of a value's type, and its bytes."""
    if isinstance(value, str):
        return STRING, _text(value, what)
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim):
        return ARRAY, _list(value, what)
    if isinstance(value, bool | int | float) and not isinstance(value, np.generic):  # np.float64 is a float
        value = _python_number(value, what)
    dtype = getattr(value, "dtype", None)
    if dtype not in _NUMBERS:
        raise FileError(f"{what}: values are bools, numbers, texts and lists of them, got {type(value).__name__}")
    return _NUMBERS[np.dtype(dtype)], np.asarray(value, np.dtype(dtype).newbyteorder("<")).tobytes()


def _python_number(value: int | float, what: str) -> np.generic:
    if isinstance(value, bool | float):
        return np.bool_(value) if isinstance(value, bool) else np.float32(value)
    for dtype in (np.uint32, np.int32, np.uint64, np.int64):
        if np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
            return dtype(value)
    raise FileError(f"{what}: {value} is no number of 64 bits")


def _list(values: Any, what: str) -> bytes:
    if isinstance(values, np.ndarray) and values.dtype.kind == "U":
        texts = [_text(str(v), what) for v in values]
        return struct.pack("<IQ", STRING, len(texts)) + b"".join(texts)
    if isinstance(values, np.ndarray) and values.dtype in _NUMBERS and values.ndim == 1:
        data = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()
        return struct.pack("<IQ", _NUMBERS[values.dtype], len(values)) + data
    if not len(values):
        raise FileError(f"{what}: an empty list has no type; give an empty NumPy array, of dtype str for texts")
    if all(type(v) is int for v in values) and min(values) < 0 <= max(values) < 1 << 31:
        values = [np.int32(v) if min(values) >= -(1 << 31) else np.int64(v) for v in values]
    items = [_encode_value(v, what) for v in values]
    if len({number for number, _ in items}) > 1:
        raise FileError(f"{what}: a list holds one kind of value; give an array of NumPy to say which")
    return struct.pack("<IQ", items[0][0], len(items)) + b"".join(data for _, data in items)
