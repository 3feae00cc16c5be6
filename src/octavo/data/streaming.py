"""Datasets of documents that can only be read in order."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from octavo.data.dataset import BatchConfig, Dataset
from octavo.data.packing import Batch, make_batch
from octavo.data.tokenizer import Tokenizer


class DocumentStream(Dataset):
    """Batches of an endless stream of documents.

    The next batch is cheap, a later one reads what is skipped, and an earlier one restarts the stream, so that a batch
    depends on its index alone.

    Args:
      open_epoch: Opens the documents of an epoch, deterministically.
      tokenizer: Encodes them.
      config: The shape of batches.
      details: The description of the data.
    """

    def __init__(
        self,
        open_epoch: Callable[[int], Iterable[str]],
        tokenizer: Tokenizer,
        config: BatchConfig,
        details: dict[str, Any],
    ):
        self.config = config
        self.vocab_size = config.resolve_vocab_size(tokenizer.vocab_size, f"tokenizer_type={tokenizer.name}")
        self._open_epoch, self._details = open_epoch, details
        self.tokenizer = self._tokenizer = tokenizer
        self._next, self._windows = 0, self._iterate_windows()

    def _rows(self, index: int, start: int, stop: int) -> Batch:
        if index < self._next:
            self._next, self._windows = 0, self._iterate_windows()
        rows = []
        while self._next <= index:
            rows = [next(self._windows) for _ in range(self.config.batch_size)]
            self._next += 1
        rows, length = rows[start:stop], self.config.length
        windows = np.zeros((len(rows), length + 1), np.int32)
        for window, row in zip(windows, rows, strict=True):
            window[: row.size] = row
        counts = np.array([row.size - 1 for row in rows])
        eos, bos = self._tokenizer.eos_id, self._tokenizer.start_id
        return make_batch(windows, eos=eos, bos=bos, counts=None if counts.min() == length else counts)

    def _iterate_windows(self) -> Iterator[np.ndarray]:
        """Windows of length + 1 tokens, or fewer where a document is a row of its own."""
        length = self.config.length
        eos = np.array([self._tokenizer.eos_id], np.int32)
        if not self.config.packing:
            for ids in self._iterate_documents():
                yield np.concatenate([eos, ids, eos])[: length + 1]
        buffer = eos
        for ids in self._iterate_documents():
            buffer = np.concatenate([buffer, ids, eos])
            start = 0
            while buffer.size - start > length:
                yield buffer[start : start + length + 1]
                start += length
            buffer = buffer[start:]

    def _iterate_documents(self) -> Iterator[np.ndarray]:
        epoch = 0
        while True:
            is_empty = True
            for text in self._open_epoch(epoch):
                ids = self._tokenizer.tokenize(text).astype(np.int32)
                if ids.size:
                    is_empty = False
                    yield ids
            if is_empty:
                raise ValueError(f"there is no text in {self._details}")
            epoch += 1

    def describe(self) -> dict[str, Any]:
        return self._describe({**self._details, "tokenizer": self._tokenizer.name})
