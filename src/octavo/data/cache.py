"""Derived files kept between runs under $XDG_CACHE_HOME/octavo or ~/.cache/octavo."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from octavo._io import atomic_file


def cache_directory() -> Path:
    """The cache directory by the XDG rules: a relative $XDG_CACHE_HOME is ignored."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "octavo"


def cached(name: str, write: Callable[[IO[bytes]], Any]) -> Path | None:
    """The path of a cached file, which `write` creates atomically the first time; None if it cannot be written."""
    try:
        path = cache_directory() / name
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(path) as file:
                write(file)
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return None
    return path
