"""N:M sparsity of weights while training: masks that are made anew every few steps."""

from typing import Any

import jax

from octavo.ops.sparsity import nm_mask
from octavo.train.config import Config


def updates_masks(config: Config, step: int) -> bool:
    """Whether the masks are made anew before a step.

    >>> from octavo.train.config import Config
    >>> config = Config(weight_sparsity_n=2, weight_sparsity_m=4, weight_sparsity_start_step=5)
    >>> [step for step in range(30) if updates_masks(config, step)]
    [5, 15, 25]
    """
    since = step - config.weight_sparsity_start_step
    return config.weight_sparsity_n is not None and since >= 0 and since % config.weight_sparsity_update_step == 0


def make_masks(params: Any, axes: dict[str, int], n: int, m: int) -> dict[str, jax.Array]:
    """Which n of every m values along the contraction of each weight stay, by the weight's name.

    >>> import jax.numpy as jnp
    >>> make_masks({"w": jnp.asarray([[1.0], [3.0], [2.0], [0.0]])}, {"w": 0}, 2, 4)["w"][:, 0].tolist()
    [False, True, True, False]
    """
    return {name: nm_mask(leaf, n, m, axis=axes[name]) for name, leaf in _named(params) if name in axes}


def masked(params: Any, masks: dict[str, jax.Array]) -> Any:
    """The parameters with zeros where a mask says so; gradients go straight through, so that what is off can return."""
    if not masks:
        return params

    def apply(path: Any, leaf: jax.Array) -> jax.Array:
        mask = masks.get(jax.tree_util.keystr(path, simple=True, separator="/"))
        return leaf if mask is None else leaf + jax.lax.stop_gradient(leaf * mask.astype(leaf.dtype) - leaf)

    return jax.tree_util.tree_map_with_path(apply, params)


def _named(params: Any) -> list[tuple[str, jax.Array]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]
