"""From a trained model to a served one: `convert` its parameters, `served` multiplies them as they are.

Converting runs nothing: an abstract trace of the model tells which parameters are multiplied, by rules or by configs
that are written into the model, and each is then quantized by itself, on the devices where it lies. What is served is
what was trained, bit for bit, because both are the same operations on the same codes.
"""

from collections.abc import Callable
from typing import Any

import jax

from octavo.frameworks.model import framework_of, quantize_model
from octavo.qarray import QArray, Quantizer, is_qarray, shardings
from octavo.transform import PtqProvider, Quantized
from octavo.transform.arguments import leaf_paths, weight_names


def served(model: Any, rules: Any = ()) -> Any:
    """A function or a Linen model that takes parameters as `convert` gives them.

    `rules` are those that it was trained with; none, if its operations have configs of their own.

    >>> import jax.numpy as jnp, octavo
    >>> def predict(params, x):
    ...     return octavo.dot(x, params["w"], config=octavo.DotConfig.qt("int8"))
    >>> params, x = {"w": jnp.eye(4)}, jnp.ones((2, 4))
    >>> low = convert(predict, params, x)
    >>> bool((served(predict)(low, x) == predict(params, x)).all()), low["w"].qtype.name
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
    """Parameters of a function or a Linen model (its variables), in low precision where they are multiplied so.

    Only the shapes of `inputs` are used. Each parameter is quantized where it lies, its codes and scales sharded as it
    was, or with `replicate_scale` its scales on all devices. The float arrays are not part of the result; with `donate`
    each is deleted as soon as its codes exist. Parameters that are multiplied in float stay as they are.
    """
    how = _quantizers(model, PtqProvider(rules), params, inputs, kwargs)
    names = _names(params)
    leaves, tree = jax.tree.flatten(params, is_leaf=_is_whole)
    new = []
    for name, leaf in zip(names, leaves, strict=True):
        if name not in how or isinstance(leaf, QArray):
            new.append(leaf)
        elif hasattr(leaf, "replace_boxed"):
            from octavo.frameworks.linen_state import boxed

            codes = _converted(leaf.value, how[name], replicate_scale, donate)
            new.append(boxed(codes, leaf, replicate_scale=replicate_scale))
        else:
            new.append(_converted(leaf, how[name], replicate_scale, donate))
    return jax.tree.unflatten(tree, new)


def _is_whole(x: Any) -> bool:
    """A parameter: an array, a QArray, or one in a box of Flax's that names its axes."""
    return is_qarray(x) or hasattr(x, "replace_boxed")


def _names(params: Any) -> list[str | None]:
    fn: Callable[..., Any] = lambda params: None  # noqa: E731
    bare = jax.tree.map(lambda x: x.value if hasattr(x, "replace_boxed") else x, params, is_leaf=_is_whole)
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


def _converted(leaf: Any, how: Quantizer, replicate_scale: bool, donate: bool) -> QArray:
    place = getattr(leaf, "sharding", None)
    quantize = how.quantize
    if isinstance(place, jax.sharding.NamedSharding):
        abstract = jax.eval_shape(how.quantize, leaf)
        where = shardings(abstract, place)
        if replicate_scale:
            everywhere = jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec())
            codes = where.qvalue
            where = jax.tree.map(lambda s: s if s is codes else everywhere, where)
        quantize = jax.jit(how.quantize, out_shardings=where)
    codes = jax.jit(quantize)(leaf)
    if donate and isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        jax.block_until_ready(codes)
        leaf.delete()
    return codes
