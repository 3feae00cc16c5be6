"""The manifest of a checkpoint: size and CRC-32 of every other file, written last."""

import json
import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from octavo._io import atomic_write, sync_directory
from octavo.checkpoint.errors import CheckpointError, DamagedError

NAME = "manifest.json"
VERSION = 1

EVERY_FILE: Callable[[str], bool] = lambda _: True  # noqa: E731
_BLOCK = 1 << 20
_CHANGED = "has other contents than were written (its checksum differs)"


def write(directory: Path, step: int) -> None:
    """Flush every file of a directory to disk, then write the manifest that lists them."""
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(lambda path: _checksum(path, sync=True), paths))
    files = {path.relative_to(directory).as_posix(): found for path, found in zip(paths, sums, strict=True)}
    body = {"version": VERSION, "step": step, "files": files}
    for path in [directory, *directory.rglob("*")]:
        if path.is_dir():
            sync_directory(path)
    atomic_write(directory / NAME, json.dumps({**body, "crc32": _own_checksum(body)}))


def verify(directory: Path, step: int | None = None, *, contents: Callable[[str], bool] | None = None) -> int:
    """Raise DamagedError unless the files agree with the manifest.

    Args:
      directory: The folder of a checkpoint.
      step: The step that it should be of.
      contents: Selects by name the files whose checksums are compared; sizes always are.

    Returns:
      The step that the manifest names.
    """
    manifest = _read_manifest(directory)
    if step is not None and manifest["step"] != step:
        raise DamagedError(f"{directory / NAME} is of step {manifest['step']}: the folder was renamed")
    for name, (size, _) in manifest["files"].items():
        try:
            found = (directory / name).stat().st_size
        except OSError as error:
            raise DamagedError(f"{directory / name} is missing ({error.strerror})") from error
        if found != size:
            raise DamagedError(f"{directory / name} has {found} bytes instead of {size}")

    def compare(name: str) -> None:
        try:
            sums = _checksum(directory / name, sync=False)
        except OSError as error:
            raise DamagedError(f"{directory / name} cannot be read ({error.strerror})") from error
        if sums != manifest["files"][name]:
            raise DamagedError(f"{directory / name} {_CHANGED}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(compare, [name for name in manifest["files"] if contents is not None and contents(name)]))
    return manifest["step"]


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / NAME
    try:
        manifest = json.loads(path.read_bytes())
        intact = manifest.pop("crc32") == _own_checksum(manifest)
    except OSError as error:
        raise DamagedError(f"{path} is missing ({error.strerror})") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedError(f"{path} is no manifest ({error})") from error
    if not intact:
        raise DamagedError(f"{path} {_CHANGED}")
    if manifest["version"] > VERSION:
        raise CheckpointError(
            f"{directory} was written by a newer Octavo (layout {manifest['version']}); update to read it"
        )
    return manifest


def _own_checksum(body: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"


def _checksum(path: Path, *, sync: bool) -> list[Any]:
    size = total = 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            size += len(block)
            total = zlib.crc32(block, total)
        if sync:
            os.fsync(file.fileno())
    return [size, f"{total:08x}"]
