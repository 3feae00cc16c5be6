"""Paths of pytree leaves as strings: `decoder/layers/0/kernel`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax


def path_str(path: Any) -> str:
    """A key path of `jax.tree_util` as names joined by slashes.

    >>> path_str((jax.tree_util.DictKey("layers"), jax.tree_util.SequenceKey(0)))
    'layers/0'
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def flatten_paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """The leaves of a tree by their paths.

    >>> flatten_paths({"norm": {"scale": 1}, "layers": [2]})
    {'layers/0': 2, 'norm/scale': 1}
    """
    return {path_str(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)}


def unflatten_paths(leaves: Mapping[str, Any] | Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Nested dictionaries from leaves by path: names joined by slashes, or a tuple of names.

    >>> unflatten_paths({"decoder/norm/scale": 1, "embedding": 2})
    {'decoder': {'norm': {'scale': 1}}, 'embedding': 2}
    """
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/") if isinstance(path, str) else path
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = leaf
    return tree
