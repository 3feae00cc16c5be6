"""Packages that only some features need."""

import importlib
from types import ModuleType


def installed_version(distribution: str) -> str | None:
    """The version of a distribution, or None if it is not installed."""
    from importlib import metadata  # not needed by `octavo --help`, which should not wait for it

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def import_optional(module: str, needed_by: str, install: str) -> ModuleType:
    """Import a module, or raise an error that says what needs it and how to install it.

    Args:
      module: The name of the module.
      needed_by: The feature or option that needs it.
      install: The arguments of `pip install`.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"{needed_by} needs the package {package!r}; install it with: pip install {install}", name=package
        ) from None
