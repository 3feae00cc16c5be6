"""Data without files: one batch of noise, or a language that can be learned down to a known loss."""

import math
from typing import Any

import numpy as np

from octavo.data.dataset import Dataset, Layout
from octavo.data.mixing import draws, key_of, uniform
from octavo.data.rows import Batch, Ids, as_numbers, assemble
from octavo.numerics import nearest_names

DEFAULT_VOCABULARY = 256
_LANGUAGE = 1905  # names the one language there is for each vocabulary size
_CLASSES = 4
_CHANCES = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
_NO_EOS = -1


class Fixed(Dataset):
    """Random tokens, the same batch at every step: MaxText's synthetic data, learned only by heart."""

    def __init__(self, layout: Layout, split: str):
        self.layout = layout
        self.vocab_size = layout.vocab_size or DEFAULT_VOCABULARY
        self._key = key_of(0, split == "eval")

    def _batch(self, index: int) -> Batch:
        del index
        shape = self.layout.batch_size, self.layout.length + 1
        tokens = draws(self._key, math.prod(shape)) % np.uint64(self.vocab_size)
        return assemble(tokens.astype(np.int32).reshape(shape), eos=_NO_EOS, bos=_NO_EOS)

    @property
    def batches(self) -> int:
        return 1

    def describe(self) -> dict[str, Any]:
        return self._described({"name": "synthetic", "kind": "fixed"})

    def decode(self, ids: Ids) -> str:
        return as_numbers(ids)


class Language(Dataset):
    """Sentences of a random chain of order two, new ones in every batch, whose entropy is known exactly.

    What may follow is decided by the last token and the class of the one before it, one of four. Each of these states
    has five successors of its own, with chances 1/2, 1/4, 1/8, 1/16 and 1/16. So every token after the first, token 0,
    has the same entropy given what is before it, and no model has a lower expected loss: `entropy`, in nats.

    >>> language = Language(Layout(batch_size=2, length=8), "train")
    >>> round(language.entropy, 4), language.batch(3)["targets"].shape
    (1.2997, (2, 8))
    """

    def __init__(self, layout: Layout, split: str):
        self.layout = layout
        self.vocab_size = layout.vocab_size or DEFAULT_VOCABULARY
        if self.vocab_size <= 2 * _CHANCES.size:
            raise ValueError(
                f"the synthetic language needs a vocab_size above {2 * _CHANCES.size}, got {self.vocab_size}"
            )
        self._key = key_of(layout.seed, split == "eval")
        self.successors = _successors(self.vocab_size)
        # From a state and a choice to the state after it, both already multiplied by the number of choices.
        previous = np.tile(np.arange(self.vocab_size), _CLASSES)
        after = previous[:, None] % _CLASSES * self.vocab_size + self.successors
        self._after = (after * _CHANCES.size).reshape(-1).tolist()

    @property
    def entropy(self) -> float:
        """The entropy of a token given all that is before it, in nats: the lowest expected loss."""
        return float(-np.sum(_CHANCES * np.log(_CHANCES)))

    def _batch(self, index: int) -> Batch:
        return self._part(index, 0, self.layout.batch_size)

    def _part(self, index: int, start: int, stop: int) -> Batch:
        size, length = stop - start, self.layout.length
        first = index * self.layout.batch_size + start
        bits = draws(self._key, size * length, start=first * length)
        choices = np.searchsorted(np.cumsum(_CHANCES)[:-1], uniform(bits), side="right")
        # One step after the other, on lists: twice as fast as a call of NumPy for each column.
        after, states = self._after, []
        for row in choices.reshape(size, length).tolist():
            state = 0
            states.append(state)
            for choice in row:
                state = after[state + choice]
                states.append(state)
        tokens = np.array(states).reshape(size, length + 1) // _CHANCES.size % self.vocab_size
        return assemble(tokens.astype(np.int32), eos=_NO_EOS, bos=_NO_EOS)

    def chances(self, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """The true probability of each target after its input and the input before that, arrays [batch, length]."""
        before = np.pad(inputs, ((0, 0), (1, 0)))[:, :-1]
        known = self.successors[before % _CLASSES * self.vocab_size + inputs]
        return np.sum((known == targets[..., None]) * _CHANCES, axis=-1)

    def describe(self) -> dict[str, Any]:
        return self._described({"name": "synthetic", "kind": "language", "entropy": self.entropy})

    def decode(self, ids: Ids) -> str:
        return as_numbers(ids)


def _successors(vocabulary: int) -> np.ndarray:
    """The tokens that may follow each state [classes * vocabulary, choices], distinct ones and never token 0."""
    states, choices, tokens = _CLASSES * vocabulary, _CHANCES.size, vocabulary - 1
    first = draws(key_of(_LANGUAGE, 0), states) % np.uint64(tokens)
    stride = 1 + draws(key_of(_LANGUAGE, 1), states) % np.uint64((tokens - 1) // (choices - 1))
    places = first[:, None] + stride[:, None] * np.arange(choices, dtype=np.uint64)
    return (1 + places % np.uint64(tokens)).astype(np.int32)


_KINDS = {"fixed": Fixed, "language": Language}


def make_synthetic(config: Any, split: str, layout: Layout) -> Dataset:
    """The synthetic data that `synthetic_kind` names."""
    kind = getattr(config, "synthetic_kind", "language")
    if kind not in _KINDS:
        raise ValueError(f"unknown synthetic_kind {kind!r}: {nearest_names(kind, tuple(_KINDS))}")
    return _KINDS[kind](layout, split)
