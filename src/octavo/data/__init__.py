"""Where does a batch come from? Text, tokens or noise, cut into rows, each batch known by its number."""

import octavo.data.subwords  # noqa: F401  registers its tokenizers
from octavo.data.dataset import Dataset, Layout
from octavo.data.registry import datasets, make_dataset, register_dataset
from octavo.data.rows import KEYS, Batch
from octavo.data.tokenizer import Tokenizer, make_tokenizer, register_tokenizer, tokenizers
from octavo.data.tokens import TokensHeader, read_tokens, write_tokens

__all__ = [
    "KEYS",
    "Batch",
    "Dataset",
    "Layout",
    "Tokenizer",
    "TokensHeader",
    "datasets",
    "make_dataset",
    "make_tokenizer",
    "read_tokens",
    "register_dataset",
    "register_tokenizer",
    "tokenizers",
    "write_tokens",
]
