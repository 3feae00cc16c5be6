"""Errors of weight files."""

from collections.abc import Collection
from typing import Any

from octavo._names import did_you_mean


class FileError(ValueError):
    """A weight file is invalid or unsupported; the message says which file, what is wrong, and what to try."""


def missing_tensor_error(path: Any, name: str, known: Collection[str]) -> FileError:
    """The error of a file that does not have a tensor."""
    hint = did_you_mean(name, known, most=3, cutoff=0.6) or f"it has {len(known)} others"
    return FileError(f"{path} has no tensor {name!r}; {hint.rstrip()}")
