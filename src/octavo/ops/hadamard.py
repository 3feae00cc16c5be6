"""Blockwise Hadamard rotation along an axis: it spreads outliers, and cancels out in a matmul.

Ashkboos et al., QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs (2024): (x H)(H^T w) = x w for orthogonal H.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from octavo import _sharding
from octavo._typing import Array, Float, PRNGKeyArray


@functools.cache
def hadamard_matrix(size: int) -> np.ndarray:
    """Sylvester's orthogonal, symmetric Hadamard matrix of a power-of-two size."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(size)).astype(np.float32)


def random_signs(key: PRNGKeyArray, size: int) -> Float[Array, " n"]:
    """Random signs, as float32, for a random rotation of an axis of this size."""
    return jax.random.rademacher(key, (size,), jnp.float32)


def rotate(
    x: Float[Array, "..."], block: int, *, axis: int, signs: Float[Array, " n"] | None = None
) -> Float[Array, "..."]:
    """Multiply blocks along an axis by a Hadamard matrix; without signs, the rotation is its own inverse.

    Args:
      x: the array to rotate.
      block: the block size, a power of two that divides the axis. A shorter axis of a power of two is one block.
      axis: the axis to rotate along.
      signs: signs of the values along the axis, by which they are multiplied first: a random rotation.

    Returns:
      The rotated array, in float32.
    """
    size = x.shape[axis]
    block = min(block, max(size, 1))
    if size % block or block & (block - 1):
        raise ValueError(f"a Hadamard rotation with blocks of {block} does not divide an axis of size {size}")
    axis %= x.ndim
    if axis < x.ndim - 1 and _sharding.explicit(x) is None:
        return _rotate_in_place(x, block, axis, signs)
    x = jnp.moveaxis(x, axis, -1)
    blocks = x.reshape(*x.shape[:-1], size // block, block).astype(jnp.float32)
    if signs is not None:
        blocks = blocks * signs.reshape((1,) * (x.ndim - 1) + blocks.shape[-2:])
    with jax.named_scope("hadamard"):
        rotated = blocks @ hadamard_matrix(block)
    return jnp.moveaxis(rotated.reshape(x.shape), -1, axis)


def _rotate_in_place(x: Array, block: int, axis: int, signs: Array | None) -> Array:
    """The same along an axis that is not the last, by a matmul for each block: on CPUs transposes are slow."""
    count, lead, rest = x.shape[axis] // block, math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    blocks = x.reshape(lead * count, block, rest).astype(jnp.float32)
    matrix = jnp.broadcast_to(hadamard_matrix(block), (lead, count, block, block))
    if signs is not None:
        matrix = matrix * signs.reshape(1, count, 1, block)  # exact: signs are of what is multiplied first
    with jax.named_scope("hadamard"):
        numbers = (((2,), (1,)), ((0,), (0,)))
        rotated = jax.lax.dot_general(matrix.reshape(lead * count, block, block), blocks, numbers)
    return rotated.reshape(x.shape)


def walsh_hadamard(x: Float[Array, "..."], block: int) -> Float[Array, "..."]:
    """`rotate` along the last axis by additions, which are no matmul that rules could quantize; in the dtype of `x`.

    >>> x = jnp.arange(8.0)
    >>> bool(jnp.allclose(walsh_hadamard(x, 4), rotate(x, 4, axis=-1)))
    True
    """
    wide = x.astype(jnp.float32) / np.float32(np.sqrt(block))
    size = 1
    with jax.named_scope("hadamard"):
        while size < block:
            pairs = wide.reshape(*x.shape[:-1], -1, 2, size)
            first, second = pairs[..., 0, :], pairs[..., 1, :]
            wide = jnp.stack([first + second, first - second], axis=-2)
            size *= 2
    return wide.reshape(x.shape).astype(x.dtype)
