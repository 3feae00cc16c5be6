"""Quantized parameters: `WithAux`, and the conversion of float checkpoints leaf by leaf."""

import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo._tree import unflatten_paths
from octavo.qarray import QArray, Quantizer
from octavo.transform.state import static_scale


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["how"])
@dataclasses.dataclass(frozen=True)
class WithAux:
    """A quantized parameter with its quantizer, so that `quantize_params` does not need the model. Named as in Qwix.

    Args:
      array: A QArray, of arrays or abstract; or an array, the scale of a static range.
      how: The `Quantizer` of the stored parameter, or of the activation.

    >>> import octavo
    >>> quantizer = octavo.Quantizer("int8", channelwise_axes=(1,))
    >>> WithAux(quantizer.quantize(jnp.ones((4, 2))), quantizer).shape
    (4, 2)
    """

    array: Any
    how: Quantizer

    @property
    def _plain(self) -> QArray:
        """The QArray without the boxes that Flax may have put its arrays into."""
        return self.array._map(_value) if isinstance(self.array, QArray) else self.array

    def unboxed(self) -> "WithAux":
        """The same with arrays in place of Flax's boxes and variables."""
        return WithAux(self._plain, self.how)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        return self._plain.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the dequantized parameter."""
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """The rank of the parameter."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes of codes and scales."""
        return self._plain.nbytes

    def dequantize(self) -> jax.Array:
        """The parameter in float."""
        return self._plain.dequantize()

    def replace(self, **changes: Any) -> "WithAux":
        """The same with another array or quantizer."""
        return dataclasses.replace(self, **changes)

    @property
    def companions(self) -> dict[str, Any]:
        """Arrays that a subclass stores with the parameter: state of its operation, named `<parameter>_<name>`."""
        return {}


def _value(x: Any) -> Any:
    """The array in a box or a variable of Flax."""
    return x.get_raw_value() if hasattr(x, "get_raw_value") else x.unbox() if hasattr(x, "unbox") else x


def is_stored(x: Any) -> bool:
    """Whether a leaf is a quantized parameter."""
    return isinstance(x, WithAux | QArray)


def unwrap(tree: Any) -> Any:
    """A tree with QArrays in place of `WithAux`, as the transformation takes it.

    >>> unwrap({"a": 1})
    {'a': 1}
    """
    return jax.tree.map(lambda x: x.array if isinstance(x, WithAux) else x, tree, is_leaf=is_stored)


def quantize_params(
    params: Any,
    abstract_quantized_params: Any,
    quant_stats: Any = None,
    *,
    allow_extra_params: bool = False,
    donate: bool = False,
) -> dict[Any, Any]:
    """Quantize float parameters for a quantized model, one after the other and without running the model.

    Args:
      params: A nested dictionary (or an `nnx.State`) of JAX or NumPy arrays: all parameters, or some of them.
      abstract_quantized_params: The parameters of the quantized model or, for NNX, the model itself; either abstract
        (`jax.eval_shape`, `nnx.eval_shape`).
      quant_stats: Statistics of static ranges, as training or calibration collected them. A Linen model holds their
        scales as parameters `<operand>_scale` (and `<operand>_zero_point`), an NNX model the statistics.
      allow_extra_params: Whether parameters that the model does not have are left out; otherwise they are an error.
      donate: Whether each float array is deleted as soon as it is quantized, so that memory never holds both models.

    Returns:
      A nested dictionary like `params`, with a `WithAux` for each quantized parameter; for an NNX model, which has
      its codes and scales as variables, with a dictionary that `nnx.update(model, ...)` takes.

    >>> import octavo
    >>> quantizer = octavo.Quantizer("int8", channelwise_axes=(1,))
    >>> low = lambda: {"w": WithAux(quantizer.quantize(jnp.ones((4, 2))), quantizer), "b": jnp.ones(2)}
    >>> abstract = jax.eval_shape(low)
    >>> params = quantize_params({"w": np.ones((4, 2), np.float32), "b": np.zeros(2, np.float32)}, abstract)
    >>> params["w"].array.scale.shape, params["b"].shape
    ((1, 2), (2,))
    """
    given, wanted = leaves_by_path(params), leaves_by_path(abstract_quantized_params, only_params=False)
    places = {_text(path): leaf for path, leaf in wanted.items()}
    known = {_text(path) for path in leaves_by_path(abstract_quantized_params)}
    extra = sorted({_text(path) for path in given} - known)
    if extra and not allow_extra_params:
        raise ValueError(
            f"the model has no parameter {_listed(extra)}: pass allow_extra_params=True to leave out what it does not "
            "have, or check that both were made by the same model"
        )
    result: dict[tuple[Any, ...], Any] = {}
    for path, leaf in given.items():
        if _text(path) in places:
            result[path] = _converted(_text(path), leaf, places[_text(path)], donate)
    stats: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path, leaf in leaves_by_path(quant_stats or {}).items():
        if _text(path) in places:
            result[path] = leaf
        else:
            stats.setdefault(path[:-1], {})[path[-1]] = leaf
    for path, each in stats.items():
        result |= _static_range(path, each, places.get(f"{_text(path)}_scale"), allow_extra_params)
    if _is_nnx(abstract_quantized_params):
        result = {key: x for path, leaf in result.items() for key, x in _variables(path, leaf)}
    return unflatten_paths(result)


def _is_nnx(tree: Any) -> bool:
    return (nnx := sys.modules.get("flax.nnx")) is not None and isinstance(tree, nnx.Module)


def _variables(path: tuple[Any, ...], leaf: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The variables of an NNX parameter, by path."""
    if not isinstance(leaf, WithAux):
        return [(path, leaf)]
    parts = jax.tree_util.tree_leaves_with_path(WithAux(leaf.array, leaf.how))
    stored = [((*path[:-1], f"{path[-1]}_{name}"), x) for name, x in leaf.companions.items()]
    return stored + [((*path, *(entry.name for entry in inner)), x) for inner, x in parts]


def _static_range(path: tuple[Any, ...], stats: dict[str, Any], place: Any, allow_extra: bool) -> dict[Any, Any]:
    """The parameters of a static range with these statistics."""
    name = _text(path)
    if not isinstance(place, WithAux):
        if allow_extra:
            return {}
        raise ValueError(
            f"the model has no static range {name!r}: its rules need act_static_scale=True, and "
            "abstract_quantized_params come from jax.eval_shape(quantized_model.init, ...)"
        )
    if not isinstance(stats["count"], jax.core.Tracer) and not np.all(np.asarray(stats["count"]) > 0):
        raise ValueError(
            f"the static range {name!r} was never calibrated: run the QT model on calibration data with "
            "mutable='quant_stats' first"
        )
    return scale_params(path, place.how, static_scale(place.how, stats, _unboxed(place.array).dtype))


def scale_params(path: tuple[Any, ...], quantizer: Quantizer, scale: dict[str, Any]) -> dict[tuple[Any, ...], Any]:
    """The parameters of a static range, by path: its scale with its quantizer, and its zero point."""
    named = {(*path[:-1], f"{path[-1]}_{part}"): x for part, x in scale.items()}
    return {key: WithAux(x, quantizer) if key[-1].endswith("_scale") else x for key, x in named.items()}


def _converted(name: str, leaf: Any, place: Any, donate: bool) -> Any:
    if is_stored(leaf):
        return leaf
    if not isinstance(leaf, jax.Array | np.ndarray):
        raise TypeError(f"the parameter {name!r} is no array but a {type(leaf).__name__}")
    shape = tuple(_unboxed(place).shape)
    if tuple(leaf.shape) != shape:
        raise ValueError(f"the parameter {name!r} has the shape {leaf.shape}, but the model needs {shape}")
    if not isinstance(place, WithAux):
        return leaf
    codes = _quantize(leaf, place.how)
    if donate and isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        jax.block_until_ready(codes)
        leaf.delete()
    return WithAux(codes, place.how)


def _is_box(x: Any) -> bool:
    return hasattr(x, "replace_boxed")


def _unboxed(tree: Any) -> Any:
    """A tree without Flax's boxes around arrays, which name the axes that they are sharded along."""
    return jax.tree.map(lambda x: x.value if _is_box(x) else x, tree, is_leaf=_is_box)


@functools.partial(jax.jit, static_argnames="quantizer")
def _quantize(x: Any, quantizer: Quantizer) -> QArray:
    return quantizer.quantize(jnp.asarray(x))


def leaves_by_path(tree: Any, *, only_params: bool = True) -> dict[tuple[Any, ...], Any]:
    """Leaves by their keys; Flax boxes around leaves (variables, partitioning) are not part of a path."""
    nnx = sys.modules.get("flax.nnx")
    if _is_nnx(tree):
        assert nnx is not None
        stored = {path: x.unboxed() for path, x in nnx.iter_graph(tree) if isinstance(x, WithAux)}
        found = leaves_by_path(nnx.state(tree), only_params=only_params)
        return {path: x for path, x in found.items() if path[:-2] not in stored} | stored
    if nnx is not None and isinstance(tree, nnx.State) and only_params:
        others = [v for _, v in nnx.to_flat_state(tree) if isinstance(v, nnx.Variable) and not isinstance(v, nnx.Param)]
        tree = nnx.filter_state(tree, nnx.Param) if others else tree
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_stored)
    return {_keys(path): leaf for path, leaf in leaves}


def _keys(path: tuple[Any, ...]) -> tuple[Any, ...]:
    keys = [getattr(entry, "key", getattr(entry, "idx", None)) for entry in path]
    return tuple(key for key in keys if key is not None)


def _text(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + rest
