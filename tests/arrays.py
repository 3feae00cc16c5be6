"""Arrays for tests, made without compiling a program for each shape."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed, *shape, std=1.0):
    """Normally distributed float32 values."""
    return jnp.asarray((std * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32))


def random_params(abstract, seed=0):
    """Parameters of these shapes and dtypes, as the initializers of `octavo.models` scale them.

    Compiled, the initialization of a small model takes XLA longer than the model does.
    """
    rng = np.random.default_rng(seed)

    def leaf(path, x):
        kind = path[-1].key
        if kind not in ("kernel", "embedding"):
            return jnp.asarray(np.full(x.shape, kind == "scale"), x.dtype)
        std = x.shape[-2 if kind == "kernel" else -1] ** -0.5
        return jnp.asarray((std * np.clip(rng.standard_normal(x.shape), -2, 2)).astype(x.dtype))

    return jax.tree_util.tree_map_with_path(leaf, abstract)
