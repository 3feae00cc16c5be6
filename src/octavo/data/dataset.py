"""The interface of datasets: batches by index."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo.data.packing import Batch, Ids
from octavo.data.tokenizer import Tokenizer

_OPTIONS = {"batch_size": "per_device_batch_size", "length": "max_target_length", "reuse": "reuse_example_batch"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The shape of batches and the order of rows.

    Args:
      batch_size: The number of rows of a batch.
      length: The number of tokens of a row.
      packing: Whether rows hold several documents; otherwise each row is the start of one.
      shuffle: Whether rows are shuffled.
      seed: The seed of the shuffle.
      reuse: The number of batches that are repeated endlessly; 0 for all.
      vocab_size: The vocabulary of the model; 0 for the smallest that holds the tokens.
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
                raise ValueError(f"{_OPTIONS.get(name, name)} is a whole number of at least {least}, got {value!r}")

    @classmethod
    def from_config(cls, config: Any, split: str, batch_size: int | None = None) -> "BatchConfig":
        """From a training configuration; only training data are shuffled and reused."""
        train = split == "train"
        size = config.per_device_batch_size if batch_size is None else batch_size
        return cls(
            batch_size=int(size) if isinstance(size, float) and size.is_integer() else size,
            length=config.max_target_length,
            packing=getattr(config, "packing", True),
            shuffle=train,
            seed=getattr(config, "data_shuffle_seed", 0),
            reuse=getattr(config, "reuse_example_batch", 0) if train else 0,
            vocab_size=getattr(config, "vocab_size", 0),
        )

    def resolve_vocab_size(self, needed: int, source: str) -> int:
        """The size of the vocabulary, which must hold the `needed` ids of `source`."""
        if self.vocab_size and self.vocab_size < needed:
            raise ValueError(
                f"vocab_size={self.vocab_size} is too small: {source} has {needed} ids; set vocab_size={needed} or 0"
            )
        return self.vocab_size or needed


class Dataset(abc.ABC):
    """Batches by index: `batch(i)` is a function of the configuration and `i`, so a run resumes by its step alone."""

    config: BatchConfig
    vocab_size: int
    tokenizer: Tokenizer | None = None
    """The tokenizer of the text, if known."""

    def batch(self, index: int) -> Batch:
        """The batch at an index: six int32 arrays [batch, length]."""
        return self.batch_rows(index, 0, self.config.batch_size)

    def batch_rows(self, index: int, start: int, stop: int) -> Batch:
        """Rows `start` to `stop` of a batch: what one of several processes reads."""
        index = int(index)
        if index < 0:
            raise ValueError(f"batches are numbered from 0, got {index}")
        if not 0 <= start < stop <= self.config.batch_size:
            raise ValueError(f"rows {start} to {stop} are not within a batch of {self.config.batch_size}")
        return self._rows(index % self.config.reuse if self.config.reuse else index, start, stop)

    @property
    def num_batches(self) -> int | None:
        """The number of batches that hold every row once, or None if unknown or endless."""
        return None

    @abc.abstractmethod
    def _rows(self, index: int, start: int, stop: int) -> Batch: ...

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """A description of the data for logs and reports, as JSON."""

    def decode(self, ids: Ids) -> str:
        """The text of token ids; the ids as numbers without a tokenizer."""
        if self.tokenizer is None:
            return " ".join(str(int(i)) for i in np.asarray(ids).reshape(-1))
        return self.tokenizer.decode(ids)

    def _describe(self, details: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **details,
            "vocab_size": self.vocab_size,
            "batch_size": self.config.batch_size,
            "max_target_length": self.config.length,
            "packing": self.config.packing,
            "batches": self.num_batches,
        }
