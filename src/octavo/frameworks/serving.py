"""From training to serving: `convert` quantizes the parameters, `served` is the model that takes them.

Converting does not run the model: an abstract trace finds the parameters that are quantized, by rules or by configs
within the model, and each of them is quantized on the devices that hold it. The served model gives the results of the
trained one bit for bit, because both run the same operations on the same codes.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from octavo.frameworks.model import framework_of, quantize_model
from octavo.qarray import QArray, Quantizer, is_qarray, shardings
from octavo.transform import PtqProvider, Quantized
from octavo.transform.api import weight_names


def served(model: Any, rules: Any = (), *, state: Mapping[str, Any] | None = None) -> Any:
    """The function or Linen model that takes the parameters that `convert` returns.

    Args:
      model: The function or model that was trained.
      rules: The rules that it was trained with; none if its operations have configs of their own.
      state: The state of a function whose rules keep state (static ranges, delayed scaling), as `Quantized.stateful`
        returned it: its activations are quantized by the ranges of training. {} serves rules with delayed scaling
        without it, each activation by its own range. That of a Linen model is among its variables.

    Returns:
      A function or model of the same signature. Its results equal those of the trained one bit for bit.

    >>> import jax.numpy as jnp, octavo
    >>> def predict(params, x):
    ...     return octavo.dot(x, params["w"], config=octavo.DotConfig.qt("int8"))
    >>> params, x = {"w": jnp.eye(4)}, jnp.ones((2, 4))
    >>> low = convert(predict, params, x)
    >>> bool((jax.jit(served(predict))(low, x) == jax.jit(predict)(params, x)).all()), low["w"].qtype.name
    (True, 'int8')
    """
    if framework_of(model) is not None:
        if state is not None:
            raise TypeError("the state of a model is among its variables: served(model, rules)")
        return quantize_model(model, PtqProvider(rules))
    provider = PtqProvider(rules)
    low = Quantized(model, provider, None, "error" if provider.rules else "ignore")
    if state is None:
        return low

    def call(*args: Any, **kwargs: Any) -> Any:
        return low.stateful(state, update=False)(*args, **kwargs)[0]

    return functools.wraps(model)(call) if hasattr(model, "__name__") else call


def convert(
    model: Any,
    params: Any,
    *inputs: Any,
    rules: Any = (),
    state: Any = None,
    donate: bool = False,
    replicate_scale: bool = False,
    **kwargs: Any,
) -> Any:
    """Quantize the parameters of a function or a Linen model for serving.

    A weight whose range is remembered (delayed scaling, frozen scales) is quantized by that range. Parameters whose
    matmuls run in float are returned as they are. Codes and scales are sharded like the parameter.

    Args:
      model: The function or model that was trained.
      params: Its parameters; for a Linen model, its variables.
      *inputs: Example inputs, of which only the shapes matter.
      rules: The rules that it was trained with; none if its operations have configs of their own.
      state: The state of a function whose rules keep state, as `Quantized.stateful` returned it. That of a Linen model
        is among its variables.
      donate: Whether each float array is deleted as soon as it is quantized.
      replicate_scale: Whether scales are replicated on all devices.
      **kwargs: Example inputs by keyword.

    Returns:
      The parameters, with a `QArray` for each that is quantized. They are the parameters of `served(model, rules)`.

    >>> import jax.numpy as jnp, octavo
    >>> rule = octavo.QuantizationRule(weight_qtype="int4")
    >>> convert(lambda params, x: x @ params["w"], {"w": jnp.eye(4)}, jnp.ones((2, 4)), rules=rule)["w"].qtype.name
    'int4'
    """
    quantizers = stored_quantizers(model, rules, params, *inputs, **kwargs)

    ranges = _stored_ranges(model, rules, params, state, *inputs, **kwargs)

    def quantize(name: str, leaf: Any) -> Any:
        if name not in quantizers:
            return leaf
        bounds = ranges.get(name)
        return quantize_sharded(leaf, quantizers[name], bounds=bounds, replicate_scale=replicate_scale, donate=donate)

    return map_params(quantize, params, replicate_scale=replicate_scale)


def map_params(fn: Callable[[str, Any], Any], params: Any, *, replicate_scale: bool = False) -> Any:
    """Parameters replaced by `fn(name, array)`; the boxes of Flax are kept, QArrays are left alone."""

    def new(name: str | None, leaf: Any) -> Any:
        if name is None or isinstance(leaf, QArray):
            return leaf
        if not hasattr(leaf, "replace_boxed"):
            return fn(name, leaf)
        from octavo.frameworks.linen_state import boxed

        found = fn(name, leaf.value)
        return boxed(found, leaf, replicate_scale=replicate_scale) if isinstance(found, QArray) else leaf

    leaves, tree = jax.tree.flatten(params, is_leaf=_is_parameter)
    return jax.tree.unflatten(tree, [new(*pair) for pair in zip(param_names(params), leaves, strict=True)])


def _is_parameter(x: Any) -> bool:
    """Whether `x` is a parameter that is not an array: a QArray, or a Flax box that names its axes."""
    return is_qarray(x) or hasattr(x, "replace_boxed")


def unboxed(params: Any) -> Any:
    """Parameters without the boxes of Flax."""
    return jax.tree.map(lambda x: x.value if hasattr(x, "replace_boxed") else x, params, is_leaf=_is_parameter)


def param_names(params: Any) -> list[str | None]:
    """The names of parameters that rules match, leaf by leaf; None for leaves that are none."""
    fn: Callable[..., Any] = lambda params: None  # noqa: E731
    return weight_names(fn, (unboxed(params),), {}, "params")


def stored_quantizers(model: Any, rules: Any, params: Any, *inputs: Any, **kwargs: Any) -> dict[str, Quantizer]:
    """The quantizer of each parameter of a function or a Linen model that is quantized, by name."""
    framework, provider = framework_of(model), PtqProvider(rules)
    if framework is None:
        on_unmatched = "error" if provider.rules else "ignore"
        return Quantized(model, provider, 0, on_unmatched).stored_quantizers(params, *inputs, **kwargs)
    if framework == "linen":
        from octavo.frameworks.linen import linen_quantizers

        return linen_quantizers(model, provider, params, *inputs, **kwargs)
    raise TypeError(
        f"a {framework} model holds its parameters: octavo.quantize_model(model, octavo.PtqProvider(rules), *inputs) "
        "gives it with converted ones"
    )


def _stored_ranges(model: Any, rules: Any, params: Any, state: Any, *inputs: Any, **kwargs: Any) -> dict[str, Any]:
    """The range by which training quantized each parameter, by name, where it is remembered."""
    if framework_of(model) is None:
        return Quantized(model, PtqProvider(rules), 0, "ignore").stored_ranges(state or {}, params, *inputs, **kwargs)
    if state is not None:
        raise TypeError("the state of a Linen model is among its variables: convert(model, variables, *inputs)")
    from octavo.frameworks.linen import linen_ranges

    return linen_ranges(model, PtqProvider(rules), params, *inputs, **kwargs)


def quantize_by_range(x: jax.Array, quantizer: Quantizer, bounds: dict[str, Any] | None) -> QArray:
    """A parameter as codes by a remembered range, or its own where that is NaN or None."""
    if bounds is None:
        return quantizer.quantize(x)
    measured = quantizer.measure(x)
    given = {k: jnp.where(jnp.isnan(v), measured[k].astype(v.dtype), v) for k, v in bounds.items()}
    return quantizer.quantize(x, bounds=given, measured=measured)


def quantize_sharded(
    leaf: Any,
    quantizer: Quantizer,
    *,
    bounds: dict[str, Any] | None = None,
    replicate_scale: bool = False,
    donate: bool = False,
) -> QArray:
    """A parameter as codes and scales that are sharded as it is, the scales replicated if asked for.

    `bounds` are its range if it is remembered, NaN where nothing was measured.
    """

    quantize = functools.partial(quantize_by_range, quantizer=quantizer, bounds=bounds)
    sharding, out = getattr(leaf, "sharding", None), None
    if isinstance(sharding, jax.sharding.NamedSharding):
        out = shardings(jax.eval_shape(quantize, leaf), sharding)
        if replicate_scale:
            replicated = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
            codes = out.qvalue
            out = jax.tree.map(lambda s: s if s is codes else replicated, out)
    codes = jax.jit(quantize, out_shardings=out)(leaf)
    if donate and isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        jax.block_until_ready(codes)
        leaf.delete()
    return codes
