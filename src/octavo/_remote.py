"""Paths in object stores (`gs://bucket/runs`), as local copies that are downloaded before use and uploaded after.

Locks, atomic renames and fsync need a file system, so everything is written to a local directory first. Uploads are
ordered: the manifest of a checkpoint comes after its other files, and a deleted checkpoint loses its manifest first. So
a checkpoint in the store is complete or, without a manifest, none.
"""

import atexit
import contextlib
import dataclasses
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MANIFEST = "manifest.json"
_UNFINISHED = (".saving", ".replaced", ".removed")
type PathLike = str | os.PathLike[str]


def is_remote(path: PathLike) -> bool:
    """Whether a path is a URL of an object store.

    >>> is_remote("gs://bucket/runs"), is_remote("runs")
    (True, False)
    """
    return "://" in os.fspath(path)


def check(path: PathLike) -> None:
    """Raise for a URL whose scheme is unknown, or whose package is missing."""
    if is_remote(path):
        _store(os.fspath(path))


def local(path: PathLike) -> Path:
    """The local path of a path: its copy if it is remote, which `pull` downloads and `push` uploads."""
    return _mirror(_normal(path)).local if is_remote(path) else Path(path)


def pull(path: PathLike) -> Path:
    """Download a remote file or directory, and return its local path; other paths are returned as they are."""
    if is_remote(path):
        with _store_errors(path):
            _mirror(_normal(path)).pull()
    return local(path)


def push(path: PathLike) -> None:
    """Upload what has changed in the local copy of a remote path, and delete what is gone from it."""
    if is_remote(path):
        with _store_errors(path):
            _mirror(_normal(path)).push()


@contextlib.contextmanager
def _store_errors(path: PathLike) -> Iterator[None]:
    """Raise errors of a store's client, which have classes of their own, as one that names the URL."""
    try:
        yield
    except (OSError, ValueError):
        raise
    except Exception as error:
        raise OSError(
            f"{os.fspath(path)}: the object store raises {type(error).__name__}: {error}; check the credentials and "
            "the endpoint of its client"
        ) from error


def _normal(path: PathLike) -> str:
    return os.fspath(path).rstrip("/")


def _store(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    scheme = url.partition("://")[0]
    try:
        import fsspec
    except ModuleNotFoundError:
        raise ValueError(f"{url}: object stores need the package fsspec: pip install 'octavo[training]'") from None
    try:
        fsspec.get_filesystem_class(scheme)
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise ValueError(f"{url}: the package for {scheme}:// is missing: {error}") from None
    except ValueError:
        known = ", ".join(sorted(fsspec.available_protocols()))
        raise ValueError(f"{url}: fsspec knows no {scheme}://. Known: {known}") from None


@functools.cache
def _root() -> Path:
    root = tempfile.mkdtemp(prefix="octavo-remote-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return Path(root)


@functools.cache
def _mirror(url: str) -> "_Mirror":
    store, path = _store(url)
    return _Mirror(store, path.rstrip("/"), _root() / url.replace("://", "/"))


@dataclasses.dataclass
class _Mirror:
    """A remote path and its local copy; `known` are the files of both, with the local size and time."""

    store: Any
    path: str
    local: Path
    known: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def pull(self) -> None:
        self.store.invalidate_cache()
        if self.store.isfile(self.path):
            self.local.parent.mkdir(parents=True, exist_ok=True)
            self.store.get_file(self.path, str(self.local))
            return
        start, there = len(self.path) + 1, set()
        for found in self.store.find(self.path):
            there.add(name := found[start:])
            target = self.local / name
            if not target.exists() or self.known.get(name) == _stamp(target):  # else it was written here since
                target.parent.mkdir(parents=True, exist_ok=True)
                self.store.get_file(found, str(target))
                self.known[name] = _stamp(target)
        for name in self.known.keys() - there:
            (self.local / name).unlink(missing_ok=True)
            del self.known[name]

    def push(self) -> None:
        files = {self.local.name: self.local} if self.local.is_file() else self._files()
        new = [name for name, file in files.items() if self.known.get(name) != _stamp(file)]
        for name in sorted(new, key=lambda name: name.endswith(_MANIFEST)):
            target = self.path if self.local.is_file() else f"{self.path}/{name}"
            stamp = _stamp(files[name])
            self.store.makedirs(target.rpartition("/")[0], exist_ok=True)
            self.store.put_file(str(files[name]), target)
            self.known[name] = stamp
        for name in sorted(self.known.keys() - files.keys(), key=lambda name: not name.endswith(_MANIFEST)):
            self.store.rm_file(f"{self.path}/{name}")
            del self.known[name]

    def _files(self) -> dict[str, Path]:
        """The files to upload by name: no locks, temporary files, or checkpoints that are being written."""
        found = {}
        for directory, inner, names in os.walk(self.local):
            inner[:] = [name for name in inner if not name.endswith(_UNFINISHED)]
            for name in names:
                file = Path(directory) / name
                if not (name == ".lock" or name.endswith(".tmp")):
                    found[file.relative_to(self.local).as_posix()] = file
        return found


def _stamp(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns
