"""Batches of tokens by index, from text, token files, other libraries' loaders, or synthetic data."""

from octavo.data.dataset import BatchConfig, Dataset
from octavo.data.packing import KEYS, Batch
from octavo.data.registry import datasets, make_dataset, register_dataset
from octavo.data.subwords import SubwordTokenizer
from octavo.data.token_files import TokensHeader, read_tokens, write_tokens
from octavo.data.tokenizer import ByteTokenizer, Tokenizer, make_tokenizer, register_tokenizer, tokenizers

__all__ = [
    "KEYS",
    "Batch",
    "BatchConfig",
    "ByteTokenizer",
    "Dataset",
    "SubwordTokenizer",
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
