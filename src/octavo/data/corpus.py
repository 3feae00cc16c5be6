"""Rows from a whole corpus that lies in one array of tokens, in memory or on disk."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from octavo.data.cache import cached
from octavo.data.dataset import Dataset, Layout
from octavo.data.permutation import shuffled
from octavo.data.rows import Batch, Ids, assemble, gather
from octavo.data.tokenizer import Tokenizer, make_tokenizer

type Documents = Callable[[str], Iterable[str]]
"""Opens the documents of a split."""

_FORMAT = 1  # of the kept streams: raise it when the same documents should give other streams
_CHUNK = 1 << 24


class Corpus(Dataset):
    """Rows of a stream of tokens, each of them once in an epoch, in a new order in every epoch of training.

    Evaluation reads them in the stream's order. Its last batch is filled up with rows of padding, then it starts again,
    so `batches` of them are an exact pass.
    """

    def __init__(
        self,
        stream: np.ndarray,
        layout: Layout,
        *,
        eos: int,
        bos: int,
        vocab_size: int,
        decode: Callable[[Ids], str],
        details: dict[str, Any],
    ):
        self.layout, self.vocab_size = layout, vocab_size
        # np.memmap wraps every result it gives out; a plain view of the same memory does not.
        self._stream = stream.view(np.ndarray)
        self._eos, self._bos, self._decode, self._details = eos, bos, decode, details
        predictions = stream.size - 1
        if layout.packing:
            self._found, self.rows = None, -(-predictions // layout.length)
        else:
            self._found = find_documents(self._stream, eos)
            self.rows = self._found[0].size
        if self.rows < 1:
            raise ValueError(f"there is nothing to learn from in {stream.size} tokens: {details}")

    @property
    def batches(self) -> int:
        return -(-self.rows // self.layout.batch_size)

    def _batch(self, index: int) -> Batch:
        return self._part(index, 0, self.layout.batch_size)

    def _part(self, index: int, start: int, stop: int) -> Batch:
        layout = self.layout
        size, length = layout.batch_size, layout.length
        if layout.shuffle:
            rows = shuffled(index * size + np.arange(start, stop), self.rows, layout.seed)
        else:
            rows = index % self.batches * size + np.arange(start, stop)
        here = np.minimum(rows, self.rows - 1)
        if self._found is None:
            starts = here * length
            counts = self._stream.size - 1 - starts
        else:
            starts, counts = (array[here] for array in self._found)
        counts = np.where(rows < self.rows, np.minimum(counts, length), 0)
        windows = gather(self._stream, starts, length)
        return assemble(windows, eos=self._eos, bos=self._bos, counts=None if counts.min() == length else counts)

    def describe(self) -> dict[str, Any]:
        return self._described({**self._details, "rows": self.rows})

    def decode(self, ids: Ids) -> str:
        return self._decode(ids)


def find_documents(stream: np.ndarray, eos: int) -> tuple[np.ndarray, np.ndarray]:
    """Where documents start, at the eos before them, and how many tokens each predicts. Empty ones are left out.

    >>> find_documents(np.array([9, 1, 2, 9, 9, 3, 9]), eos=9)
    (array([0, 4]), array([3, 2]))
    """
    found = [begin + np.flatnonzero(stream[begin : begin + _CHUNK] == eos) for begin in range(0, stream.size, _CHUNK)]
    places = np.unique(np.concatenate([[0], *found, [stream.size - 1]])).astype(np.int64)
    sizes = np.diff(places)
    return places[:-1][sizes > 1], sizes[sizes > 1]


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What identifies documents: how many there are, of how many bytes, and a hash of them."""

    documents: int
    bytes: int
    sha256: str

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Fingerprint":
        """The fingerprint of texts as UTF-8.

        >>> Fingerprint.of(["a", "b"]) == Fingerprint.of(["ab"])
        False
        """
        seen, documents, size = hashlib.sha256(), 0, 0
        for text in texts:
            data = text.encode("utf-8", errors="replace")
            seen.update(b"%d:" % len(data))
            seen.update(data)
            documents, size = documents + 1, size + len(data)
        return cls(documents, size, seen.hexdigest())


def make_corpus(
    name: str, documents: Documents, config: Any, split: str, layout: Layout, details: dict[str, Any]
) -> Corpus:
    """The rows of the documents of a split, which are tokenized once and kept for the next run."""
    tokenizer = make_tokenizer(config, lambda: documents("train"))
    vocab_size = layout.vocabulary(tokenizer.vocab_size, f"tokenizer_type={tokenizer.name}")
    found = Fingerprint.of(documents(split))
    if not found.bytes:
        raise ValueError(f"dataset_type={name}: the {split} split has no text; {details}")
    stream = _stream(lambda: documents(split), tokenizer, found)
    tokens = stream.size - 1
    details = {
        "name": name,
        "split": split,
        **details,
        **dataclasses.asdict(found),
        "tokenizer": tokenizer.name,
        "tokens": tokens,
        "bytes_per_token": found.bytes / tokens,
    }
    corpus = Corpus(
        stream,
        layout,
        eos=tokenizer.eos,
        bos=tokenizer.bos,
        vocab_size=vocab_size,
        decode=tokenizer.decode,
        details=details,
    )
    corpus.tokenizer = tokenizer
    return corpus


def _stream(texts: Callable[[], Iterable[str]], tokenizer: Tokenizer, found: Fingerprint) -> np.ndarray:
    """All documents as ids with eos before and after each, mapped from disk where it could be written."""
    key = hashlib.sha256(f"{_FORMAT} {found.sha256} {tokenizer.digest}".encode()).hexdigest()
    path = cached(f"tokens-{key[:32]}.npy", lambda path: _save(path, _tokenize(texts(), tokenizer)))
    if path is not None:
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError):  # cut short or not ours
            with contextlib.suppress(OSError):
                path.unlink()
    return _tokenize(texts(), tokenizer)


def _tokenize(texts: Iterable[str], tokenizer: Tokenizer) -> np.ndarray:
    dtype = smallest_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.eos], dtype)
    parts = [end]
    for text in texts:
        parts += [tokenizer.encode(text).astype(dtype), end]
    return np.concatenate(parts)


def _save(path: Path, stream: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, stream, allow_pickle=False)


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned integers that hold ids below a vocabulary's size.

    >>> smallest_dtype(256), smallest_dtype(257)
    (dtype('uint8'), dtype('uint16'))
    """
    return np.min_scalar_type(vocab_size - 1)
