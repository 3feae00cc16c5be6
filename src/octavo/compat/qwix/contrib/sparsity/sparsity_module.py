"""`SparsityModule`: N:M masks of weights and activations as state of an NNX model.

`sparsity=(n, m)` of a rule masks the weights of any model, and the trainer has the steps at which masks change.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from octavo._typing import Array
from octavo.ops.sparsity import nm_mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparsityRule:
    """Which values are kept: n of every m, if m is not 0.

    Attributes:
        weight_sparsity_n: How many weights are kept of every m.
        weight_sparsity_m: The size of a group of weights.
        weight_sparsity_order: "R" for groups along the last axis, "C" for the last but one.
        weight_sparsity_block_size: How many adjacent weights are kept or dropped together.
        weight_sparsity_offset: The distance between the weights of a group; 0 and 1 are adjacent.
        weight_sparsity_start_step: The first step at which the mask is computed.
        weight_sparsity_update_step: The number of steps between masks.
        eval_mode: Whether the mask and the step stay as they are.
        activation_sparsity_n: As for weights; masks of activations are computed in each call.
        activation_sparsity_m: As for weights.
        activation_sparsity_order: As for weights.
        activation_sparsity_block_size: As for weights.
        activation_sparsity_offset: As for weights.
    """

    weight_sparsity_n: int = 0
    weight_sparsity_m: int = 0
    weight_sparsity_order: str = "R"
    weight_sparsity_block_size: int = 0
    weight_sparsity_offset: int = 0
    weight_sparsity_start_step: int = 0
    weight_sparsity_update_step: int = 1
    eval_mode: bool = False
    activation_sparsity_n: int = 0
    activation_sparsity_m: int = 0
    activation_sparsity_order: str = "R"
    activation_sparsity_block_size: int = 0
    activation_sparsity_offset: int = 0


class SparsityModule(nnx.Module):
    """Masks of inputs and weights, and the step.

    Args:
        shape: The shape of the weight.
        sharding_axes: The names of the axes that its mask is sharded along.
        sparsity_rule: The rule; None for no mask.

    >>> module = SparsityModule((4, 2), (None, None), SparsityRule(weight_sparsity_n=1, weight_sparsity_m=2))
    >>> module(jnp.ones((1, 4)), jnp.asarray([[1.0, 2.0]] * 4))[1][0].tolist()
    [0.0, 2.0]
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        sharding_axes: tuple[object, ...] | None,
        sparsity_rule: SparsityRule | None = None,
    ):
        self.sparsity_rule = sparsity_rule
        self.step = nnx.BatchStat(jnp.zeros((), jnp.int32))
        # Flax takes names of axes only where there is a mesh.
        names: dict[str, Any] = {"out_sharding": sharding_axes} if any(sharding_axes or ()) else {}
        self.mask = nnx.BatchStat(jnp.ones(shape, bool), **names)

    def __call__(self, inputs: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        rule = self.sparsity_rule
        if rule is not None and rule.activation_sparsity_m:
            inputs = jnp.where(_mask(inputs, rule, "activation"), inputs, jnp.zeros_like(inputs))
        if rule is None or not rule.weight_sparsity_m:
            return inputs, weight
        if not rule.eval_mode:
            step = self.step.get_value()
            since = step - rule.weight_sparsity_start_step
            due = (since >= 0) & (since % rule.weight_sparsity_update_step == 0)
            old = self.mask.get_value()
            self.mask.set_value(jax.lax.cond(due, lambda: _mask(weight, rule, "weight"), lambda: old))
            self.step.set_value(step + 1)
        return inputs, jnp.where(self.mask.get_value(), weight, jnp.zeros_like(weight))


def _mask(x: Array, rule: SparsityRule, kind: str) -> Array:
    n, m, order, block, offset = (
        getattr(rule, f"{kind}_sparsity_{field}") for field in ("n", "m", "order", "block_size", "offset")
    )
    if order not in ("R", "C"):
        raise ValueError(f"{kind}_sparsity_order is 'R' or 'C', got {order!r}")
    size, apart = max(block, 1), max(offset, 1)
    x = jnp.abs(x if order == "R" else x.swapaxes(-1, -2))
    last = x.shape[-1]
    if last % (size * m * apart):
        raise ValueError(
            f"{n}:{m} sparsity in blocks of {size}, {apart} apart, does not divide an axis of {last}: choose an order "
            "whose axis it divides"
        )
    groups = jnp.sum(x.reshape(*x.shape[:-1], last // (size * m * apart), m, apart, size), axis=-1)
    mask = jnp.repeat(nm_mask(groups, n, m, axis=-2).reshape(*x.shape[:-1], -1), size, axis=-1)
    return mask if order == "R" else mask.swapaxes(-1, -2)
