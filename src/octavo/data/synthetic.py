"""Synthetic data: one batch of random tokens, or a language with a known entropy."""

import math
from typing import Any

import numpy as np

from octavo._names import unknown_name
from octavo.data.dataset import BatchConfig, Dataset
from octavo.data.packing import Batch, make_batch
from octavo.data.shuffle import fold_key, random_bits, to_uniform

_VOCAB_SIZE = 256
_LANGUAGE = 1905  # the seed of the one language of each vocabulary size
_CLASSES = 4
_PROBABILITIES = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
_NO_EOS = -1


class _Synthetic(Dataset):
    def __init__(self, config: BatchConfig, split: str, seed: int):
        self.config = config
        self.vocab_size = config.vocab_size or _VOCAB_SIZE
        self._key = fold_key(seed, split == "eval")


class Fixed(_Synthetic):
    """The same batch of random tokens at every step: MaxText's synthetic data, which can only be memorized."""

    def __init__(self, config: BatchConfig, split: str):
        super().__init__(config, split, seed=0)

    def _rows(self, index: int, start: int, stop: int) -> Batch:
        del index
        shape = self.config.batch_size, self.config.length + 1
        tokens = random_bits(self._key, math.prod(shape)) % np.uint64(self.vocab_size)
        return make_batch(tokens.astype(np.int32).reshape(shape)[start:stop], eos=_NO_EOS, bos=_NO_EOS)

    @property
    def num_batches(self) -> int:
        return 1

    def describe(self) -> dict[str, Any]:
        return self._describe({"name": "synthetic", "kind": "fixed"})


class Language(_Synthetic):
    """Samples of a Markov chain of order two, new ones in every batch, whose entropy is known exactly.

    The distribution of a token depends on the last token and the class of the one before it, one of four. Each of these
    states has five successors, with probabilities 1/2, 1/4, 1/8, 1/16 and 1/16. So every token after the first one, 0,
    has the same conditional entropy, and no model has a lower expected loss: `entropy`, in nats.

    >>> language = Language(BatchConfig(batch_size=2, length=8), "train")
    >>> round(language.entropy, 4), language.batch(3)["targets"].shape
    (1.2997, (2, 8))
    """

    def __init__(self, config: BatchConfig, split: str):
        super().__init__(config, split, seed=config.seed)
        if self.vocab_size <= 2 * _PROBABILITIES.size:
            raise ValueError(
                f"the synthetic language needs a vocab_size above {2 * _PROBABILITIES.size}, got {self.vocab_size}"
            )
        self.successors = _successors(self.vocab_size)
        # From a state and a choice to the next state, both premultiplied by the number of choices.
        previous = np.tile(np.arange(self.vocab_size), _CLASSES)
        after = previous[:, None] % _CLASSES * self.vocab_size + self.successors
        self._after = (after * _PROBABILITIES.size).reshape(-1).tolist()

    @property
    def entropy(self) -> float:
        """The conditional entropy of a token in nats: the lowest expected loss."""
        return float(-np.sum(_PROBABILITIES * np.log(_PROBABILITIES)))

    def _rows(self, index: int, start: int, stop: int) -> Batch:
        size, length = stop - start, self.config.length
        first = index * self.config.batch_size + start
        bits = random_bits(self._key, size * length, start=first * length)
        choices = np.searchsorted(np.cumsum(_PROBABILITIES)[:-1], to_uniform(bits), side="right")
        # Step by step, on lists: twice as fast as a NumPy call per column.
        after, states = self._after, []
        for row in choices.reshape(size, length).tolist():
            state = 0
            states.append(state)
            for choice in row:
                state = after[state + choice]
                states.append(state)
        tokens = np.array(states).reshape(size, length + 1) // _PROBABILITIES.size % self.vocab_size
        return make_batch(tokens.astype(np.int32), eos=_NO_EOS, bos=_NO_EOS)

    def probabilities(self, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """The true probability of each target given its input and the input before that, arrays [batch, length]."""
        before = np.pad(inputs, ((0, 0), (1, 0)))[:, :-1]
        known = self.successors[before % _CLASSES * self.vocab_size + inputs]
        return np.sum((known == targets[..., None]) * _PROBABILITIES, axis=-1)

    def describe(self) -> dict[str, Any]:
        return self._describe({"name": "synthetic", "kind": "language", "entropy": self.entropy})


def _successors(vocab_size: int) -> np.ndarray:
    """The distinct successors of each state [classes * vocab_size, choices], never token 0."""
    states, choices, tokens = _CLASSES * vocab_size, _PROBABILITIES.size, vocab_size - 1
    first = random_bits(fold_key(_LANGUAGE, 0), states) % np.uint64(tokens)
    stride = 1 + random_bits(fold_key(_LANGUAGE, 1), states) % np.uint64((tokens - 1) // (choices - 1))
    index = first[:, None] + stride[:, None] * np.arange(choices, dtype=np.uint64)
    return (1 + index % np.uint64(tokens)).astype(np.int32)


_KINDS = {"fixed": Fixed, "language": Language}


def make_synthetic(config: Any, split: str, batch_config: BatchConfig) -> Dataset:
    """The synthetic data of `synthetic_kind`."""
    kind = getattr(config, "synthetic_kind", "language")
    if kind not in _KINDS:
        raise ValueError(f"unknown synthetic_kind {kind!r}: {unknown_name(kind, _KINDS)}")
    return _KINDS[kind](batch_config, split)
