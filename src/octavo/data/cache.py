"""Files that can be made again, kept between runs under $XDG_CACHE_HOME/octavo or ~/.cache/octavo."""

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_directory() -> Path:
    """Where files are kept, by the XDG rules: a relative $XDG_CACHE_HOME counts as none."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "octavo"


def cached(name: str, write: Callable[[Path], None]) -> Path | None:
    """The path of a kept file, which `write` makes at first, or None where nothing can be written.

    The file appears under its name when it is whole, so processes that make it at the same time do no harm.
    """
    temporary = None
    try:
        path = cache_directory() / name
        if path.is_file():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        number, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=path.parent)
        os.close(number)
        write(Path(temporary))
        os.replace(temporary, path)
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    return path
