"""Safetensors files and folders of them, read and written without any other library."""

from octavo.files.safetensors.dtypes import Info
from octavo.files.safetensors.read import SafeTensors
from octavo.files.safetensors.write import Lazy, write

__all__ = ["Info", "Lazy", "SafeTensors", "write"]
