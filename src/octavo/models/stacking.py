"""Parameters of scanned layers, stacked on a leading axis, and of unscanned ones, each under its own name."""

import re
from typing import Any

import jax
import jax.numpy as jnp

type Params = dict[str, Any]

_ONE = re.compile(r"((?:dense_)?layers)_(\d+)")
_STACK = re.compile(r"(?:dense_)?layers")


def stack_layers(params: Params) -> Params:
    """Parameters for `scan_layers=True`, from those of the same model without; gradients and moments go the same way.

    Layers that stand apart in both forms, `first_layers_0` and the like, stay as they are.

    >>> tree = stack_layers({"decoder": {"layers_0": {"w": jnp.zeros(3)}, "layers_1": {"w": jnp.ones(3)}}})
    >>> tree["decoder"]["layers"]["w"].shape
    (2, 3)
    """
    rest, found = {}, dict[str, dict[int, Any]]()
    for name, part in params["decoder"].items():
        if match := _ONE.fullmatch(name):
            found.setdefault(match[1], {})[int(match[2])] = part
        else:
            rest[name] = part
    for name, parts in found.items():
        if sorted(parts) != list(range(len(parts))):
            raise ValueError(f"layers are missing: there are {', '.join(f'{name}_{i}' for i in sorted(parts))}")
        rest[name] = jax.tree.map(lambda *xs: jnp.stack(xs), *(parts[i] for i in range(len(parts))))
    return {**params, "decoder": rest}


def unstack_layers(params: Params) -> Params:
    """Parameters for `scan_layers=False`, from those of the same model with scanned layers.

    >>> sorted(unstack_layers({"decoder": {"layers": {"w": jnp.zeros((2, 3))}}})["decoder"])
    ['layers_0', 'layers_1']
    """
    rest = {}
    for name, part in params["decoder"].items():
        if not _STACK.fullmatch(name):
            rest[name] = part
            continue
        for i in range(jax.tree.leaves(part)[0].shape[0]):
            rest[f"{name}_{i}"] = jax.tree.map(lambda x, i=i: x[i], part)
    return {**params, "decoder": rest}
