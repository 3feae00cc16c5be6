"""Importance matrices, as llama.cpp's `llama-imatrix` writes them: the mean square of each input of each weight.

Files are GGUF with the sums and counts of each tensor (`NAME.in_sum2`, `NAME.counts`). The older binary files are read.
"""

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from octavo.files.errors import FileError
from octavo.files.gguf.header import MAGIC
from octavo.files.gguf.reader import Gguf
from octavo.files.gguf.writer import write_gguf

_SUM, _COUNT = ".in_sum2", ".counts"


def write_imatrix(path: str | Path, importance: Mapping[str, np.ndarray], *, tokens: int, dataset: str = "") -> None:
    """Write an importance matrix.

    Args:
      path: The file, replaced atomically.
      importance: The mean square of the inputs by the name of a tensor, [inputs] or [experts, inputs].
      tokens: The number of tokens of the means.
      dataset: The name of the calibration data.

    >>> import tempfile
    >>> path = f"{tempfile.mkdtemp()}/imatrix.gguf"
    >>> write_imatrix(path, {"output.weight": np.float32([1, 4])}, tokens=512)
    >>> read_imatrix(path)
    {'output.weight': array([1., 4.], dtype=float32)}
    """
    tensors = {}
    for name, mean in importance.items():
        rows = np.atleast_2d(np.asarray(mean, np.float32))
        tensors[f"{name}{_SUM}"] = rows * np.float32(tokens)
        tensors[f"{name}{_COUNT}"] = np.full((len(rows), 1), tokens, np.float32)
    metadata = {
        "general.type": "imatrix",
        "imatrix.datasets": [dataset],
        "imatrix.chunk_count": 1,
        "imatrix.chunk_size": tokens,
    }
    write_gguf(path, metadata, tensors)


def read_imatrix(path: str | Path) -> dict[str, np.ndarray]:
    """The importances of a file by the name of a tensor, [inputs] or [experts, inputs]; of unseen experts, ones."""
    with open(path, "rb") as file:
        start = file.read(len(MAGIC))
    found = _from_gguf(path) if start == MAGIC else _from_binary(Path(path))
    if not found:
        raise FileError(f"{path} has no importances: it is no importance matrix")
    return found


def _from_gguf(path: str | Path) -> dict[str, np.ndarray]:
    found = {}
    with Gguf(path) as file:
        names = set(file.names())
        for name in sorted(name for name in names if name.endswith(_SUM)):
            own = name.removesuffix(_SUM)
            if f"{own}{_COUNT}" not in names:
                raise FileError(f"{path}: {own!r} has sums but no counts")
            sums = np.atleast_2d(file.read(name))
            counts = file.read(f"{own}{_COUNT}").reshape(-1, 1)
            if len(counts) != len(sums):
                raise FileError(f"{path}: {own!r} has {len(counts)} counts for {len(sums)} matrices")
            found[own] = _squeezed(np.where(counts > 0, sums / np.maximum(counts, 1), 1).astype(np.float32))
    return found


def _from_binary(path: Path) -> dict[str, np.ndarray]:
    data, at, found = path.read_bytes(), 0, {}

    def number() -> int:
        nonlocal at
        if at + 4 > len(data):
            raise FileError(f"{path} ends within an entry: it is damaged, or no importance matrix")
        at += 4
        return struct.unpack_from("<i", data, at - 4)[0]

    for _ in range(number()):
        size = number()
        if not 0 < size <= len(data) - at:
            raise FileError(f"{path} has a name of {size} bytes: it is no importance matrix")
        name = data[at : at + size].decode(errors="replace")
        at += size
        calls, count = number(), number()
        if calls < 0 or not 0 < 4 * count <= len(data) - at:
            raise FileError(f"{path}: {name!r} has {count} values in {calls} calls: it is damaged")
        found[name] = np.frombuffer(data, "<f4", count, at).astype(np.float32) / max(calls, 1)
        at += 4 * count
    return found


def _squeezed(rows: np.ndarray) -> np.ndarray:
    return rows[0] if len(rows) == 1 else rows
