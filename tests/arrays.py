"""Arrays for tests, made without compiling a program for each shape."""

import jax.numpy as jnp
import numpy as np


def normal(seed, *shape, std=1.0):
    """Normally distributed float32 values."""
    return jnp.asarray(std * np.random.default_rng(seed).standard_normal(shape), jnp.float32)
