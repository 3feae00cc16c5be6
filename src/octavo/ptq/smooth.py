"""SmoothQuant: part of the range of activations is moved into the weights, which leaves the function unchanged.

Xiao, Lin, Seznec, Wu, Demouth and Han, SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
Language Models (2023). For the inputs x_k = g_k n_k of some weights, where g is the scale of a norm:

    s_k = max|x_k|^alpha / max_j|W_kj|^(1 - alpha)        g_k <- g_k / s_k        W_kj <- s_k W_kj

It is meant for activations in eight bits with static ranges. All weights that read x share s, and the maximum over
them is taken; x is divided exactly once, where it is made.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from octavo._typing import Array, Float
from octavo.frameworks.serving import map_params
from octavo.ptq.statistics import Statistics, collect_statistics, named_leaves


@dataclasses.dataclass(frozen=True)
class Fold:
    """A parameter that scales the inputs of some weights elementwise, such as the scale of a norm.

    Args:
        scale: The name of the parameter, of the shape of one input, with the stack of the weights in front.
        weights: The names of all weights that read these inputs, and nothing else does.

    >>> Fold("norm/scale", ("query/kernel", "key/kernel", "value/kernel")).scale
    'norm/scale'
    """

    scale: str
    weights: tuple[str, ...]


def smooth(
    fn: Callable[..., Any], params: Any, batches: Iterable[Any], folds: Sequence[Fold], *, alpha: float = 0.5
) -> Any:
    """Parameters of the same function in float, whose activations are easier to quantize with a static range.

    Args:
        fn: A function of parameters and inputs.
        params: The parameters.
        batches: Batches of inputs, as for `quantize`.
        folds: Where activations are scaled, and the weights that read them.
        alpha: How much of the range moves into the weights, between 0 and 1.

    Returns:
        The parameters, with other scales of norms and other weights.

    >>> import jax
    >>> def predict(params, x):
    ...     return (x / jnp.std(x) * params["scale"][None]) @ params["w"]
    >>> params = {"scale": jnp.asarray([1.0, 100.0]), "w": jnp.asarray([[1.0, 2.0], [0.1, -0.1]])}
    >>> x = jax.random.normal(jax.random.key(0), (64, 2))
    >>> new = smooth(predict, params, [x], [Fold("scale", ("w",))])
    >>> bool(jnp.allclose(predict(params, x), predict(new, x), atol=1e-3)), bool(new["scale"].max() < 20)
    (True, True)
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is between 0 (weights as they are) and 1 (activations of equal range), got {alpha}")
    found, leaves = fold_statistics(fn, params, batches, folds)
    factors = []
    for fold in folds:
        largest = [jnp.max(jnp.abs(found[n].view.matrices(leaves[n])), axis=-1) for n in fold.weights]
        weight = jnp.maximum(jnp.max(jnp.stack(largest), axis=0), 1e-8).astype(jnp.float32)
        inputs = jnp.maximum(found[fold.weights[0]].max_abs, 1e-8)
        factors.append(inputs**alpha / weight ** (1 - alpha))
    return apply_folds(params, folds, factors, found)


def fold_statistics(
    fn: Callable[..., Any],
    params: Any,
    batches: Iterable[Any],
    folds: Sequence[Fold],
    also: Collection[str] = (),
) -> tuple[dict[str, Statistics], dict[str, Any]]:
    """The statistics of all weights of the folds (and `also` others), and the parameters by name."""
    leaves = named_leaves(params)
    names = [name for fold in folds for name in (fold.scale, *fold.weights)]
    if unknown := [name for name in names if name not in leaves]:
        raise ValueError(f"there is no parameter {unknown[0]!r} to scale; there are {', '.join(list(leaves)[:5])}, ...")
    weights = {name for fold in folds for name in fold.weights}
    found, missing = collect_statistics(fn, params, batches, only=weights | set(also))
    for name in weights:
        if name not in found:
            reason = missing.get(name, "it is not an operand of a matmul in float")
            raise ValueError(f"the inputs of {name!r} were not observed: {reason}")
    for fold in folds:
        size = found[fold.weights[0]].mean_abs.size
        if leaves[fold.scale].size != size:
            raise ValueError(f"{fold.scale!r} has {leaves[fold.scale].size} values, but its weights {size} inputs")
    return found, leaves


def apply_folds(
    params: Any, folds: Sequence[Fold], factors: Sequence[Float[Array, "s k"]], found: Mapping[str, Statistics]
) -> Any:
    """Parameters with weights multiplied by factors of their inputs, and the scales of these inputs divided by them."""
    by_weight = {name: factor for fold, factor in zip(folds, factors, strict=True) for name in fold.weights}
    by_scale = {fold.scale: factor for fold, factor in zip(folds, factors, strict=True)}

    def new(name: str, leaf: Any) -> Any:
        if name in by_weight:
            factor = found[name].view.by_input(by_weight[name], leaf.shape)
            return (leaf * factor.astype(leaf.dtype)).astype(leaf.dtype)
        return leaf / by_scale[name].reshape(leaf.shape).astype(leaf.dtype) if name in by_scale else leaf

    return map_params(new, params)


def folded_statistics(statistics: Statistics, factor: Float[Array, "s k"]) -> Statistics:
    """The statistics of inputs that are divided by a factor."""
    return dataclasses.replace(
        statistics,
        hessian=statistics.hessian / (factor[:, :, None] * factor[:, None, :]),
        mean_square=statistics.mean_square / (factor * factor),
        mean_abs=statistics.mean_abs / factor,
        max_abs=statistics.max_abs / factor,
    )
