"""From training to serving: `convert` quantizes the parameters, `served` is the model that takes them.

Converting does not run the model: an abstract trace finds the parameters that are quantized, by rules or by configs
within the model, and each of them is quantized on the devices that hold it. The served model gives the results of the
trained one bit for bit, because both run the same operations on the same codes.
"""

from collections.abc import Callable
from typing import Any

import jax

from octavo.frameworks.model import framework_of, quantize_model
from octavo.qarray import QArray, Quantizer, is_qarray, shardings
from octavo.transform import PtqProvider, Quantized
from octavo.transform.arguments import leaf_paths, weight_names


def served(model: Any, rules: Any = ()) -> Any:
    """The function or Linen model that takes the parameters that `convert` returns.

    Args:
      model: The function or model that was trained.
      rules: The rules that it was trained with; none if its operations have configs of their own.

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
        return quantize_model(model, PtqProvider(rules))
    return Quantized(model, PtqProvider(rules), None, "ignore")


def convert(
    model: Any,
    params: Any,
    *inputs: Any,
    rules: Any = (),
    donate: bool = False,
    replicate_scale: bool = False,
    **kwargs: Any,
) -> Any:
    """Quantize the parameters of a function or a Linen model for serving.

    Parameters whose matmuls run in float are returned as they are. Codes and scales are sharded like the parameter.

    Args:
      model: The function or model that was trained.
      params: Its parameters; for a Linen model, its variables.
      *inputs: Example inputs, of which only the shapes matter.
      rules: The rules that it was trained with; none if its operations have configs of their own.
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
    quantizers = _quantizers(model, PtqProvider(rules), params, inputs, kwargs)
    names = _names(params)
    leaves, tree = jax.tree.flatten(params, is_leaf=_is_parameter)
    new = []
    for name, leaf in zip(names, leaves, strict=True):
        if name not in quantizers or isinstance(leaf, QArray):
            new.append(leaf)
        elif hasattr(leaf, "replace_boxed"):
            from octavo.frameworks.linen_state import boxed

            codes = _converted(leaf.value, quantizers[name], replicate_scale, donate)
            new.append(boxed(codes, leaf, replicate_scale=replicate_scale))
        else:
            new.append(_converted(leaf, quantizers[name], replicate_scale, donate))
    return jax.tree.unflatten(tree, new)


def _is_parameter(x: Any) -> bool:
    """Whether `x` is a parameter that is not an array: a QArray, or a Flax box that names its axes."""
    return is_qarray(x) or hasattr(x, "replace_boxed")


def _names(params: Any) -> list[str | None]:
    fn: Callable[..., Any] = lambda params: None  # noqa: E731
    bare = jax.tree.map(lambda x: x.value if hasattr(x, "replace_boxed") else x, params, is_leaf=_is_parameter)
    paths = leaf_paths(fn, (bare,), {})
    return weight_names(paths, jax.tree.leaves(bare, is_leaf=is_qarray), "params", ["params"])


def _quantizers(model: Any, provider: PtqProvider, params: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]):
    framework = framework_of(model)
    if framework is None:
        return Quantized(model, provider, 0, "ignore").stored_quantizers(params, *inputs, **kwargs)
    if framework == "linen":
        from octavo.frameworks.linen import linen_quantizers

        return linen_quantizers(model, provider, params, *inputs, **kwargs)
    raise TypeError(
        f"a {framework} model holds its parameters: octavo.quantize_model(model, octavo.PtqProvider(rules), *inputs) "
        "gives it with converted ones"
    )


def _converted(leaf: Any, quantizer: Quantizer, replicate_scale: bool, donate: bool) -> QArray:
    sharding = getattr(leaf, "sharding", None)
    quantize = quantizer.quantize
    if isinstance(sharding, jax.sharding.NamedSharding):
        out = shardings(jax.eval_shape(quantizer.quantize, leaf), sharding)
        if replicate_scale:
            replicated = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
            codes = out.qvalue
            out = jax.tree.map(lambda s: s if s is codes else replicated, out)
        quantize = jax.jit(quantizer.quantize, out_shardings=out)
    codes = jax.jit(quantize)(leaf)
    if donate and isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        jax.block_until_ready(codes)
        leaf.delete()
    return codes
