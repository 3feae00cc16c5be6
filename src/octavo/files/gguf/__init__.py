"""GGUF, the file of llama.cpp: read with all checks, written with the common types, and its tokenizer."""

from octavo.files.gguf.header import Info
from octavo.files.gguf.reader import Gguf
from octavo.files.gguf.tokenizer import GgufTokenizer, tokenizer_of
from octavo.files.gguf.types import TYPES, TensorType
from octavo.files.gguf.writer import Tensor, write_gguf

__all__ = ["TYPES", "Gguf", "GgufTokenizer", "Info", "Tensor", "TensorType", "tokenizer_of", "write_gguf"]
