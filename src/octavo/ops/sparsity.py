"""N:M sparsity: keep the n values of largest magnitude of every m along an axis."""

import jax
import jax.numpy as jnp

from octavo import _sharding
from octavo._typing import Array, Bool, Float


def nm_mask(x: Float[Array, "..."], n: int, m: int, *, axis: int) -> Bool[Array, "..."]:
    """The mask of the values to keep; ties go to the first.

    Args:
      x: the weights.
      n: how many values to keep of every m.
      m: the group size, which divides the axis.
      axis: the axis of the groups.

    Returns:
      A mask of the shape of `x`.

    >>> nm_mask(jnp.asarray([3.0, -1.0, 0.5, -4.0]), 2, 4, axis=0).tolist()
    [True, False, False, True]
    """
    size = x.shape[axis]
    if size % m:
        raise ValueError(f"{n}:{m} sparsity does not divide an axis of size {size}")
    magnitude = jnp.abs(jnp.moveaxis(jax.lax.stop_gradient(x), axis, -1))
    groups = _sharding.split(magnitude, [*((d,) for d in magnitude.shape[:-1]), (size // m, m)])
    rank = jnp.argsort(jnp.argsort(-groups, axis=-1, stable=True), axis=-1)
    return jnp.moveaxis(_sharding.merge(rank < n, [*(1 for _ in magnitude.shape[:-1]), 2]), -1, axis)
