"""State whose gradient is its new value: the amax histories of delayed scaling.

Such state is a collection of its own, named as in Flax. It must not be scaled, clipped, summed or passed to the
optimizer; over microbatches, histories are combined by their maximum.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from octavo.distributed import is_error_feedback
from octavo.transform.state import GRADIENT_STATE


def accumulate_gradients(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Accumulate the gradients of two microbatches.

    Args:
      first: Gradients by collection, as of a Linen model's variables.
      second: Gradients of the same structure.

    Returns:
      The sums; of the histories of delayed scaling, the elementwise maximum.

    >>> a, b = ({"params": jnp.ones(1), "_overwrite_with_gradient": jnp.asarray([x])} for x in (1.0, 3.0))
    >>> accumulate_gradients(a, b)["_overwrite_with_gradient"].tolist()
    [3.0]
    """
    if any(is_error_feedback(path) for path, _ in jax.tree_util.tree_leaves_with_path(first.get(GRADIENT_STATE))):
        raise ValueError(
            "error feedback, by reduce_feedback, passes from one microbatch to the next: overwrite it after each of "
            "them and sum the other gradients, or leave reduce_feedback out"
        )
    join = {GRADIENT_STATE: jnp.maximum}
    return {name: jax.tree.map(join.get(name, jnp.add), first[name], second[name]) for name in first}


def split_gradients(gradients: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate the gradients of parameters from the new state of delayed scaling.

    Args:
      gradients: Gradients by collection.

    Returns:
      The gradients for the optimizer, which may be clipped and scaled, and the new state, which may not.

    >>> grads = {"params": jnp.ones(1), "_overwrite_with_gradient": jnp.ones(1)}
    >>> [list(part) for part in split_gradients(grads)]
    [['params'], ['_overwrite_with_gradient']]
    """
    parameters = {name: tree for name, tree in gradients.items() if name != GRADIENT_STATE}
    return parameters, {name: tree for name, tree in gradients.items() if name == GRADIENT_STATE}


def overwrite_with_gradients(variables: Mapping[str, Any], gradients: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the state of delayed scaling by its gradient, which is its new value.

    Args:
      variables: Variables by collection.
      gradients: Their gradients, from `jax.grad` or `accumulate_gradients`.

    Returns:
      The variables with the new state; the parameters are unchanged.

    >>> variables = {"params": jnp.ones(1), "_overwrite_with_gradient": jnp.zeros(1)}
    >>> grads = {"params": jnp.ones(1), "_overwrite_with_gradient": jnp.full(1, 3.0)}
    >>> overwrite_with_gradients(variables, grads)["_overwrite_with_gradient"].tolist()
    [3.0]
    """
    return {**variables, **split_gradients(gradients)[1]}
