"""LoRA on models and functions, and merging adapters into weights."""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from octavo._tree import flatten_paths, path_str, unflatten_paths
from octavo._typing import Array, PRNGKeyArray
from octavo.frameworks import quantize_model
from octavo.frameworks.model import framework_of
from octavo.lora.layout import Layout, adapter_names, stored_shape, to_stored, weight_side
from octavo.lora.loftq import loftq
from octavo.lora.provider import PARAMS, LoraProvider
from octavo.lora.rule import LoraRule
from octavo.ptq.statistics import Statistics
from octavo.qarray import QArray, is_qarray
from octavo.transform import QuantizationProvider, Site, quantized


def apply_lora_to_model(
    model: Any,
    provider: QuantizationProvider,
    *model_inputs: Any,
    methods: Collection[str] = ("__call__",),
    **model_inputs_kwargs: Any,
) -> Any:
    """Add the adapters of a `LoraProvider` to a Flax model.

    The adapters of a Linen model are created by its `init`, as parameters; those of an NNX model are `nnx.LoRAParam`s.

    Args:
      model: A Flax Linen or NNX model.
      provider: A `LoraProvider`.
      *model_inputs: For an NNX model, example inputs, of which only the shapes matter.
      methods: The methods that the inputs are for.
      **model_inputs_kwargs: Example inputs by keyword; `rngs` is an `nnx.Rngs` that initializes adapters.

    Returns:
      A model of the same kind with adapters, which shares its weights with the given one unless they are quantized.

    >>> import octavo
    >>> from flax import nnx
    >>> provider = octavo.LoraProvider(rank=2, alpha=4.0)
    >>> model = apply_lora_to_model(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), provider, jnp.ones((1, 8)), rngs=nnx.Rngs(1))
    >>> model.kernel_lora_a.shape, model.kernel_lora_b.shape
    ((8, 2), (2, 4))
    """
    kind = framework_of(model)
    if kind == "linen":
        return quantize_model(model, provider)
    if kind != "nnx":
        raise TypeError(
            f"apply_lora_to_model takes a Flax Linen or NNX model, got {type(model).__name__}; for a function of "
            "parameters use octavo.lora.adapted"
        )
    from flax import nnx

    if "rngs" not in model_inputs_kwargs:
        warnings.warn("the adapters of an NNX model are random: pass rngs=nnx.Rngs(seed)", stacklevel=2)
        model_inputs_kwargs["rngs"] = nnx.Rngs(10003)
    model = quantize_model(model, provider, *model_inputs, methods=tuple(methods), **model_inputs_kwargs)
    model.qwix_rngs = None  # for dropout, set it again
    return model


def adapted(fn: Callable[..., Any], rules: Any, *, weights: Any = None) -> "Adapted":
    """A function with adapters on the matmuls that the rules match.

    Args:
      fn: A function whose first argument holds the weights; QArrays among them stay in low precision.
      rules: `LoraRule`s, or a `LoraProvider`.
      weights: Which arguments hold weights, as in `octavo.quantized`.

    Returns:
      A function of the adapters and the arguments of `fn`; its `init` makes adapters.

    >>> def predict(params, x):
    ...     return x @ params["w"]
    >>> tuned = adapted(predict, LoraRule(rank=2, alpha=4.0))
    >>> params, x = {"w": jnp.eye(4)}, jnp.ones((3, 4))
    >>> adapters = tuned.init(jax.random.key(0), params, x)
    >>> jax.tree.map(jnp.shape, jax.grad(lambda a: tuned(a, params, x).sum())(adapters))
    {'w_lora_a': (4, 2), 'w_lora_b': (2, 4)}
    """
    return Adapted(fn, rules if isinstance(rules, QuantizationProvider) else LoraProvider(rules), weights)


class Merged(NamedTuple):
    """Parameters with adapters merged, and the relative error of each weight that was quantized again."""

    params: Any
    errors: dict[str, float]


class Adapted:
    """A function with adapters; see `adapted`."""

    def __init__(self, fn: Callable[..., Any], provider: QuantizationProvider, weights: Any = None):
        self.low = quantized(fn, provider, weights=weights)

    def init(self, key: PRNGKeyArray, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """New adapters for arguments of these shapes: nested dictionaries like the parameters."""
        return self.low.init_random(key, *args, **kwargs).get(PARAMS, {})

    def init_loftq(
        self,
        params: Any,
        *args: Any,
        steps: int = 4,
        statistics: Mapping[str, Statistics] | None = None,
        method: str = "round",
        **kwargs: Any,
    ) -> tuple[dict[str, Any], Any]:
        """Adapters that make up for the quantization of their weights (LoftQ), and the parameters with these quantized.

        Args:
          params: The first argument of the function, in float.
          *args: Its other arguments, of which only the shapes matter.
          steps: How often weights are quantized and adapters fitted, in turn.
          statistics: Those of `octavo.ptq.collect_statistics`: then adapters make up for the error of the outputs on
            that data (EoRA), not for that of the weights.
          **kwargs: Its arguments by keyword.
        """
        quantizers = self.low.stored_quantizers(params, *args, **kwargs)
        sites = self.low.sites(params, *args, **kwargs)
        adapters, low = loftq(sites, params, quantizers, steps=steps, statistics=statistics, method=method)
        placed = jax.tree_util.tree_map_with_path(lambda path, x: low.get(path_str(path), x), params)
        return adapters, placed

    def __call__(self, adapters: Any, *args: Any, key: PRNGKeyArray | None = None, **kwargs: Any) -> Any:
        """The function with these adapters; with a random `key`, their inputs have dropout."""
        return self.low.stateful({PARAMS: adapters}, key=key)(*args, **kwargs)[0]

    def merge(self, adapters: Any, params: Any, *args: Any, requantize: bool = False, **kwargs: Any) -> Merged:
        """The parameters with the adapters added to them.

        Args:
          adapters: The adapters.
          params: The first argument of the function.
          *args: Its other arguments, of which only the shapes matter.
          requantize: Whether weights that are QArrays become QArrays again, in the format of their rule; otherwise
            they become float.
          **kwargs: Its arguments by keyword.
        """
        quantizers = self.low.stored_quantizers(params, *args, **kwargs) if requantize else {}
        deltas = weight_deltas(self.low.sites(params, *args, **kwargs), adapters)
        errors: dict[str, float] = {}

        def merge(path: Any, leaf: Any) -> Any:
            name = path_str(path)
            if name not in deltas:
                return leaf
            merged = merge_weight(leaf, deltas[name])
            if not isinstance(leaf, QArray) or name not in quantizers:
                return merged
            again = quantizers[name].quantize(merged)
            errors[name] = float(jnp.linalg.norm(again.dequantize() - merged) / jnp.linalg.norm(merged))
            return again

        return Merged(jax.tree_util.tree_map_with_path(merge, params, is_leaf=is_qarray), errors)


def merge_weight(weight: Any, delta: Array) -> Array:
    """A weight in float with a delta of its shape added."""
    floats = weight.dequantize() if isinstance(weight, QArray) else jnp.asarray(weight)
    return (floats.astype(jnp.float32) + delta.reshape(floats.shape)).astype(floats.dtype)


def weight_deltas(sites: Iterable[Site], adapters: Any) -> dict[str, Array]:
    """What adapters add to each weight, by the weight's path, in its stored layout."""
    given, found = flatten_paths(adapters), {}
    for site in sites:
        rule = site.rule
        if not isinstance(rule, LoraRule) or not site.is_adapted or site.leaf in found:
            continue
        path, *names = adapter_names(site)
        paths = [f"{path}/{name}" if path else name for name in names]
        if missing := [p for p in paths if p not in given]:
            raise ValueError(f"the adapters have no {missing[0]!r}: they are of another model or other rules")
        origin, layout = site.origins[weight_side(site)], Layout.of(site)
        if not origin.is_stored or origin.axes is None:
            raise ValueError(f"{site.leaf!r} is not used as it is stored, so its adapter cannot be merged")
        axes = origin.axes
        shape = stored_shape(axes)

        def delta(a: Array, b: Array, layout: Layout = layout, axes: Any = axes, shape: Any = shape) -> Array:
            return to_stored(layout.delta(a, b), axes, shape)

        a, b = (given[p] for p in paths)
        for _ in range(a.ndim - len(layout.shapes(rule.rank)[0])):  # stacked layers
            delta = jax.vmap(delta)
        found[site.leaf] = delta(a, b) * rule.scale
    return found


def split_adapters(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights and the adapters of a Linen model's parameters, as two trees.

    >>> split_adapters({"dense": {"kernel": 1, "kernel_lora_a": 2}})
    ({'dense': {'kernel': 1}}, {'dense': {'kernel_lora_a': 2}})
    """
    leaves = flatten_paths(params, lambda x: not isinstance(x, Mapping))
    own = {path: leaf for path, leaf in leaves.items() if path.endswith(("_lora_a", "_lora_b"))}
    rest = {path: leaf for path, leaf in leaves.items() if path not in own}
    return unflatten_paths(rest), unflatten_paths(own)
