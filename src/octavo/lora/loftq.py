"""LoftQ: adapters that begin as what quantization loses of their weights.

Li et al., LoftQ: LoRA-Fine-Tuning-Aware Quantization (arXiv 2310.08659): from A B = 0, repeat

    Q = quantize(W - A B),  A B = the nearest matrix of rank r to W - Q

With statistics of the inputs, nearest means in the outputs of the matmul, as in EoRA, and a method that needs them,
such as GPTQ, may quantize.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from octavo._tree import flatten_paths, unflatten_paths
from octavo._typing import Array
from octavo.lora.layout import Layout, adapter_names, from_stored, stored_shape, to_stored, weight_side
from octavo.lora.rule import LoraRule
from octavo.ptq.low_rank import eora
from octavo.ptq.methods import check_method, get_method
from octavo.ptq.statistics import Statistics
from octavo.qarray import QArray, Quantizer
from octavo.transform import Site


def loftq(
    sites: Iterable[Site],
    params: Any,
    quantizers: Mapping[str, Quantizer],
    *,
    steps: int,
    statistics: Mapping[str, Statistics] | None = None,
    method: str = "round",
) -> tuple[dict[str, Any], dict[str, QArray]]:
    """Adapters, and the quantized weights that they belong to, by path."""
    if steps < 1:
        raise ValueError(f"steps={steps}: LoftQ has at least one")
    check_method(method, quantizers)
    if method != "round" and statistics is None:
        raise ValueError(f"method={method} needs the statistics of the inputs, which were not given")
    adapters: dict[str, Any] = {}
    low: dict[str, QArray] = {}
    weights = flatten_paths(params, lambda x: isinstance(x, QArray))
    for site in sites:
        rule = site.rule
        if not isinstance(rule, LoraRule) or not site.is_adapted or site.leaf in low:
            continue
        assert site.leaf is not None
        weight, origin, layout = weights[site.leaf], site.origins[weight_side(site)], Layout.of(site)
        if isinstance(weight, QArray) or site.leaf not in quantizers:
            raise ValueError(
                f"LoftQ quantizes float weights, but {site.leaf!r} "
                + ("is quantized already" if isinstance(weight, QArray) else "has no weight_qtype in its rule")
            )
        if not origin.is_stored or origin.axes is None or (layout.keeps_axes and layout.batch):
            raise ValueError(
                f"LoftQ needs weights that are matrices as they are stored, and {site.leaf!r} is none: leave its path "
                "out of the rule"
            )
        own = None if statistics is None else _statistics_of(statistics, site.leaf, weight.shape)
        quantize = quantize_as(quantizers[site.leaf], weight, own, method)
        hessian = None if own is None else own.hessian
        low[site.leaf], pair = _alternate(weight, quantize, hessian, layout, origin.axes, rule, steps=steps)
        path, *names = adapter_names(site)
        adapters |= {f"{path}/{name}" if path else name: x for name, x in zip(names, pair, strict=True)}
    return unflatten_paths(adapters), low


def _statistics_of(statistics: Mapping[str, Statistics], name: str, shape: tuple[int, ...]) -> Statistics:
    """The statistics of the inputs of a weight."""
    if name not in statistics or not statistics[name].hessian.size:
        raise ValueError(
            f"there is no Hessian of the inputs of {name!r}: pass what octavo.ptq.collect_statistics returned for this "
            "model, or leave the statistics out"
        )
    statistics[name].view.check(name, shape)
    return statistics[name]


def quantize_as(
    quantizer: Quantizer, weight: Array, statistics: Statistics | None, method: str
) -> Callable[[Array], QArray]:
    """How arrays of the shape of a weight are quantized: to what rounding gives, as for shapes and dtypes."""
    if statistics is None or method == "round":
        return jax.jit(lambda x: quantizer.quantize(x.astype(weight.dtype)))
    like = jax.eval_shape(quantizer.quantize, weight)
    if quantizer.scale_dtype is None and quantizer.qtype.tile is None:  # methods compute in float32
        quantizer = quantizer.replace(scale_dtype=like.scale.dtype)
    return lambda x: get_method(method)(x.astype(jnp.float32), quantizer, statistics).astype(like.dtype)


def _alternate(
    weight: Array,
    quantize: Callable[[Array], QArray],
    hessian: Array | None,
    layout: Layout,
    axes: Any,
    rule: LoraRule,
    *,
    steps: int,
) -> tuple[QArray, tuple[Array, Array]]:
    """The quantized weight and its adapter after so many steps."""
    codes = quantize(weight)
    pair = _fit(weight, codes, hessian, layout, axes, rule)
    for _ in range(steps - 1):
        codes = quantize(_without(weight, pair, layout, axes, rule))
        pair = _fit(weight, codes, hessian, layout, axes, rule)
    stack = weight.shape[: weight.ndim - len(stored_shape(axes))]  # layers
    a, b = (x.reshape(*stack, *x.shape[1:]) for x in pair)
    return codes, (a, b)


@functools.partial(jax.jit, static_argnames=("layout", "axes", "rule"))
def _without(weight: Array, pair: tuple[Array, Array], layout: Layout, axes: Any, rule: LoraRule) -> Array:
    """A weight minus what an adapter adds to it."""
    shape = stored_shape(axes)
    added = jax.vmap(lambda a, b: to_stored(layout.delta(a, b), axes, shape) * rule.scale)(*pair)
    return weight.astype(jnp.float32) - added.reshape(weight.shape)


@functools.partial(jax.jit, static_argnames=("layout", "axes", "rule"))
def _fit(
    weight: Array, codes: QArray, hessian: Array | None, layout: Layout, axes: Any, rule: LoraRule
) -> tuple[Array, Array]:
    """The adapters of all layers that are nearest to what quantization has lost: [layers, ...]."""
    shape = stored_shape(axes)
    error = (weight.astype(jnp.float32) - codes.dequantize(jnp.float32)).reshape(-1, *shape)

    def factors(error: Array, hessian: Array | None) -> tuple[Array, Array]:
        """a and b for an error in the layout of the parameter."""
        order = (*layout.batch, *layout.contracting, *layout.rest)
        sizes = [math.prod(layout.sizes(axes)) for axes in (layout.batch, layout.contracting, layout.rest)]
        matrices = from_stored(error, axes, layout.shape).transpose(order).reshape(sizes)
        if hessian is None:
            left, values, right = jnp.linalg.svd(matrices, full_matrices=False)
            root = jnp.sqrt(values[:, : rule.rank] / rule.scale)
            a, b = left[:, :, : rule.rank] * root[:, None, :], root[:, :, None] * right[:, : rule.rank]
        else:
            a, b = eora(matrices, hessian, rank=rule.rank)
            b = b / rule.scale
        if layout.keeps_axes:
            kept = [i for i in order if i not in layout.rest]
            a = a.reshape(*layout.sizes(tuple(kept)), rule.rank).transpose(*(kept.index(i) for i in sorted(kept)), -1)
        a_shape, b_shape = layout.shapes(rule.rank)
        return a.reshape(a_shape), b.reshape(b_shape)

    if hessian is not None:
        hessian = hessian.reshape(error.shape[0], -1, *hessian.shape[1:])
    return jax.vmap(factors, in_axes=(0, None if hessian is None else 0))(error, hessian)
