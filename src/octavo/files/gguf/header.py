"""The header of a GGUF file: metadata and tensor infos, every number validated before it is used."""

import dataclasses
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from octavo.files.errors import FileError
from octavo.files.gguf.types import BY_NUMBER, REMOVED, TYPES, TensorType
from octavo.files.regular import RegularFile

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
MAX_NAME = 65535
MAX_DEPTH = 4  # of arrays in arrays
MAX_RANK = 4  # GGML_MAX_DIMS
_CHUNK = 1 << 20

# Numbers in the file, in order; 8 is a string and 9 an array.
SCALARS = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype(np.bool_),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
STRING, ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class Info:
    """A tensor in a file: its type, its shape (rows first, as in NumPy), and the position of its bytes."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def type(self) -> TensorType:
        return TYPES[self.kind]


@dataclasses.dataclass(frozen=True)
class Header:
    version: int
    alignment: int
    metadata: dict[str, Any]
    tensors: dict[str, Info]


def read_header(file: RegularFile) -> Header:
    """Read and validate everything before the data of a GGUF file."""
    at = _Cursor(file)
    if at.take(4, "the magic number") != MAGIC:
        raise at.error("is not a GGUF file: it does not begin with 'GGUF'")
    version = at.number("<I", "the version")
    if version not in VERSIONS:
        hint = "it is a big-endian file" if version & 0xFFFF == 0 and version else "convert it again with llama.cpp"
        raise at.error(f"is GGUF of version {version}; known are {VERSIONS[0]} and {VERSIONS[1]}: {hint}")
    tensor_count = at.count("tensors", least=24)
    pair_count = at.count("metadata entries", least=13)
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = at.string("a key of the metadata", limit=MAX_NAME)
        if key in metadata:
            raise at.error(f"metadata {_short(key)} is given twice")
        metadata[key] = at.value(f"metadata {_short(key)}")
    alignment = _alignment(metadata, at.error)
    raw = [_tensor(at) for _ in range(tensor_count)]
    start = at.position + -at.position % alignment
    tensors: dict[str, Info] = {}
    for name, info in raw:
        if name in tensors:
            raise at.error(f"tensor {_short(name)} is given twice")
        if info.offset % alignment:
            raise at.error(f"tensor {_short(name)} is at offset {info.offset}, not a multiple of {alignment}")
        info = dataclasses.replace(info, offset=start + info.offset)
        file.check(info.offset, info.nbytes, f"tensor {_short(name)}")
        tensors[name] = info
    _check_overlap(tensors, at.error)
    return Header(version, alignment, metadata, tensors)


def _alignment(metadata: dict[str, Any], error: Callable[[str], FileError]) -> int:
    alignment = metadata.get("general.alignment", np.uint32(ALIGNMENT))
    if not isinstance(alignment, np.uint32):
        raise error("general.alignment should be a uint32")
    if alignment == 0 or alignment & (alignment - 1):
        raise error(f"general.alignment is {alignment}, not a power of two")
    return int(alignment)


def _tensor(at: "_Cursor") -> tuple[str, Info]:
    name = at.string("the name of a tensor", limit=MAX_NAME)
    what = f"tensor {_short(name)}"
    rank = at.number("<I", what)
    if rank > MAX_RANK:
        raise at.error(f"{what} has {rank} axes, and at most {MAX_RANK} are allowed")
    dims = struct.unpack(f"<{rank}Q", at.take(8 * rank, what))
    number = at.number("<I", what)
    if number not in BY_NUMBER:
        gone = f"{REMOVED[number]}, which ggml removed: quantize the model again" if number in REMOVED else "unknown"
        raise at.error(f"{what} is of type {number}, {gone}. Known: {', '.join(TYPES)}")
    kind = BY_NUMBER[number]
    count, row = math.prod(dims), dims[0] if dims else 1
    if not count:
        raise at.error(f"{what} has shape {dims[::-1]}, with an axis of length 0")
    if kind.nbytes(count) > at.size:
        raise at.error(f"{what} has shape {dims[::-1]}, more than the file of {at.size} bytes can hold")
    if row % kind.values:
        raise at.error(f"{what} has rows of {row}, not a multiple of {kind.values} as {kind.name} needs")
    return name, Info(kind.name, dims[::-1], at.number("<Q", what), kind.nbytes(count))


def _check_overlap(tensors: dict[str, Info], error: Callable[[str], FileError]) -> None:
    end, before = 0, ""
    for name, info in sorted(tensors.items(), key=lambda item: item[1].offset):
        if info.offset < end:
            raise error(f"tensors {_short(before)} and {_short(name)} overlap")
        end, before = info.offset + info.nbytes, name


class _Cursor:
    """Reads a file sequentially, buffering a megabyte."""

    def __init__(self, file: RegularFile):
        self._file = file
        self.size = file.size
        self._buffer = bytearray()
        self._start = 0  # of the buffer in the file
        self._next = 0  # in the buffer

    @property
    def position(self) -> int:
        return self._start + self._next

    @property
    def left(self) -> int:
        return self.size - self.position

    def error(self, text: str) -> FileError:
        return FileError(f"{self._file.path}: {text}")

    def take(self, count: int, what: str) -> bytes:
        if self._next + count > len(self._buffer):
            rest, ahead = self._buffer[self._next :], max(count, min(_CHUNK, self.left))
            self._start, self._next = self.position, 0
            self._buffer = rest + self._file.read(self._start + len(rest), ahead - len(rest), what)
        start, self._next = self._next, self._next + count
        return bytes(memoryview(self._buffer)[start : self._next])

    def number(self, code: str, what: str) -> int:
        return struct.unpack(code, self.take(struct.calcsize(code), what))[0]

    def count(self, what: str, *, least: int) -> int:
        """A count of items of at least `least` bytes each, which must fit into the rest of the file."""
        count = self.number("<Q", f"the number of {what}")
        if count * least > self.left:
            raise self.error(f"declares {count} {what}, more than fit in the {self.left} bytes that follow")
        return count

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.number("<Q", what)
        if length > self.left or (limit is not None and length > limit):
            raise self.error(f"{what} is a text of {length} bytes; {min(self.left, limit or self.left)} at most")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8") from None

    def _strings(self, count: int, what: str) -> list[str]:
        """Many strings, such as a vocabulary; without a call for each that the buffer holds."""
        found: list[str] = []
        unpack = struct.Struct("<Q").unpack_from
        while len(found) < count:
            found.append(self.string(what))  # fills the buffer, and checks what is not in it
            buffer, at, end = bytes(self._buffer), self._next, len(self._buffer) - 8
            try:
                while len(found) < count and at <= end:
                    stop = at + 8 + unpack(buffer, at)[0]
                    if stop > len(buffer):
                        break
                    found.append(buffer[at + 8 : stop].decode())
                    at = stop
            except UnicodeDecodeError:
                raise self.error(f"{what} is not UTF-8") from None
            self._next = at
        return found

    def value(self, what: str) -> Any:
        kind = self.number("<I", what)
        if kind in SCALARS:
            return self._scalars(SCALARS[kind], 1, what)[0]
        if kind == STRING:
            return self.string(what)
        if kind == ARRAY:
            return self._array(what, 1)
        raise self.error(f"{what} is of type {kind}, which does not exist")

    def _scalars(self, dtype: np.dtype, count: int, what: str) -> np.ndarray:
        data = self.take(count * dtype.itemsize, what)
        if dtype == np.bool_ and data.translate(None, b"\0\1"):
            raise self.error(f"{what} is a bool that is neither 0 nor 1")
        return np.frombuffer(data, dtype)

    def _array(self, what: str, depth: int) -> Any:
        kind = self.number("<I", what)
        if kind in SCALARS:
            count = self.count(f"values in {what}", least=SCALARS[kind].itemsize)
            return self._scalars(SCALARS[kind], count, what)
        if kind == STRING:
            return self._strings(self.count(f"texts in {what}", least=8), what)
        if kind == ARRAY:
            if depth >= MAX_DEPTH:
                raise self.error(f"{what} has arrays in arrays deeper than {MAX_DEPTH}")
            return [self._array(what, depth + 1) for _ in range(self.count(f"arrays in {what}", least=12))]
        raise self.error(f"{what} is an array of type {kind}, which does not exist")


def _short(name: str) -> str:
    return repr(name if len(name) <= 80 else name[:77] + "...")
