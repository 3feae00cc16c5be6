"""Parameters that another program quantized, as dictionaries of codes and scales, for NNX models."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from octavo._tree import unflatten_paths
from octavo.frameworks.params import WithAux
from octavo.qarray import QArray

_PARTS = ("qvalue", "scale", "zero_point")


def process_prequantized_params(
    checkpoint_params: Mapping[Any, Any],
    template_params: Any,
    *,
    allow_extra_params: bool = False,
    use_checkpoint_sharding: bool = False,
) -> dict[Any, Any]:
    """Convert parameters that are quantized already, so that `nnx.update(model, ...)` takes them.

    Args:
      checkpoint_params: Nested dictionaries with an array for each parameter in float, and for each quantized one a
        dictionary of `qvalue`, `scale` and, if there is one, `zero_point`.
      template_params: The NNX model, which may be abstract. A quantized parameter is dequantized where the model has
        it in float; scales of larger tiles are repeated.
      allow_extra_params: Whether parameters that the model does not have are left out; otherwise they are an error.
      use_checkpoint_sharding: Whether arrays keep their sharding; otherwise they get that of the model.

    Returns:
      Nested dictionaries of arrays.

    >>> import octavo
    >>> layer, rule = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), octavo.QuantizationRule(weight_qtype="int8")
    >>> model = octavo.quantize_model(layer, octavo.PtqProvider(rule), jnp.ones((1, 4)))
    >>> codes = {"qvalue": jnp.ones((4, 2), jnp.int8), "scale": jnp.ones((1, 1))}
    >>> params = process_prequantized_params({"kernel": {"array": codes}}, model)
    >>> params["kernel"]["array"]["scale"].shape
    (1, 2)
    """
    if not isinstance(template_params, nnx.Module):
        raise TypeError(f"the template is an NNX model, got {type(template_params).__name__}")
    nodes = {path: node for path, node in nnx.iter_graph(template_params) if isinstance(node, nnx.Variable | WithAux)}
    result: dict[tuple[Any, ...], Any] = {}
    for given, leaf in flatten_prequantized(checkpoint_params):
        path = given[:-1] if given[-1] == "array" else given
        name, place = "/".join(map(str, path)), nodes.get(path)
        if place is None:
            if allow_extra_params:
                continue
            raise ValueError(f"the model has no parameter {name!r}: allow_extra_params=True leaves it out")
        keep = use_checkpoint_sharding
        if not isinstance(place, WithAux):
            x = _codes(name, leaf).dequantize() if isinstance(leaf, Mapping) else leaf
            result[path] = _as(name, x, place.get_raw_value(), keep)
            continue
        if not isinstance(leaf, Mapping):
            raise ValueError(f"{name} is in float, and the model has it quantized: octavo.quantize_params does that")
        wanted = place.unboxed().array
        _codes(name, leaf)
        if (leaf.get("zero_point") is None) != (wanted.zero_point is None):
            has = "has no" if wanted.zero_point is None else "needs a"
            raise ValueError(f"{name}: the model {has} zero_point; weight_calibration_method='minmax' has one")
        for part in _PARTS:
            if (x := leaf.get(part)) is not None:
                result[*path, "array", part] = _as(name, x, getattr(wanted, part), keep, repeat=part != "qvalue")
    return unflatten_paths(result)


def flatten_prequantized(tree: Mapping[Any, Any], path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """The parameters of nested dictionaries by path: arrays, and dictionaries with `qvalue`."""
    if not isinstance(tree, Mapping) or "qvalue" in tree:
        return [(path, tree)]
    return [found for key, value in tree.items() for found in flatten_prequantized(value, (*path, key))]


def _codes(name: str, leaf: Mapping[str, Any]) -> QArray:
    if unknown := sorted(set(leaf) - set(_PARTS)):
        raise ValueError(f"{name} has {unknown}: a quantized parameter has qvalue, scale and zero_point")
    if leaf.get("scale") is None:
        raise ValueError(f"{name} has no scale")
    return QArray(*(None if leaf.get(part) is None else jnp.asarray(leaf[part]) for part in _PARTS))


def _as(name: str, x: Any, like: Any, keep_sharding: bool, *, repeat: bool = False) -> jax.Array:
    """An array with the dtype, the sharding and, by repeating its values, the shape of another one."""
    sharding = getattr(x if keep_sharding else like, "sharding", None)
    x = jnp.asarray(x) if sharding is None else jax.device_put(x, sharding)
    fits = x.ndim == len(like.shape) and all(b % a == 0 for a, b in zip(x.shape, like.shape, strict=True) if a)
    if x.shape != like.shape and not (repeat and fits):
        raise ValueError(f"{name} has the shape {x.shape}, and the model needs {tuple(like.shape)}")
    for axis, (a, b) in enumerate(zip(x.shape, like.shape, strict=True)):
        x = x if a == b else jnp.repeat(x, b // a, axis)
    return x.astype(np.dtype(like.dtype))
