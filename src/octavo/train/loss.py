"""What training minimizes: masked cross-entropy of the next token, and what is added to it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from octavo import _sharding
from octavo.models import ModelConfig, apply


class Losses(NamedTuple):
    """Sums over the tokens of a batch, so that microbatches add up; `weights` is the number of tokens."""

    lm: jax.Array
    z: jax.Array
    load_balance: jax.Array
    weights: jax.Array


def total_weights(batch: dict[str, Any]) -> jax.Array:
    """The number of tokens that count: all but padding.

    >>> total_weights({"targets_segmentation": jnp.asarray([[1, 1, 2, 0]])}).item()
    3.0
    """
    return jnp.sum(batch["targets_segmentation"] != 0).astype(jnp.float32)


def make_loss(model: ModelConfig, *, z_loss: float = 0.0, load_balance: float = 0.0):
    """A function (params, batch, weights, share) -> (loss, Losses) for one microbatch.

    `weights` is the number of tokens of the whole batch, and `share` the microbatch's share in it: divided by them
    here, the gradients of microbatches have the size, and so the ranges, that those of the whole batch have.
    """

    def loss(params: Any, batch: dict[str, Any], weights: Any, share: Any) -> tuple[jax.Array, Losses]:
        logits, aux = apply(model, params, batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"])
        mask = (batch["targets_segmentation"] != 0).astype(jnp.float32)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        picked = _picked(logits, batch["targets"])
        lm = jnp.sum((log_z - picked) * mask)
        z = z_loss * jnp.sum(log_z**2 * mask)
        balance = load_balance * aux.load_balance
        # A batch of padding alone has no loss, not a division by zero.
        total = (lm + z) / jnp.maximum(weights, 1.0) + balance * share
        return total, Losses(lm, z, balance * share, jnp.sum(mask))

    return loss


def _picked(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The logit of each target."""
    where = _sharding.explicit(logits)
    if where is None:
        return jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    # A look-up along an axis that is cut has no type; the sum of one logit and zeros does.
    chosen = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]
    return jnp.sum(jnp.where(_sharding.placed(chosen, where), logits, jnp.zeros_like(logits)), axis=-1)
