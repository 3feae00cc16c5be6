"""GGUF, the file format of llama.cpp: a reader that validates, a writer of the common types, and tokenizers."""

from octavo.files.gguf.header import Info
from octavo.files.gguf.imatrix import read_imatrix, write_imatrix
from octavo.files.gguf.reader import Gguf
from octavo.files.gguf.tokenizer import GgufTokenizer, tokenizer_metadata, tokenizer_of
from octavo.files.gguf.types import TYPES, TensorType
from octavo.files.gguf.writer import Tensor, write_gguf

__all__ = [
    "TYPES",
    "Gguf",
    "GgufTokenizer",
    "Info",
    "Tensor",
    "TensorType",
    "read_imatrix",
    "tokenizer_metadata",
    "tokenizer_of",
    "write_gguf",
    "write_imatrix",
]
