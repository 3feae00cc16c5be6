"""Rows from documents that can only be read in order."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from octavo.data.dataset import Dataset, Layout
from octavo.data.rows import Batch, Ids, assemble
from octavo.data.tokenizer import Tokenizer

type Open = Callable[[int], Iterable[str]]
"""Opens the documents for an epoch, which are the same whenever they are opened."""


class Stream(Dataset):
    """Batches of an endless stream of documents. Going on is cheap; skipping ahead reads what is skipped; going back
    opens the stream again and skips from its start. So a batch depends on its number alone here too."""

    def __init__(self, opened: Open, tokenizer: Tokenizer, layout: Layout, details: dict[str, Any]):
        self.layout = layout
        self.vocab_size = layout.vocabulary(tokenizer.vocab_size, f"tokenizer_type={tokenizer.name}")
        self._open, self._details = opened, details
        self.tokenizer = self._tokenizer = tokenizer
        self._next, self._windows = 0, self._rows()

    def _batch(self, index: int) -> Batch:
        if index < self._next:
            self._next, self._windows = 0, self._rows()
        rows = []
        while self._next <= index:
            rows = [next(self._windows) for _ in range(self.layout.batch_size)]
            self._next += 1
        length = self.layout.length
        windows = np.zeros((len(rows), length + 1), np.int32)
        for window, row in zip(windows, rows, strict=True):
            window[: row.size] = row
        counts = np.array([row.size - 1 for row in rows])
        eos, bos = self._tokenizer.eos, self._tokenizer.bos
        return assemble(windows, eos=eos, bos=bos, counts=None if counts.min() == length else counts)

    def _rows(self) -> Iterator[np.ndarray]:
        """Windows of length + 1 tokens, shorter ones where a document is a row of its own."""
        length = self.layout.length
        end = np.array([self._tokenizer.eos], np.int32)
        if not self.layout.packing:
            for ids in self._documents():
                yield np.concatenate([end, ids, end])[: length + 1]
        held = end
        for ids in self._documents():
            held = np.concatenate([held, ids, end])
            place = 0
            while held.size - place > length:
                yield held[place : place + length + 1]
                place += length
            held = held[place:]

    def _documents(self) -> Iterator[np.ndarray]:
        epoch = 0
        while True:
            some = False
            for text in self._open(epoch):
                ids = self._tokenizer.encode(text).astype(np.int32)
                if ids.size:
                    some = True
                    yield ids
            if not some:
                raise ValueError(f"there is no text in {self._details}")
            epoch += 1

    def describe(self) -> dict[str, Any]:
        return self._described({**self._details, "tokenizer": self._tokenizer.name})

    def decode(self, ids: Ids) -> str:
        return self._tokenizer.decode(ids)
