"""Random numbers by counter: what comes out depends on a key and a position alone, on every machine and NumPy.

The mixer is the finalizer of splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
"""

import numpy as np

_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(values: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit numbers that looks random.

    >>> mix(np.array([1], np.uint64)).item() == 0x5692161D100B05E5
    True
    """
    z = values.astype(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def key_of(*numbers: int) -> int:
    """One 64-bit key from several numbers, in which their order matters.

    >>> key_of(0, 1) != key_of(1, 0)
    True
    """
    key = 0
    for number in numbers:
        key = (key + _GAMMA * (1 + number)) & _MASK
        key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        key = (key ^ (key >> 27)) * 0x94D049BB133111EB & _MASK
        key ^= key >> 31
    return key


def draws(key: int, count: int, *, start: int = 0) -> np.ndarray:
    """The 64-bit numbers at positions `start` to `start + count` of the sequence that a key names.

    >>> draws(3, 4)[2:].tolist() == draws(3, 2, start=2).tolist()
    True
    """
    positions = np.arange(count, dtype=np.uint64) + np.uint64((start + 1) & _MASK)
    return mix(positions * np.uint64(_GAMMA) + np.uint64(key))


def uniform(bits: np.ndarray) -> np.ndarray:
    """Floats in [0, 1) from 64-bit numbers.

    >>> uniform(np.array([0, 1 << 63], np.uint64)).tolist()
    [0.0, 0.5]
    """
    return (bits >> np.uint64(11)) * 2.0**-53
