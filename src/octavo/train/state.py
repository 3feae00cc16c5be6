"""All that a run is at a step: what is saved, and what a step takes and gives."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from octavo.ops.training import ERROR_FEEDBACK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The parameters and everything else that the next step depends on.

    `quant` is the state of static ranges and delayed scaling, `masks` are those of sparse weights, `key` drives
    stochastic rounding, and `errors` is what rounding lost of gradients that are sent in low precision. `halted` is set
    for good by the first step with a loss or a gradient that is not finite: such a step, and every one after it,
    changes nothing.
    """

    # JAX puts shapes, arguments' descriptions and the like in the places of arrays: any type will do.
    step: Any
    params: Any
    opt_state: Any
    quant: Any
    masks: Any
    key: Any
    halted: Any
    errors: Any = dataclasses.field(default_factory=dict)


def is_reset_on_remesh(path: tuple[str, ...]) -> bool:
    """Whether an array of the state is reset when a run resumes on another mesh: error feedback is per device."""
    return path[0] == "errors" or ERROR_FEEDBACK in path


def initial_state(
    params: Any, opt_state: Any, quant: dict[str, Any], masks: dict[str, Any], seed: int, errors: dict[str, Any]
) -> TrainState:
    """The state before the first step."""
    # The raw key data, an ordinary array: what is saved and compared.
    key = jax.random.key_data(jax.random.key(seed))
    return TrainState(jnp.int32(0), params, opt_state, quant, masks, key, jnp.bool_(False), errors)
