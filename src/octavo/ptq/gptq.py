"""GPTQ: each input's weights are rounded, and the inputs that follow compensate for the error.

Frantar, Ashkboos, Hoefler and Alistarh, GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers (2023). With H the Hessian of the inputs and U the upper triangular factor of its inverse, H^-1 = U^T U,
for each input j in turn:

    q_j = round(w_j)        e = (w_j - q_j) / U_jj        w_k -= U_jk e  for all k > j

Inputs are taken in the order of decreasing H_jj ("activation order"). The scales are computed beforehand ("static
groups"), so the order does not appear in the result. Updates of inputs beyond the present block of 128 are made once
for each block.

With `drift`, inputs that earlier weights have changed are corrected for (Li et al., GPTAQ: Efficient Finetuning-Free
Quantization for Asymmetric Calibration, arXiv 2504.02692). For inputs x of the quantized model and x_f of
the float one, D = E (x_f - x) x^T:

    P = strength triu(D U^T, 1) U        w_k += P_jk w_j  for all k > j
"""

import functools

import jax
import jax.numpy as jnp

from octavo._typing import Array, Bool, Float
from octavo.numerics import Format
from octavo.ptq.scales import Scales

_BLOCK = 128
_ELEMENTS = 1 << 24
"""Elements of Hessians that are factored at a time."""


def gptq(
    weights: Float[Array, "s k n"],
    hessian: Float[Array, "s k k"],
    scales: Scales,
    fmt: Format,
    *,
    damping: float = 0.01,
    activation_order: bool = True,
    drift: Float[Array, "s k k"] | None = None,
    strength: float = 0.25,
) -> Float[Array, "s k n"]:
    """Round weights to the grids of given scales such that the error of the outputs is small.

    Args:
        weights: Matrices with inputs as rows.
        hessian: The mean of x x^T over inputs x of each matrix.
        scales: The scale and zero point of every weight.
        fmt: The number format.
        damping: The share of the mean of the Hessian's diagonal that is added to it; more where it is still singular.
        activation_order: Whether inputs are rounded in the order of decreasing magnitude.
        drift: The mean of (x_f - x) x^T, for inputs x_f of the float model; the Hessian is that of x.
        strength: The share of the drift that is corrected for.

    Returns:
        The rounded weights, values of the grid.

    >>> import octavo
    >>> key = jax.random.key(0)
    >>> w, x = jax.random.normal(key, (1, 8, 4)), jax.random.normal(key, (100, 2)) @ jnp.ones((2, 8))
    >>> scales, int4 = Scales(jnp.full(w.shape, 0.3)), octavo.get_format("int4")
    >>> rounded, nearest = gptq(w, (x.T @ x)[None] / 100, scales, int4), scales.round(w, int4)
    >>> bool(jnp.mean((x @ (rounded - w)) ** 2) < 0.1 * jnp.mean((x @ (nearest - w)) ** 2))
    True
    """
    size = weights.shape[1]
    batch = max(1, _ELEMENTS // max(1, size * size))
    for share in (damping, max(damping, 0.1), max(damping, 1.0)):
        run = functools.partial(_gptq, fmt=fmt, damping=share, order=activation_order, batch=batch)
        moved = None if drift is None else strength * drift.astype(jnp.float32)
        rounded = run(weights.astype(jnp.float32), hessian.astype(jnp.float32), scales, moved)
        if isinstance(rounded, jax.core.Tracer) or bool(jnp.all(jnp.isfinite(rounded))):
            return rounded
    raise ValueError(
        "the Hessian is not positive definite even if the mean of its diagonal is added to it: it is not the mean of "
        "x x^T over inputs x"
    )


@functools.partial(jax.jit, static_argnames=("fmt", "damping", "order", "batch"))
def _gptq(
    weights: Array,
    hessian: Array,
    scales: Scales,
    drift: Array | None,
    *,
    fmt: Format,
    damping: float,
    order: bool,
    batch: int,
):
    def one(args: tuple[Array, Array, Scales, Array | None]) -> Array:
        w, h, s, moved = args
        by_size = jnp.argsort(-jnp.diagonal(h)) if order else jnp.arange(len(w))
        h, unused = damped(h, damping)
        w = jnp.where(unused[:, None], 0, w)
        factor = inverse_factor(h[by_size][:, by_size])
        correction = None
        if moved is not None:
            dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
            correction = dot(jnp.triu(dot(moved[by_size][:, by_size], factor.T), 1), factor)
        rounded = _round_inputs(w[by_size], factor, s.map(lambda x: x[by_size]), fmt, correction)
        return rounded[jnp.argsort(by_size)]

    return jax.lax.map(one, (weights, hessian, scales, drift), batch_size=batch)


def damped(hessian: Float[Array, "k k"], damping: float) -> tuple[Float[Array, "k k"], Bool[Array, " k"]]:
    """A Hessian with a share of the mean of its diagonal added, so that it has an inverse; and which inputs are unused.

    An input that is always zero has no say in the inverse.
    """
    diagonal = jnp.diagonal(hessian)
    unused = diagonal <= 0
    added = jnp.where(unused, 1, damping * jnp.mean(diagonal))
    return jnp.where(unused[:, None] | unused[None], 0, hessian) + jnp.diag(added), unused


def inverse_factor(hessian: Float[Array, "k k"]) -> Float[Array, "k k"]:
    """The upper triangular U with U^T U = H^-1, without computing the inverse.

    With the order of inputs reversed, H = L L^T; so H = R R^T for the upper triangular R that is L reversed, and
    U = R^-1.
    """
    lower = jnp.linalg.cholesky(hessian[::-1, ::-1])
    identity = jnp.eye(hessian.shape[0], dtype=hessian.dtype)
    return jax.scipy.linalg.solve_triangular(lower, identity, lower=True)[::-1, ::-1]


def _round_inputs(weights: Array, factor: Array, scales: Scales, fmt: Format, correction: Array | None) -> Array:
    """Round all inputs in order, by blocks."""
    size, outputs = weights.shape
    block = min(_BLOCK, size)
    pad = -size % block
    padded = functools.partial(jnp.pad, pad_width=((0, pad), (0, 0)))
    weights, scales = padded(weights), scales.map(functools.partial(padded, constant_values=1))
    factor = jnp.pad(factor, (0, pad)) + jnp.diag(jnp.where(jnp.arange(size + pad) < size, 0.0, 1.0))
    # What an input changes is linear in its error and, with a correction, in its weights.
    effects = (factor,) if correction is None else (factor, -jnp.pad(correction, (0, pad)))
    later = jnp.arange(block)

    def round_block(weights: Array, start: Array) -> tuple[Array, Array]:
        rows = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=block)
        cuts = [rows(effect) for effect in effects]
        own, grid = [rows(cut, axis=1) for cut in cuts], scales.map(rows)

        def round_input(j: Array, carry: tuple[Array, list[Array]]) -> tuple[Array, list[Array]]:
            w, causes = carry
            rounded = grid.map(lambda x: x[j]).round(w[j], fmt)
            new = [(w[j] - rounded) / own[0][j, j], w[j]][: len(causes)]
            for effect, cause in zip(own, new, strict=True):
                w = w - jnp.where(later > j, effect[j], 0)[:, None] * cause[None]
            return w.at[j].set(rounded), [old.at[j].set(cause) for old, cause in zip(causes, new, strict=True)]

        none = [jnp.zeros((block, outputs)) for _ in effects]
        rounded, causes = jax.lax.fori_loop(0, block, round_input, (rows(weights), none))
        after = jnp.where(jnp.arange(weights.shape[0]) >= start + block, 1.0, 0.0)[None]
        for cut, cause in zip(cuts, causes, strict=True):
            weights = weights - jnp.matmul((after * cut).T, cause, precision=jax.lax.Precision.HIGHEST)
        return weights, rounded

    _, rounded = jax.lax.scan(round_block, weights, jnp.arange(0, size + pad, block))
    return rounded.reshape(-1, outputs)[:size]
