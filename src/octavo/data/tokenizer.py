"""Text to ids and back: the interface, its registry, and bytes as they are."""

import abc
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from octavo.data.packing import Ids
from octavo.numerics import nearest_names

type Texts = Callable[[], Iterable[str]]
"""Opens the training text, document by document, for tokenizers that learn from it."""


class Tokenizer(abc.ABC):
    """Ids for a text. `eos` parts documents in a stream of ids; `bos` is read before a document, often the same."""

    name: str
    vocab_size: int
    eos: int
    bos: int

    @abc.abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, without `bos` and `eos`."""

    @abc.abstractmethod
    def decode(self, ids: Ids) -> str:
        """The text that ids stand for."""

    @property
    @abc.abstractmethod
    def digest(self) -> str:
        """Differs between tokenizers that give a text different ids."""

    def files(self) -> dict[str, bytes]:
        """The files that a run keeps so that its model can be used on text later; none if it cannot say."""
        return {}


class Bytes(Tokenizer):
    """The bytes of UTF-8 text, with 256 ids and no more: byte 255 cannot occur in it, and parts documents.

    >>> Bytes().encode("né").tolist(), Bytes().decode([255, 110, 195, 169, 255])
    ([110, 195, 169], 'né')
    """

    name = "byte"
    vocab_size = 256
    eos = bos = 255

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8)

    def decode(self, ids: Ids) -> str:
        return bytes(int(i) for i in np.asarray(ids).reshape(-1) if 0 <= i < self.eos).decode("utf-8", errors="replace")

    @property
    def digest(self) -> str:
        return hashlib.sha256(b"octavo byte 255").hexdigest()

    def files(self) -> dict[str, bytes]:
        return {"octavo_tokenizer.json": b'{"bytes": true}'}


type TokenizerMaker = Callable[[Any, Texts], Tokenizer]

_makers: dict[str, TokenizerMaker] = {}


def register_tokenizer(name: str, maker: TokenizerMaker, *, replace: bool = False) -> None:
    """Make a tokenizer known by a name; `maker` takes the configuration and what opens the training text."""
    if name in _makers and not replace:
        raise ValueError(f"a tokenizer named {name!r} exists; choose another name or pass replace=True")
    _makers[name] = maker


def tokenizers() -> tuple[str, ...]:
    """The names of all tokenizers, sorted."""
    return tuple(sorted(_makers))


def make_tokenizer(config: Any, texts: Texts) -> Tokenizer:
    """The tokenizer that `tokenizer_type` names."""
    name = getattr(config, "tokenizer_type", "byte")
    if name not in _makers:
        raise ValueError(f"unknown tokenizer_type {name!r}: {nearest_names(name, tokenizers())}")
    return _makers[name](config, texts)


register_tokenizer("byte", lambda config, texts: Bytes())
