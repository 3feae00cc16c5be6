"""`octavo train`."""

from octavo.train.__main__ import main as run

__all__ = ["run"]
