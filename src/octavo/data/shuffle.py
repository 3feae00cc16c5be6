"""Counter-based random numbers and a random-access shuffle: functions of a key and an index alone.

The random numbers are splitmix64's: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.

For the shuffle, adding a key, multiplying by an odd number and xoring high bits into low ones are bijections of b-bit
numbers, hence so are rounds of them. Applied again to results outside the range (cycle walking), they are a bijection
of any range: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002.
"""

import dataclasses
from typing import Any

import numpy as np

_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_ROUNDS = 4


def fold_key(*numbers: int) -> int:
    """A 64-bit key from several numbers, whose order matters.

    >>> fold_key(0, 1) != fold_key(1, 0)
    True
    """
    key = 0
    for number in numbers:
        key = _finalize(key + _GAMMA * (1 + number) & _MASK)
    return key


def random_bits(key: int, count: int, *, start: int = 0) -> np.ndarray:
    """The 64-bit numbers at positions `start` to `start + count` of the sequence of a key.

    >>> random_bits(3, 4)[2:].tolist() == random_bits(3, 2, start=2).tolist()
    True
    """
    positions = np.arange(count, dtype=np.uint64) + np.uint64((start + 1) & _MASK)
    return _finalize(positions * np.uint64(_GAMMA) + np.uint64(key))


def to_uniform(bits: np.ndarray) -> np.ndarray:
    """Floats in [0, 1) from 64-bit numbers.

    >>> to_uniform(np.array([0, 1 << 63], np.uint64)).tolist()
    [0.0, 0.5]
    """
    return (bits >> np.uint64(11)) * 2.0**-53


@dataclasses.dataclass(frozen=True)
class Permutation:
    """A permutation of the numbers below `size`, determined by `key`.

    >>> sorted(Permutation(5, key=1)(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]
    """

    size: int
    key: int

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"a permutation is of one number or more, got size={self.size}")

    def __call__(self, index: np.ndarray) -> np.ndarray:
        """The numbers at some positions, each of which is below `size`."""
        bits = (self.size - 1).bit_length()
        keys = [(fold_key(self.key, 2 * i), fold_key(self.key, 2 * i + 1) | 1) for i in range(_ROUNDS)]
        found = _scramble(index.astype(np.uint64), bits, keys)
        while (outside := found >= self.size).any():
            found[outside] = _scramble(found[outside], bits, keys)
        return found.astype(np.int64)


def shuffle_epochs(index: np.ndarray, size: int, seed: int) -> np.ndarray:
    """The rows, of `size`, at some positions of an endless sequence with a new permutation in every epoch.

    >>> shuffle_epochs(np.arange(6), 3, seed=0)[3:].tolist() == shuffle_epochs(np.arange(3, 6), 3, seed=0).tolist()
    True
    """
    epochs, positions = np.divmod(index, size)
    found = np.empty_like(positions)
    for epoch in range(int(epochs.min()), int(epochs.max()) + 1):
        here = epochs == epoch
        found[here] = Permutation(size, fold_key(seed, epoch))(positions[here])
    return found


def _finalize(z: Any) -> Any:
    """The finalizer of splitmix64, a bijection of 64-bit numbers: of an int or an array of uint64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def _scramble(values: np.ndarray, bits: int, keys: list[tuple[int, int]]) -> np.ndarray:
    mask, fold = np.uint64((1 << bits) - 1), np.uint64(bits // 2 + 1)
    for add, multiply in keys:
        values = (values + np.uint64(add)) * np.uint64(multiply) & mask
        values = values ^ (values >> fold)
    return values
