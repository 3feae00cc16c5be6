"""A shuffled order in which any place can be looked up, without keeping the order.

Adding a key, multiplying by an odd number and folding high bits onto low ones are each bijections of the numbers of b
bits, so rounds of them are one too. Applied again to whatever leaves the range (cycle walking), that is a bijection of
any range: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002.
"""

import dataclasses

import numpy as np

from octavo.data.mixing import key_of

_ROUNDS = 4


@dataclasses.dataclass(frozen=True)
class Permutation:
    """The numbers below `size` in an order that `key` names.

    >>> sorted(Permutation(5, key=1)(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]
    """

    size: int
    key: int

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"a permutation is of one number or more, got size={self.size}")

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """The numbers at these places, each of which is below `size`."""
        bits = (self.size - 1).bit_length()
        keys = [(key_of(self.key, 2 * i), key_of(self.key, 2 * i + 1) | 1) for i in range(_ROUNDS)]
        found = _scramble(places.astype(np.uint64), bits, keys)
        while (outside := found >= self.size).any():
            found[outside] = _scramble(found[outside], bits, keys)
        return found.astype(np.int64)


def _scramble(values: np.ndarray, bits: int, keys: list[tuple[int, int]]) -> np.ndarray:
    mask, fold = np.uint64((1 << bits) - 1), np.uint64(bits // 2 + 1)
    for add, multiply in keys:
        values = (values + np.uint64(add)) * np.uint64(multiply) & mask
        values = values ^ (values >> fold)
    return values


def shuffled(rows: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Which of `size` rows come at these places of an endless sequence that shuffles all of them in every epoch.

    >>> shuffled(np.arange(6), 3, seed=0)[3:].tolist() == shuffled(np.arange(3, 6), 3, seed=0).tolist()
    True
    """
    epochs, places = np.divmod(rows, size)
    found = np.empty_like(places)
    for epoch in range(int(epochs.min()), int(epochs.max()) + 1):
        here = epochs == epoch
        found[here] = Permutation(size, key_of(seed, epoch))(places[here])
    return found
