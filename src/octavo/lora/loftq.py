"""LoftQ: adapters that begin as what quantization loses of their weights.

Li et al., LoftQ: LoRA-Fine-Tuning-Aware Quantization (arXiv 2310.08659): from A B = 0, repeat

    Q = quantize(W - A B),  A B = the nearest matrix of rank r to W - Q

With statistics of the inputs, nearest means in the outputs of the matmul, as in EoRA.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from octavo._tree import flatten_paths, unflatten_paths
from octavo._typing import Array
from octavo.lora.layout import Layout, adapter_names, from_stored, stored_shape, to_stored, weight_side
from octavo.lora.rule import LoraRule
from octavo.ptq.low_rank import eora
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
) -> tuple[dict[str, Any], dict[str, QArray]]:
    """Adapters, and the quantized weights that they belong to, by path."""
    if steps < 1:
        raise ValueError(f"steps={steps}: LoftQ has at least one")
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
        hessian = None
        if statistics is not None:
            hessian = _hessian(statistics, site.leaf, weight.shape)
        fixed = quantizers[site.leaf], layout, origin.axes, rule
        low[site.leaf], pair = _alternate(weight, hessian, *fixed, steps=steps)
        path, *names = adapter_names(site)
        adapters |= {f"{path}/{name}" if path else name: x for name, x in zip(names, pair, strict=True)}
    return unflatten_paths(adapters), low


def _hessian(statistics: Mapping[str, Statistics], name: str, shape: tuple[int, ...]) -> Array:
    """The Hessian of the inputs of a weight, of each of its matrices."""
    if name not in statistics or not statistics[name].hessian.size:
        raise ValueError(
            f"there is no Hessian of the inputs of {name!r}: pass what octavo.ptq.collect_statistics returned for this "
            "model, or leave the statistics out"
        )
    statistics[name].view.check(name, shape)
    return statistics[name].hessian


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5), static_argnames="steps")
def _alternate(
    weight: Array,
    hessian: Array | None,
    quantizer: Quantizer,
    layout: Layout,
    axes: Any,
    rule: LoraRule,
    *,
    steps: int,
) -> tuple[QArray, tuple[Array, Array]]:
    """The quantized weight and its adapter after so many steps."""
    shape = stored_shape(axes)
    stacked = weight.reshape(-1, *shape)  # layers
    stack = weight.shape[: weight.ndim - len(shape)]

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
        hessian = hessian.reshape(stacked.shape[0], -1, *hessian.shape[1:])

    def product(a: Array, b: Array) -> Array:
        return to_stored(layout.delta(a, b), axes, shape) * rule.scale

    def step(delta: Array) -> tuple[QArray, Array, Array]:
        codes = quantizer.quantize((stacked - delta).reshape(weight.shape).astype(weight.dtype))
        left = stacked.astype(jnp.float32) - codes.dequantize(jnp.float32).reshape(stacked.shape)
        return codes, *jax.vmap(factors, in_axes=(0, None if hessian is None else 0))(left, hessian)

    codes, a, b = step(jnp.zeros_like(stacked))
    for _ in range(steps - 1):
        codes, a, b = step(jax.vmap(product)(a, b))
    return codes, (a.reshape(*stack, *a.shape[1:]), b.reshape(*stack, *b.shape[1:]))
