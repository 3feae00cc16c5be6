"""Writing safetensors: atomically, tensor by tensor in any order, optionally in shards.

The bytes are those of the reference implementation: tensors are sorted by dtype, widest first, then by name, and the
header is padded to a multiple of eight, so that every tensor is aligned.
"""

import dataclasses
import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from octavo._io import atomic_write, sync_directory
from octavo.files.errors import FileError
from octavo.files.safetensors.dtypes import ORDER, Info, encode, name_of
from octavo.files.safetensors.header import LIMIT
from octavo.files.safetensors.read import INDEX, SINGLE

_CHUNK = 2**30


@dataclasses.dataclass(frozen=True)
class Lazy:
    """An array that is loaded when it is written, and not kept."""

    info: Info
    load: Callable[[], Any]


def write(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
    *,
    max_shard_bytes: int | None = None,
) -> None:
    """Write tensors to a `.safetensors` file or, for any other path, into a directory.

    Args:
      path: The file or directory. A directory gets `model.safetensors`, or shards and their index.
      tensors: Arrays, or `Lazy` ones, of which one is in memory at a time.
      metadata: Strings by name.
      max_shard_bytes: The size of shards, which only larger single tensors exceed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lazy = Lazy(Info.make(np.float32, (4,)), lambda: np.zeros(4, np.float32))
    ...     write(folder, {"a": lazy, "b": np.ones(4, np.int8)}, max_shard_bytes=16)
    ...     sorted(os.listdir(folder))
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors', 'model.safetensors.index.json']
    """
    infos = {name: x.info if isinstance(x, Lazy) else Info.of(x) for name, x in tensors.items()}
    with Writer(path, infos, metadata, max_shard_bytes=max_shard_bytes) as out:
        for name, x in tensors.items():
            out.put(name, x.load() if isinstance(x, Lazy) else x)


class Writer:
    """Writes safetensors whose dtypes and shapes are declared first, and whose values follow in any order.

    Files get their names when everything is written; if the `with` block raises, no file remains.

    >>> import tempfile
    >>> from octavo.files.safetensors import SafeTensors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/x.safetensors"
    ...     with Writer(path, {"b": Info.make(np.int8, (1,)), "a": Info.make(np.int8, (1,))}) as out:
    ...         out.put("b", np.asarray([2], np.int8))
    ...         out.put("a", np.asarray([1], np.int8))
    ...     SafeTensors(path).read("b").tolist()
    [2]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        infos: Mapping[str, Info],
        metadata: Mapping[str, Any] | None = None,
        *,
        max_shard_bytes: int | None = None,
    ):
        self.path = Path(path)
        single = self.path.suffix == ".safetensors"
        if single and max_shard_bytes is not None:
            raise FileError(f"{self.path} is one file; to write shards, give a folder")
        self.folder = self.path.parent if single else self.path
        self._infos = dict(infos)
        self._left = set(infos)
        metadata = dict(metadata or {})
        if not all(isinstance(text, str) for item in metadata.items() for text in item):
            raise FileError(f"{self.path}: metadata is from strings to strings, got {metadata!r}")
        shards = _shards(self._infos, max_shard_bytes)
        plain = self.path.name if single else SINGLE
        self._files = [
            _File(self.folder, plain if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors", part)
            for i, part in enumerate(shards, 1)
        ]
        self._file_of = {name: file for file in self._files for name in file.infos}
        self._with_index = not single
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for file in self._files:
                file.open(metadata)
        except BaseException as error:
            self._discard()
            raise _because(self.path, error) from error

    def put(self, name: str, array: Any) -> None:
        """Write the values of a tensor."""
        if name not in self._left:
            why = "is written already" if name in self._infos else "was not declared"
            raise FileError(f"{self.path}: tensor {name!r} {why}")
        info, array = self._infos[name], np.asarray(array)
        if (array.dtype, array.shape) != (info.dtype, info.shape):
            told = f"{info.dtype.name} {list(info.shape)}"
            raise FileError(f"{self.path}: {name!r} was to be {told} but is {array.dtype.name} {list(array.shape)}")
        try:
            self._file_of[name].put(name, encode(array))
        except OSError as error:
            raise _because(self.path, error) from error
        self._left.remove(name)

    def close(self) -> None:
        """Rename the files to their final names; raises if a tensor is missing."""
        try:
            if self._left:
                missing = sorted(self._left)
                raise FileError(f"{self.path}: {len(missing)} tensors were not written, the first {missing[0]!r}")
            for file in self._files:
                file.finish()
            if self._with_index:
                self._write_index()
            sync_directory(self.folder)
        except BaseException as error:
            self._discard()
            raise _because(self.path, error) from error

    def _write_index(self) -> None:
        if len(self._files) == 1:
            # A stale index in the directory would hide the new file.
            (self.folder / INDEX).unlink(missing_ok=True)
            return
        total = sum(info.nbytes for info in self._infos.values())
        index = {name: self._file_of[name].name for name in sorted(self._infos)}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2, ensure_ascii=False)
        atomic_write(self.folder / INDEX, text + "\n")

    def _discard(self) -> None:
        for file in self._files:
            file.discard()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self._discard()


class _File:
    """One file that is written under a temporary name."""

    def __init__(self, folder: Path, name: str, infos: dict[str, Info]):
        self.folder, self.name, self.infos = folder, name, infos
        self._partial = folder / f".{name}.{secrets.token_hex(4)}.partial"
        self._offsets: dict[str, int] = {}
        self._fd = -1

    def open(self, metadata: dict[str, str]) -> None:
        order = sorted(self.infos, key=lambda name: (-ORDER[name_of(self.infos[name].dtype)], name))
        table: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        end = 0
        for name in order:
            info = self.infos[name]
            if name == "__metadata__":
                raise FileError(f"{self.name}: a tensor cannot be called __metadata__")
            self._offsets[name] = end
            end += info.nbytes
            kind = name_of(info.dtype)
            table[name] = {"dtype": kind, "shape": list(info.shape), "data_offsets": [end - info.nbytes, end]}
        try:
            text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise FileError(f"{self.name}: a name or the metadata is not text that UTF-8 can hold") from error
        text += b" " * (-len(text) % 8)
        if len(text) > LIMIT:
            raise FileError(f"{self.name}: a header of {len(text)} bytes is over {LIMIT}; write shards")
        head = len(text).to_bytes(8, "little") + text
        self._offsets = {name: len(head) + start for name, start in self._offsets.items()}
        self._fd = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        os.truncate(self._fd, len(head) + end)
        self._pwrite(memoryview(head), 0)

    def put(self, name: str, data: np.ndarray) -> None:
        self._pwrite(memoryview(data), self._offsets[name])

    def _pwrite(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done : done + _CHUNK], offset + done)

    def finish(self) -> None:
        os.fsync(self._fd)
        os.replace(self._partial, self.folder / self.name)
        os.close(self._fd)
        self._fd = -1

    def discard(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._partial.unlink(missing_ok=True)


def _shards(infos: Mapping[str, Info], limit: int | None) -> list[dict[str, Info]]:
    shards: list[dict[str, Info]] = [{}]
    size = 0
    for name, info in infos.items():
        if limit is not None and shards[-1] and size + info.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = info
        size += info.nbytes
    return shards


def _because(path: Path, error: BaseException) -> BaseException:
    return FileError(f"cannot write {path}: {error.strerror}") if isinstance(error, OSError) else error
