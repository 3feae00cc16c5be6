"""QEP of one matrix, [outputs, inputs]: the correction of `octavo.ptq.qep`."""

import jax

from octavo.ptq.qep import correct_drift


def compute_qep_stats(X_q: jax.Array, X_float: jax.Array) -> dict[str, jax.Array]:  # noqa: N803
    """The Hessian of quantized inputs, [inputs, samples], and their covariance with what quantization changed."""
    return {"hessian": X_q @ X_q.T, "hessian_delta": (X_float - X_q) @ X_q.T}


def weight_correct(
    W: jax.Array,  # noqa: N803
    H: jax.Array,  # noqa: N803
    H_delta: jax.Array,  # noqa: N803
    *,
    correction_factor: float = 0.5,
    damping_factor: float = 0.01,
) -> jax.Array:
    """The weight that gives the outputs of float inputs for quantized inputs, as far as it can.

    Args:
        W: The weight, [outputs, inputs].
        H: The Hessian of quantized inputs.
        H_delta: Their covariance with the change, as `compute_qep_stats` returns it.
        correction_factor: The share of the change that is corrected for.
        damping_factor: The share of the mean of the Hessian's diagonal that is added to it.
    """
    new = correct_drift(W.T[None], H[None], H_delta[None], strength=correction_factor, damping=damping_factor)
    return new[0].T.astype(W.dtype)
