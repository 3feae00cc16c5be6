"""A model on disk, opened but not yet read: its description, and each parameter by its path, loaded when asked for."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo.frameworks import served
from octavo.models import ModelConfig, abstract_params, apply
from octavo.pretrained.tokenizer import TextTokenizer
from octavo.qarray import QArray, is_qarray
from octavo.rules import QuantizationRule


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter: its shape and dtype, and `load`, which reads it as a NumPy array or a QArray.

    `stored` says how the file holds it, in words such as "float16" or "int4 in groups of 32".
    """

    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], np.ndarray | QArray]
    stored: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter in its float dtype."""
        return int(np.prod(self.shape, dtype=np.int64)) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Source:
    """A model that was found on disk: see `open_model`.

    `rules` are those that its products run with, activations included; none for a model in float, or one whose weights
    alone are in low precision. `origin` tells where it came from: the kind of file, its path and what else is known.
    """

    config: ModelConfig
    leaves: Mapping[str, Leaf]
    tokenizer: TextTokenizer | None = None
    rules: tuple[QuantizationRule, ...] = ()
    origin: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        wanted = paths_of(abstract_params(self.config))
        missing = sorted(set(wanted) - set(self.leaves))
        beyond = sorted(set(self.leaves) - set(wanted))
        if missing or beyond:
            what = f"lacks {missing[0]!r}" if missing else f"has {beyond[0]!r}, which such a model does not"
            more = len(missing) + len(beyond) - 1
            raise ValueError(f"{self.name} {what}{f' ({more} more differ)' if more else ''}: it is not what it says")
        for path, leaf in self.leaves.items():
            shape = tuple(wanted[path].shape)
            if tuple(leaf.shape) != shape:
                raise ValueError(f"{self.name}: {path!r} has the shape {leaf.shape}, but its sizes make it {shape}")

    @property
    def name(self) -> str:
        """What the model is called: the name in its file, or the file's."""
        return str(self.origin.get("name") or self.origin.get("path", "the model"))

    @property
    def size(self) -> int:
        """How many numbers the parameters are."""
        return sum(int(np.prod(leaf.shape, dtype=np.int64)) for leaf in self.leaves.values())

    def params(self, dtype: str | None = None) -> dict[str, Any]:
        """All parameters as a tree of arrays and QArrays; floats in `dtype`, by default the config's."""
        dtype = dtype or self.config.weight_dtype
        return nested({path: on_device(leaf.load(), dtype) for path, leaf in self.leaves.items()})

    def function(self, fn: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """The model as a function of its parameters and tokens, or another function of its parameters.

        Products run as the rules say. Parameters in low precision are multiplied as they are, and without rules
        activations stay in float.
        """
        return served(functools.partial(apply, self.config) if fn is None else fn, self.rules)

    def describe(self) -> str:
        """One line about the model."""
        kinds = sorted({leaf.stored or leaf.dtype for leaf in self.leaves.values()})
        return f"{self.name}: {self.size / 1e6:.1f} million parameters, stored as {', '.join(kinds)}"


def on_device(value: np.ndarray | jax.Array | QArray, dtype: str) -> Any:
    """A parameter as JAX holds it."""
    if isinstance(value, QArray):
        return value._map(jnp.asarray).astype(dtype)
    return jnp.asarray(value, jnp.dtype(dtype))


def paths_of(params: Any) -> dict[str, Any]:
    """The leaves of a tree of parameters by their paths; a QArray is one of them."""
    found = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_qarray)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in found}


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of parameters, from leaves by path.

    >>> nested({"decoder/norm/scale": 1, "embedding": 2})
    {'decoder': {'norm': {'scale': 1}}, 'embedding': 2}
    """
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        place = tree
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = leaf
    return tree
