"""Reading safetensors: one file, or a directory of shards with an index.

Tensors are read by `pread`, not through a memory map: a file that is truncated while it is open then raises an error,
where accessing a map beyond the end kills the process.
"""

import os
from pathlib import Path

import numpy as np

from octavo.files.errors import FileError, missing_tensor_error
from octavo.files.regular import RegularFile
from octavo.files.safetensors.dtypes import Info, decode
from octavo.files.safetensors.header import LIMIT, load_object, parse

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLES = (".bin", ".pth", ".pt", ".pkl", ".ckpt")


class SafeTensors:
    """The tensors of a safetensors file, of a directory, or of an index with its shards.

    Opening reads and validates the headers; `read` loads one tensor. Anything wrong with a file raises `FileError`.
    Several threads may read at once.

    >>> import tempfile
    >>> from octavo.files.safetensors import write
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(f"{folder}/small.safetensors", {"x": np.arange(3, dtype=np.int16)})
    ...     with SafeTensors(f"{folder}/small.safetensors") as file:
    ...         file.names(), file.info("x").shape, file.read("x").tolist()
    (['x'], (3,), [0, 1, 2])
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._shards: list[_Shard] = []
        self._shard_of: dict[str, _Shard] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        files, index = find_files(self.path)
        for file in files:
            self._shards.append(_Shard(file))
        by_name = {shard.path.name: shard for shard in self._shards}
        if index is None:
            self._shard_of = {name: shard for shard in self._shards for name in shard.entries}
            return
        for name, file in index.items():
            if name not in by_name[file].entries:
                raise FileError(f"{self.path}: the index has {name!r} in {file}, which does not have it")
            self._shard_of[name] = by_name[file]

    @property
    def metadata(self) -> dict[str, str]:
        """The `__metadata__` of the file; of shards, all of them together, the first one's before the others'."""
        merged: dict[str, str] = {}
        for shard in self._shards:
            merged = shard.metadata | merged
        return merged

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.info(name).nbytes for name in self._shard_of)

    def names(self) -> list[str]:
        """The names of the tensors, in the order of the file or the index."""
        return list(self._shard_of)

    def __contains__(self, name: object) -> bool:
        return name in self._shard_of

    def info(self, name: str) -> Info:
        """The dtype, the shape and the bytes of a tensor."""
        return self._shard(name).entries[name].info

    def read(self, name: str) -> np.ndarray:
        """A tensor, as a new array."""
        return self._shard(name).read_tensor(name)

    def _shard(self, name: str) -> "_Shard":
        if name not in self._shard_of:
            raise missing_tensor_error(self.path, name, self._shard_of)
        return self._shard_of[name]

    def close(self) -> None:
        """Close the files; reading is an error from then on."""
        for shard in self._shards:
            shard.close()

    def __enter__(self) -> "SafeTensors":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Shard(RegularFile):
    """One open file."""

    def __init__(self, path: Path):
        super().__init__(path)
        try:
            length = int.from_bytes(self.read(0, 8, "the length of the header"), "little")
            if length > LIMIT:
                raise FileError(f"{path}: a header of {length} bytes is over {LIMIT}; is this safetensors?")
            text = bytes(self.read(8, length, "the header"))
            self._start = 8 + length
            self.metadata, self.entries = parse(text, self.size - self._start, str(path))
        except BaseException:
            self.close()
            raise

    def read_tensor(self, name: str) -> np.ndarray:
        entry, what = self.entries[name], f"tensor {name!r}"
        data = self.read(self._start + entry.start, entry.info.nbytes, what)
        return decode(np.frombuffer(data, np.uint8), entry.kind, entry.info.shape, f"{self.path}: {what}")


def find_files(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files to open for a path, and the file of each tensor if there is an index."""
    if path.is_dir():
        return _in_folder(path)
    if path.name.endswith(".index.json"):
        return _by_index(path)
    if path.suffix in _PICKLES:
        raise FileError(f"{path} is a pickle, which may run code when it is read; convert it to safetensors first")
    return [path], None


def _in_folder(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    files = sorted(folder.glob("*.safetensors"))
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if folder / INDEX in indexes or (len(indexes) == 1 and folder / SINGLE not in files):
        return _by_index(folder / INDEX if folder / INDEX in indexes else indexes[0])
    if folder / SINGLE in files or len(files) == 1:
        return [path_inside(folder, SINGLE if folder / SINGLE in files else files[0].name)], None
    if files:
        raise FileError(f"{folder} has {len(files)} safetensors files and no {INDEX}; give one of the files")
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
    if pickles:
        raise FileError(f"{folder} has only pickles ({pickles[0]}), which may run code; convert it to safetensors")
    raise FileError(f"{folder} has no safetensors file; is this the folder of the model?")


def _by_index(path: Path) -> tuple[list[Path], dict[str, str]]:
    with RegularFile(path) as file:
        if file.size > LIMIT:
            raise FileError(f"{path}: an index of {file.size} bytes is over {LIMIT}; is this an index?")
        table = load_object(bytes(file.read(0, file.size, "the index")), str(path))
    index = table.get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise FileError(f"{path} has no weight_map from names of tensors to files; is this an index of safetensors?")
    return [path_inside(path.parent, name) for name in dict.fromkeys(index.values())], index


def path_inside(folder: Path, name: str) -> Path:
    """The path of a file in a directory; raises if its name or a symbolic link leads out of it.

    The one exception is the cache of the Hugging Face hub, where `snapshots/REVISION/NAME` links to `blobs/HASH`.
    """
    if not name or name != os.path.basename(name) or name in (".", "..") or "\0" in name or "\\" in name:
        raise FileError(f"{folder}: the index names the file {name[:200]!r}; a shard is a file next to the index")
    if Path(name).suffix != ".safetensors":
        raise FileError(f"{folder}: the index names {name[:200]!r}; only .safetensors files are read, never pickles")
    root = folder.resolve()
    homes = [root]
    if root.parent.name == "snapshots":
        homes.append(root.parent.parent / "blobs")
    target = (root / name).resolve()
    if not any(target.is_relative_to(home) for home in homes):
        raise FileError(f"{folder / name} is a link to outside of the folder; copy the file there")
    return folder / name
