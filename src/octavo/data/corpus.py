"""Datasets of tokens in one array, in memory or mapped from disk."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from octavo.data.cache import cached
from octavo.data.dataset import BatchConfig, Dataset
from octavo.data.packing import Batch, make_batch
from octavo.data.shuffle import shuffle_epochs
from octavo.data.tokenizer import Tokenizer, make_tokenizer

type Documents = Callable[[str], Iterable[str]]
"""Opens the documents of a split."""

_FORMAT = 1  # of the cached arrays: raise it when the same documents should give other tokens
_CHUNK = 1 << 24


class Corpus(Dataset):
    """Rows of an array of tokens, each once per epoch, shuffled anew in every epoch of training.

    Evaluation reads them in order; its last batch is padded, so that `num_batches` batches are an exact pass.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        config: BatchConfig,
        *,
        eos: int,
        bos: int,
        vocab_size: int,
        tokenizer: Tokenizer | None = None,
        details: dict[str, Any],
    ):
        self.config, self.vocab_size, self.tokenizer = config, vocab_size, tokenizer
        # np.memmap wraps every result; a plain view of the same memory does not.
        self._tokens = tokens.view(np.ndarray)
        self._eos, self._bos, self._details = eos, bos, details
        self._documents = None if config.packing else find_documents(self._tokens, eos)
        self.num_rows = -(-(tokens.size - 1) // config.length) if self._documents is None else self._documents[0].size
        if self.num_rows < 1:
            raise ValueError(f"there is nothing to learn from in {tokens.size} tokens: {details}")

    @property
    def num_batches(self) -> int:
        return -(-self.num_rows // self.config.batch_size)

    def _rows(self, index: int, start: int, stop: int) -> Batch:
        size, length = self.config.batch_size, self.config.length
        if self.config.shuffle:
            rows = shuffle_epochs(index * size + np.arange(start, stop), self.num_rows, self.config.seed)
        else:
            rows = index % self.num_batches * size + np.arange(start, stop)
        existing = np.minimum(rows, self.num_rows - 1)
        if self._documents is None:
            starts = existing * length
            counts = self._tokens.size - 1 - starts
        else:
            starts, counts = (array[existing] for array in self._documents)
        counts = np.where(rows < self.num_rows, np.minimum(counts, length), 0)
        windows = gather_windows(self._tokens, starts, length)
        return make_batch(windows, eos=self._eos, bos=self._bos, counts=None if counts.min() == length else counts)

    def describe(self) -> dict[str, Any]:
        return self._describe({**self._details, "rows": self.num_rows})


def gather_windows(tokens: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """Windows of length + 1 tokens; those beyond the end repeat the last token."""
    index = starts[:, None] + np.arange(length + 1)
    if index.size and index[:, -1].max() >= tokens.size:
        index = np.minimum(index, tokens.size - 1)
    return tokens[index].astype(np.int32)


def find_documents(tokens: np.ndarray, eos: int) -> tuple[np.ndarray, np.ndarray]:
    """The index of the `eos` before each document, and its number of targets. Empty documents are left out.

    >>> find_documents(np.array([9, 1, 2, 9, 9, 3, 9]), eos=9)
    (array([0, 4]), array([3, 2]))
    """
    found = [begin + np.flatnonzero(tokens[begin : begin + _CHUNK] == eos) for begin in range(0, tokens.size, _CHUNK)]
    ends = np.unique(np.concatenate([[0], *found, [tokens.size - 1]])).astype(np.int64)
    sizes = np.diff(ends)
    return ends[:-1][sizes > 1], sizes[sizes > 1]


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """The number of documents, their total bytes, and a hash of them."""

    documents: int
    bytes: int
    sha256: str

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Fingerprint":
        """The fingerprint of texts as UTF-8.

        >>> Fingerprint.of(["a", "b"]) == Fingerprint.of(["ab"])
        False
        """
        digest, documents, size = hashlib.sha256(), 0, 0
        for text in texts:
            data = text.encode("utf-8", errors="replace")
            digest.update(b"%d:" % len(data) + data)
            documents, size = documents + 1, size + len(data)
        return cls(documents, size, digest.hexdigest())


def make_corpus(
    name: str, documents: Documents, config: Any, split: str, batch_config: BatchConfig, details: dict[str, Any]
) -> Corpus:
    """The dataset of the documents of a split, which are tokenized once and cached for later runs."""
    tokenizer = make_tokenizer(config, lambda: documents("train"))
    vocab_size = batch_config.resolve_vocab_size(tokenizer.vocab_size, f"tokenizer_type={tokenizer.name}")
    fingerprint = Fingerprint.of(documents(split))
    if not fingerprint.bytes:
        raise ValueError(f"dataset_type={name}: the {split} split has no text; {details}")
    tokens = _cached_tokens(lambda: documents(split), tokenizer, fingerprint)
    details = {
        "name": name,
        "split": split,
        **details,
        **dataclasses.asdict(fingerprint),
        "tokenizer": tokenizer.name,
        "tokens": tokens.size - 1,
        "bytes_per_token": fingerprint.bytes / (tokens.size - 1),
    }
    special = {"eos": tokenizer.eos_id, "bos": tokenizer.start_id}
    return Corpus(tokens, batch_config, **special, vocab_size=vocab_size, tokenizer=tokenizer, details=details)


def _cached_tokens(texts: Callable[[], Iterable[str]], tokenizer: Tokenizer, fingerprint: Fingerprint) -> np.ndarray:
    """The tokens of all documents with `eos` before and after each, mapped from the cache if it is writable."""
    key = hashlib.sha256(f"{_FORMAT} {fingerprint.sha256} {tokenizer.digest}".encode()).hexdigest()
    path = cached(f"tokens-{key[:32]}.npy", lambda file: np.save(file, _tokenize(texts(), tokenizer)))
    if path is not None:
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError):  # truncated, or not one of ours
            with contextlib.suppress(OSError):
                path.unlink()
    return _tokenize(texts(), tokenizer)


def _tokenize(texts: Iterable[str], tokenizer: Tokenizer) -> np.ndarray:
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    eos = np.array([tokenizer.eos_id], dtype)
    parts = [eos]
    for text in texts:
        parts += [tokenizer.tokenize(text).astype(dtype), eos]
    return np.concatenate(parts)
