"""Gradients that are not gradients: state of delayed scaling, whose new value comes out where its gradient would.

Such state stands in a collection of its own. It must be neither scaled, clipped nor summed: of two microbatches the
larger magnitudes count, and the optimizer has no part in it.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from octavo.ops.scatter import is_lost
from octavo.transform.state import GRADIENT_STATE


def accumulate_gradients(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Gradients of two microbatches together: sums, and for histories of delayed scaling the larger magnitudes.

    >>> a, b = ({"params": jnp.ones(1), "_overwrite_with_gradient": jnp.asarray([x])} for x in (1.0, 3.0))
    >>> accumulate_gradients(a, b)["_overwrite_with_gradient"].tolist()
    [3.0]
    """
    if any(is_lost(path) for path, _ in jax.tree_util.tree_leaves_with_path(first.get(GRADIENT_STATE))):
        raise ValueError(
            "what was lost of gradients, by reduce_feedback, passes from one microbatch to the next: overwrite it "
            "after each of them and add up the other gradients, or leave reduce_feedback out"
        )
    join = {GRADIENT_STATE: jnp.maximum}
    return {name: jax.tree.map(join.get(name, jnp.add), first[name], second[name]) for name in first}


def split_gradients(gradients: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What an optimizer is to see, and what takes the place of state: clip and scale the former only."""
    own = {name: tree for name, tree in gradients.items() if name != GRADIENT_STATE}
    return own, {name: tree for name, tree in gradients.items() if name == GRADIENT_STATE}


def overwrite_with_gradients(variables: Mapping[str, Any], gradients: Mapping[str, Any]) -> dict[str, Any]:
    """Variables with the state of delayed scaling as the gradients have it; everything else unchanged."""
    return {**variables, **split_gradients(gradients)[1]}
