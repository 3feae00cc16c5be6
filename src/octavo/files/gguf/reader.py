"""`Gguf`: metadata and tensors of a GGUF file, as float32 or as codes and scales."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from octavo.files.errors import FileError, missing_tensor_error
from octavo.files.gguf.blocks import Blocks, Codes, Splitter
from octavo.files.gguf.header import Info, read_header
from octavo.files.gguf.quantized import assemble, assemble_rounded
from octavo.files.gguf.types import TYPES
from octavo.files.regular import RegularFile
from octavo.qarray import QArray

_VALUES_AT_ONCE = 1 << 18


class Gguf:
    """A GGUF file of version 2 or 3, open for reading.

    The header is validated when the file is opened: sizes, types, alignment, overlaps and bounds. Tensors are read on
    demand in pieces, with little memory in addition to the result.

    >>> import tempfile
    >>> from octavo.files.gguf import Tensor, write_gguf
    >>> path = f"{tempfile.mkdtemp()}/m.gguf"
    >>> write_gguf(path, {"general.architecture": "llama"}, {"w": Tensor(np.ones((2, 32), np.float32), "Q8_0")})
    >>> with Gguf(path) as file:
    ...     print(file.metadata["general.architecture"], file.info("w").kind, file.read("w").shape)
    llama Q8_0 (2, 32)
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._file = RegularFile(path)
        try:
            self._header = read_header(self._file)
        except BaseException:
            self._file.close()
            raise
        self.path = self._file.path
        self.version = self._header.version
        self.alignment = self._header.alignment
        self.metadata: dict[str, Any] = {
            key: value.item() if isinstance(value, np.generic) else value
            for key, value in self._header.metadata.items()
        }

    def typed_metadata(self) -> dict[str, Any]:
        """The metadata with scalars of NumPy's types, so that `write_gguf` writes the same types."""
        return dict(self._header.metadata)

    def names(self) -> list[str]:
        """The tensors, in the order of the file."""
        return list(self._header.tensors)

    def info(self, name: str) -> Info:
        """Type, shape (rows first, as in NumPy) and position of a tensor."""
        if name not in self._header.tensors:
            raise missing_tensor_error(self.path, name, self._header.tensors)
        return self._header.tensors[name]

    def read(self, name: str) -> np.ndarray:
        """A tensor as float32; integers and F64 keep their dtype."""
        info = self.info(name)
        kind = info.type
        if not kind.readable:
            known = ", ".join(name for name, kind in TYPES.items() if kind.readable)
            raise FileError(
                f"{self.path}: tensor {name!r} is of type {kind.name}, which cannot be read here. "
                f"Requantize it, for instance to Q8_0. Readable: {known}"
            )
        if kind.split is None:
            values = np.frombuffer(self._file.read(info.offset, info.nbytes, name), kind.block).reshape(info.shape)
            return values.astype(np.float32) if kind.name in ("F16", "BF16") else values
        out = np.empty(info.size, np.float32)
        for first, blocks in self._blocks(name, info):
            kind.split(blocks).values(out[first : first + len(blocks) * kind.values])
        return out.reshape(info.shape)

    def read_quantized(self, name: str, *, exact: bool = True) -> QArray | None:
        """A tensor as the codes and scales of the file, or None if no QArray has exactly the values of `read`.

        Codes keep their format: Q8_0 is int8, Q4_0 int4, Q5_0 int5, Q6_K int6, Q3_K int3, ternary types int2, MXFP4
        mxfp4, IQ4 a table. Scales are float32 (MXFP4: e8m0), with tiles along the last axis. The types with a minimum
        (Q4_1, Q5_1, Q2_K, Q4_K, Q5_K) have a QArray only if all minima are integer zero points, which is rare. If not
        `exact`, they have one with float32 zero points, whose values differ by the rounding of these.
        """
        info = self.info(name)
        split = info.type.split
        if split is None:
            return None

        def parts(split: Splitter = split) -> Iterator[tuple[Blocks, Codes]]:
            for _, blocks in self._blocks(name, info):
                yield blocks, split(blocks)

        found = None if exact else assemble_rounded(info, parts())
        return assemble(info, parts()) if found is None else found

    def _blocks(self, name: str, info: Info):
        kind = info.type
        step, size = max(1, _VALUES_AT_ONCE // kind.values), kind.block.itemsize
        total = info.size // kind.values
        for first in range(0, total, step):
            count = min(step, total - first)
            data = self._file.read(info.offset + first * size, count * size, name)
            yield first * kind.values, np.frombuffer(data, kind.block)

    def close(self) -> None:
        self._file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Gguf({str(self.path)!r}: {len(self._header.tensors)} tensors, {len(self.metadata)} metadata)"
