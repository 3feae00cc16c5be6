"""Writing safetensors: atomically, one tensor in memory at a time, optionally in shards.

The bytes are those of the reference implementation: tensors are sorted by dtype, widest first, then by name, and the
header is padded to a multiple of eight, so that every tensor is aligned.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from octavo._io import atomic_file, atomic_write
from octavo.files.errors import FileError
from octavo.files.safetensors.dtypes import ORDER, Info, encode, name_of
from octavo.files.safetensors.header import LIMIT
from octavo.files.safetensors.read import INDEX, SINGLE


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

    Files get their names when everything is written; if an array cannot be loaded or written, no file remains.

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
    path = Path(path)
    is_file = path.suffix == ".safetensors"
    if is_file and max_shard_bytes is not None:
        raise FileError(f"{path} is one file; to write shards, give a folder")
    metadata = dict(metadata or {})
    if not all(isinstance(text, str) for item in metadata.items() for text in item):
        raise FileError(f"{path}: metadata is from strings to strings, got {metadata!r}")
    shards = _shards({n: x.info if isinstance(x, Lazy) else Info.of(x) for n, x in tensors.items()}, max_shard_bytes)
    folder, name = (path.parent, path.name) if is_file else (path, SINGLE)
    count = len(shards)
    names = [name] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    files = dict(zip(names, shards, strict=True))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            for name, infos in files.items():
                file = stack.enter_context(atomic_file(folder / name))
                file.write(_header(infos, metadata, path))
                for tensor, info in infos.items():
                    file.write(encode(_load(tensors[tensor], info, f"{path}: {tensor!r}")))
        if not is_file:
            _write_index(folder, files)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}") from error


def _shards(infos: Mapping[str, Info], limit: int | None) -> list[dict[str, Info]]:
    """The tensors of each shard, in the order of the file."""
    shards: list[dict[str, Info]] = [{}]
    size = 0
    for name, info in infos.items():
        if limit is not None and shards[-1] and size + info.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = info
        size += info.nbytes
    order = lambda item: (-ORDER[name_of(item[1].dtype)], item[0])  # noqa: E731
    return [dict(sorted(shard.items(), key=order)) for shard in shards]


def _header(infos: Mapping[str, Info], metadata: dict[str, str], path: Path) -> bytes:
    if "__metadata__" in infos:
        raise FileError(f"{path}: a tensor cannot be called __metadata__")
    table: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, info in infos.items():
        offsets = [end, end := end + info.nbytes]
        table[name] = {"dtype": name_of(info.dtype), "shape": list(info.shape), "data_offsets": offsets}
    try:
        text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise FileError(f"{path}: a name or the metadata is not text that UTF-8 can hold") from error
    text += b" " * (-len(text) % 8)
    if len(text) > LIMIT:
        raise FileError(f"{path}: a header of {len(text)} bytes is over {LIMIT}; write shards")
    return len(text).to_bytes(8, "little") + text


def _load(x: Any, info: Info, label: str) -> np.ndarray:
    array = np.asarray(x.load() if isinstance(x, Lazy) else x)
    if (array.dtype, array.shape) != (info.dtype, info.shape):
        expected = f"{info.dtype.name} {list(info.shape)}"
        raise FileError(f"{label} was to be {expected} but is {array.dtype.name} {list(array.shape)}")
    return array


def _write_index(folder: Path, files: Mapping[str, Mapping[str, Info]]) -> None:
    if len(files) == 1:
        # A stale index in the directory would hide the new file.
        (folder / INDEX).unlink(missing_ok=True)
        return
    total = sum(info.nbytes for infos in files.values() for info in infos.values())
    index = {name: file for file, infos in files.items() for name in infos}
    described = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
    atomic_write(folder / INDEX, json.dumps(described, indent=2, ensure_ascii=False) + "\n")
