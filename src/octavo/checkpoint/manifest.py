"""The manifest of a checkpoint: the size and checksum of each file, written last, so that it vouches for the whole."""

import json
import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from octavo.checkpoint.errors import CheckpointError, DamagedError

NAME = "manifest.json"
VERSION = 1

_BLOCK = 1 << 20


def write(directory: Path, step: int) -> None:
    """Bring every file of a directory to the disk, then the manifest that lists them."""
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(lambda path: _checksum(path, sync=True), paths))
    files = {path.relative_to(directory).as_posix(): found for path, found in zip(paths, sums, strict=True)}
    body = {"version": VERSION, "step": step, "files": files}
    for path in [directory, *directory.rglob("*")]:
        if path.is_dir():
            sync_directory(path)
    put(directory / NAME, json.dumps({**body, "crc32": _own(body)}))


def check(directory: Path, *, contents: Callable[[str], bool] | None = None) -> int:
    """Raise DamagedError unless all files have the sizes, and those named by `contents` the checksums, of the manifest.

    Returns the step that the manifest is of.
    """
    manifest = _read(directory)
    found = {}
    for name in manifest["files"]:
        try:
            found[name] = (directory / name).stat().st_size
        except OSError as error:
            raise _damaged(directory, name, f"is missing ({error.strerror})") from error
    for name, (size, _) in manifest["files"].items():
        if found[name] != size:
            raise _damaged(directory, name, f"has {found[name]} bytes instead of {size}")
    names = [name for name in manifest["files"] if contents is not None and contents(name)]
    with ThreadPoolExecutor(4) as pool:
        for name, sums in zip(names, pool.map(lambda name: _readable(directory, name), names), strict=True):
            if sums != manifest["files"][name]:
                raise _damaged(directory, name, "has other contents than were written (its checksum differs)")
    return manifest["step"]


def put(path: Path, text: str) -> None:
    """Write a small file so that it is there as a whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Bring the names in a directory to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(directory: Path) -> dict[str, Any]:
    try:
        text = (directory / NAME).read_bytes()
    except OSError as error:
        raise _damaged(directory, NAME, f"is missing ({error.strerror})") from error
    try:
        manifest = json.loads(text)
        own = manifest.pop("crc32")
        whole = own == _own(manifest)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(directory, NAME, f"is no manifest ({error})") from error
    if not whole:
        raise _damaged(directory, NAME, "has other contents than were written (its checksum differs)")
    if manifest["version"] > VERSION:
        raise CheckpointError(
            f"{directory} was written by a newer Octavo (layout {manifest['version']}); update to read it"
        )
    return manifest


def _own(body: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"


def _readable(directory: Path, name: str) -> list[Any]:
    try:
        return _checksum(directory / name, sync=False)
    except OSError as error:
        raise _damaged(directory, name, f"cannot be read ({error.strerror})") from error


def _checksum(path: Path, *, sync: bool) -> list[Any]:
    size = total = 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            size += len(block)
            total = zlib.crc32(block, total)
        if sync:
            os.fsync(file.fileno())
    return [size, f"{total:08x}"]


def _damaged(directory: Path, name: str, what: str) -> DamagedError:
    return DamagedError(f"{directory / name} {what}")
