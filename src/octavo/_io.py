"""Atomic file writes."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], mode: str = "wb", **kwargs: Any) -> Iterator[IO[Any]]:
    """Open a temporary file next to `path` that replaces it when the block ends without an exception.

    The contents are on the disk before the name is, so that a crash leaves the old file or the new one. Readers never
    see a partial file, and concurrent writers do not mix.

    Args:
      path: The file to replace.
      mode: A mode for writing, as of `open`.
      **kwargs: Further arguments of `open`, such as `encoding`.
    """
    path = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        os.fchmod(handle, 0o666 & ~_umask())
        with open(handle, mode, **kwargs) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    sync_directory(path.parent)


def atomic_write(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write a file atomically: `atomic_file` for contents that are in memory."""
    binary = isinstance(data, bytes)
    with atomic_file(path, "wb" if binary else "w", **({} if binary else {"encoding": "utf-8"})) as file:
        file.write(data)


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Flush the entries of a directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0o22)
    os.umask(mask)
    return mask
