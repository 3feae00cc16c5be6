"""Random Hadamard rotations of both operands of a matmul. `rotate=` of a rule rotates and quantizes them."""

import jax
import jax.numpy as jnp

from octavo._typing import Array
from octavo.ops.hadamard import random_signs, rotate


def hadamard_rotate_inputs(
    act: jax.Array,
    weight: jax.Array,
    key: jax.Array | None,
    *,
    row_sign_flip: bool,
    col_sign_flip: bool,
    lhs_reduction_dim: int,
    rhs_reduction_dim: int,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Rotate activations and a weight such that their matmul stays the same.

    As in Qwix, the activations are multiplied by a matrix of ones and minus ones, and the weight by its inverse.

    Args:
        act: The activations.
        weight: The weight.
        key: A PRNG key for random signs.
        row_sign_flip: Whether the rows of the Hadamard matrix have random signs.
        col_sign_flip: Whether its columns have.
        lhs_reduction_dim: The contracted axis of the activations, of a power-of-two size.
        rhs_reduction_dim: That of the weight.

    Returns:
        Both, and a new key.

    >>> x, w = jnp.ones((3, 8)), jnp.ones((8, 2))
    >>> flips = {"row_sign_flip": True, "col_sign_flip": True}
    >>> x, w, _ = hadamard_rotate_inputs(x, w, jax.random.key(0), **flips, lhs_reduction_dim=1, rhs_reduction_dim=0)
    >>> bool(jnp.allclose(x @ w, 8))
    True
    """
    for name, axis in (("lhs_reduction_dim", lhs_reduction_dim), ("rhs_reduction_dim", rhs_reduction_dim)):
        if not isinstance(axis, int):
            raise ValueError(f"{name} is the number of an axis, got {axis!r}")
    size = act.shape[lhs_reduction_dim]
    if weight.shape[rhs_reduction_dim] != size:
        raise ValueError(f"the contracted axes have different sizes: {size} and {weight.shape[rhs_reduction_dim]}")
    if size & (size - 1):
        raise ValueError(
            f"a Hadamard matrix has the size of a power of 2, got an axis of {size}: `rotate=` of a rule rotates blocks"
        )
    signs: list[Array] = []
    if row_sign_flip or col_sign_flip:
        if key is None:
            raise ValueError("random signs need a key: pass jax.random.key(seed)")
        *keys, key = jax.random.split(key, 1 + row_sign_flip + col_sign_flip)
        signs = [random_signs(k, size) for k in keys]
    rows = signs[0] if row_sign_flip else None
    columns = signs[-1] if col_sign_flip else jnp.ones(size)

    def rotated(x: Array, axis: int, scale: float) -> Array:
        along = [size if a == axis % x.ndim else 1 for a in range(x.ndim)]
        return (rotate(x, size, axis=axis, signs=rows) * columns.reshape(along) * scale).astype(x.dtype)

    return rotated(act, lhs_reduction_dim, size**0.5), rotated(weight, rhs_reduction_dim, size**-0.5), key
