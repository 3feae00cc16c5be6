"""Packages that only some datasets need."""

import importlib
from types import ModuleType


def require(module: str, needed_by: str, install: str) -> ModuleType:
    """A module, or an error that says what needs it and how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"{needed_by} needs the package {package!r}; install it with: pip install {install}", name=package
        ) from None
