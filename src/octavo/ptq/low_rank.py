"""EoRA: a low-rank matrix that makes up for the error of a quantized weight on its inputs.

Liu et al., EoRA: Training-free Compensation for Compressed LLM with Eigenspace Low-Rank Approximation (arXiv
2410.21271). With the Hessian H = V L V^T of the inputs and the error E of a weight, the matrix of rank r with the least
error of the outputs is

    A B,  A = V L^-1/2 U_r S_r,  B = W_r^T        for the singular value decomposition U S W^T = L^1/2 V^T E
"""

import functools

import jax
import jax.numpy as jnp

from octavo._typing import Array, Float


@functools.partial(jax.jit, static_argnames="rank")
def eora(
    error: Float[Array, "s k n"], hessian: Float[Array, "s k k"], *, rank: int
) -> tuple[Float[Array, "s k r"], Float[Array, "s r n"]]:
    """Low-rank factors A and B such that x A B is nearest to x E in the mean square, for the inputs x of a weight.

    Args:
        error: The weights in float minus the quantized ones, inputs as rows.
        hessian: The mean of x x^T, as `Statistics` have it.
        rank: The rank.

    Returns:
        A and B: the outputs x Q of quantized weights become x Q + (x A) B.

    >>> key = jax.random.key(0)
    >>> x, error = jax.random.normal(key, (50, 6)) * jnp.geomspace(0.1, 10, 6)[None], jax.random.normal(key, (6, 4))
    >>> a, b = eora(error[None], (x.T @ x)[None] / 50, rank=2)
    >>> bool(jnp.mean((x @ (error - a[0] @ b[0])) ** 2) < 0.05 * jnp.mean((x @ error) ** 2))
    True
    """
    if not 0 < rank <= min(error.shape[1:]):
        raise ValueError(f"the rank is 1 to {min(error.shape[1:])} for weights of shape {error.shape[1:]}, got {rank}")
    values, vectors = jnp.linalg.eigh(hessian.astype(jnp.float32))
    # Directions that inputs do not have: their weights do not matter.
    used = values > 1e-7 * values[:, -1:]
    root = jnp.sqrt(jnp.where(used, values, 1))
    dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    whitened = jnp.where(used, root, 0)[..., None] * dot(jnp.swapaxes(vectors, 1, 2), error.astype(jnp.float32))
    left, sizes, right = jnp.linalg.svd(whitened, full_matrices=False)
    scaled = left[..., :rank] * sizes[:, None, :rank] * jnp.where(used, 1 / root, 0)[..., None]
    return dot(vectors, scaled), right[:, :rank]
