"""What every dataset is: batches by number."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

from octavo.data.rows import Batch, Ids
from octavo.data.tokenizer import Tokenizer

SPLITS = ("train", "eval")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The shape of batches, and the order in which rows come.

    `reuse` batches are dealt out over and over; 0 is for all of them. `vocab_size` is what the model has, or 0 for as
    many as the tokens need.
    """

    batch_size: int
    length: int
    packing: bool = True
    shuffle: bool = True
    seed: int = 0
    reuse: int = 0
    vocab_size: int = 0

    def __post_init__(self):
        for name, least in {"batch_size": 1, "length": 1, "reuse": 0, "vocab_size": 0}.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                called = {"length": "max_target_length", "reuse": "reuse_example_batch"}.get(name, name)
                raise ValueError(f"{called} is a whole number of at least {least}, got {value!r}")

    @classmethod
    def of(cls, config: Any, split: str, batch_size: int | None = None) -> "Layout":
        """The layout that a training configuration asks for; only training data are shuffled and reused."""
        train = split == "train"
        size = config.per_device_batch_size if batch_size is None else batch_size
        if isinstance(size, float) and size.is_integer():
            size = int(size)
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"per_device_batch_size is a whole number of at least 1, got {size!r}")
        return cls(
            batch_size=size,
            length=config.max_target_length,
            packing=getattr(config, "packing", True),
            shuffle=train,
            seed=getattr(config, "data_shuffle_seed", 0),
            reuse=getattr(config, "reuse_example_batch", 0) if train else 0,
            vocab_size=getattr(config, "vocab_size", 0),
        )

    def vocabulary(self, needed: int, what: str) -> int:
        """The size of the vocabulary, given how many ids something needs."""
        if self.vocab_size and self.vocab_size < needed:
            raise ValueError(
                f"vocab_size={self.vocab_size} is too small: {what} has {needed} ids; set vocab_size={needed} or 0"
            )
        return self.vocab_size or needed


class Dataset(abc.ABC):
    """Batches by number: `batch(i)` is a function of the configuration and `i`, so a run resumes by its step alone."""

    layout: Layout
    vocab_size: int
    tokenizer: Tokenizer | None = None
    """What made the tokens from text, where that is known."""

    def batch(self, index: int) -> Batch:
        """The batch at a place of the sequence: six int32 arrays [batch, length]."""
        index = int(index)
        if index < 0:
            raise ValueError(f"batches are numbered from 0, got {index}")
        return self._batch(index % self.layout.reuse if self.layout.reuse else index)

    def part(self, index: int, start: int, stop: int) -> Batch:
        """The rows from `start` to below `stop` of a batch: what one of several processes reads of it."""
        if not 0 <= start < stop <= self.layout.batch_size:
            raise ValueError(f"rows {start} to {stop} are not within a batch of {self.layout.batch_size}")
        index = index % self.layout.reuse if self.layout.reuse else index
        return self._part(index, start, stop)

    @property
    def batches(self) -> int | None:
        """How many batches hold every row once, or None where that is not known or there is no end."""
        return None

    @abc.abstractmethod
    def _batch(self, index: int) -> Batch: ...

    def _part(self, index: int, start: int, stop: int) -> Batch:
        # Data that can only be read in order are read whole; others override this.
        return {name: rows[start:stop] for name, rows in self._batch(index).items()}

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """What the data are, for logs and reports: a mapping that JSON can hold."""

    @abc.abstractmethod
    def decode(self, ids: Ids) -> str:
        """The text that token ids stand for."""

    def _described(self, details: Mapping[str, Any]) -> dict[str, Any]:
        """Details, with what every dataset says about itself."""
        layout = self.layout
        return {
            **details,
            "vocab_size": self.vocab_size,
            "batch_size": layout.batch_size,
            "max_target_length": layout.length,
            "packing": layout.packing,
            "batches": self.batches,
        }


def check_split(split: str) -> None:
    """Refuse anything but the two splits."""
    if split not in SPLITS:
        raise ValueError(f"a split is one of {', '.join(SPLITS)}, got {split!r}")
