"""Weights that are a function of their names, so that golden files need not hold them."""

import zlib

import numpy as np


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The values of a tensor: norms near one, matrices that keep the variance of their inputs, small biases."""
    normal = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    if len(shape) == 1:
        return normal * np.float32(0.2) + np.float32(any(word in name.lower() for word in ("norm", "ln_", "scalar")))
    return normal * np.float32(min(shape[-2:]) ** -0.5)
