"""Files of weights that others write and read: named arrays in, named arrays out, and nothing about models."""

from octavo.files.errors import FileError
from octavo.files.safetensors import Info, Lazy, SafeTensors

__all__ = ["FileError", "Info", "Lazy", "SafeTensors"]
