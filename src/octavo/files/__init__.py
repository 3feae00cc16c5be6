"""Weight files of other programs as named arrays, independent of models."""

from octavo.files.errors import FileError
from octavo.files.safetensors import Info, Lazy, SafeTensors

__all__ = ["FileError", "Info", "Lazy", "SafeTensors"]
