"""Rollouts for reinforcement learning: how far an engine's policy is from the trained one, and how to correct for it.

With d = log p_train(token) - log p_rollout(token) of tokens that the rollout sampled (J. Schulman, "Approximating KL
Divergence", 2020):

    k1 = mean(-d)        k3 = mean(e^d - d - 1)        effective sample size = (sum e^d)^2 / (n sum e^2d)

k1 and k3 estimate the KL divergence of the trained policy from the rollout; k3 is never negative and varies less.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from octavo._typing import Array, Float

_MOST = 20.0
"""The largest |d| that is exponentiated: e^20 is far beyond any cap, and its square is finite."""


class Mismatch(NamedTuple):
    """The distance of two policies on the tokens of one; see `mismatch`."""

    k1: Any
    k3: Any
    max: Any
    """The largest |d|."""
    effective_sample_size: Any
    """As a share of the tokens: 1 if the policies agree."""


def token_logprobs(logits: Float[Array, "*batch length vocab"], tokens: Any) -> Float[Array, "*batch length-1"]:
    """The log probability of each token but the first, given those before it, at temperature 1.

    Args:
        logits: The logits at each token.
        tokens: The token ids.

    >>> token_logprobs(jnp.zeros((1, 3, 4)), jnp.asarray([[1, 2, 3]])).tolist() == [[-1.3862943649291992] * 2]
    True
    """
    logits = logits[..., :-1, :].astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, jnp.asarray(tokens)[..., 1:, None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def mismatch(train: Any, rollout: Any, mask: Any = None) -> Mismatch:
    """How far the trained policy is from the one that sampled the tokens.

    Args:
        train: Log probabilities of the tokens by the trained policy.
        rollout: Those by the policy that sampled them.
        mask: Which tokens count; all by default.

    >>> same = mismatch(jnp.asarray([-1.0, -2.0]), jnp.asarray([-1.0, -2.0]))
    >>> float(same.k3), float(same.effective_sample_size)
    (0.0, 1.0)
    """
    difference, mask = _difference(train, rollout, mask)
    count = jnp.maximum(jnp.sum(mask), 1.0)
    ratio = jnp.exp(difference) * mask
    # expm1: e^d - 1 - d of a small d would be lost in rounding.
    k3 = jnp.sum((jnp.expm1(difference) - difference) * mask) / count
    size = jnp.sum(ratio) ** 2 / jnp.maximum(count * jnp.sum(ratio**2), 1e-30)
    return Mismatch(-jnp.sum(difference * mask) / count, k3, jnp.max(jnp.abs(difference) * mask), size)


def importance_weights(train: Any, rollout: Any, mask: Any = None, *, low: float = 0.0, high: float = 2.0) -> Array:
    """Truncated importance weights: min(p_train / p_rollout, high), without a gradient; they multiply a policy loss.

    Args:
        train: Log probabilities of the tokens by the trained policy.
        rollout: Those by the policy that sampled them.
        mask: Which tokens count; the others have the weight 0.
        low: Tokens whose ratio is below it have the weight 0.
        high: The cap of the weights.

    >>> importance_weights(jnp.log(jnp.asarray([0.5, 0.9, 0.1])), jnp.log(jnp.asarray([0.5, 0.1, 0.9])), low=0.5)
    Array([1., 2., 0.], dtype=float32)
    """
    if not 0 <= low < high:
        raise ValueError(f"low={low} and high={high}: weights are kept from low on, and capped at high")
    difference, mask = _difference(train, rollout, mask)
    ratio = jnp.exp(difference)
    return jax.lax.stop_gradient(jnp.where(ratio < low, 0.0, jnp.minimum(ratio, high)) * mask)


def _difference(train: Any, rollout: Any, mask: Any) -> tuple[Array, Array]:
    train, rollout = jnp.asarray(train, jnp.float32), jnp.asarray(rollout, jnp.float32)
    if train.shape != rollout.shape:
        raise ValueError(
            f"log probabilities of {train.shape} and {rollout.shape} tokens: give both for the same tokens, and pad "
            "them with a mask"
        )
    mask = jnp.ones(train.shape, jnp.float32) if mask is None else jnp.asarray(mask).astype(jnp.float32)
    # Padding may hold anything, NaN too.
    difference = jnp.where(mask > 0, jnp.clip(train - rollout, -_MOST, _MOST), 0.0)
    return difference, mask
