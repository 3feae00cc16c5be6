"""Learned scales of weights: parameters that training optimizes next to the weights.

Esser et al., Learned Step Size Quantization (arXiv 1902.08153). For codes q of w / s and the values s q,

    d(s q)/ds = q - w/s in the range, q outside of it        d(s q)/dw = 1 in the range, 0 outside of it

and the gradient of s is divided by sqrt(n Q), with n weights for each scale and the largest code Q. The matmul itself
has a range that is given, so that trained codes are those of every other quantized matmul.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from octavo._typing import Array
from octavo.calibration import Bounds
from octavo.qarray import QArray, Quantizer, inside
from octavo.transform.frame import Frame, Key
from octavo.transform.site import Site

LEARNED = "learned_scales"
"""The collection of learned scales, under the paths of their weights."""


def learned_ranges(
    site: Site, frame: Frame, operands: Sequence[Any], axes: Sequence[Mapping[str, Any]]
) -> tuple[tuple[Any, Any], dict[str, Bounds]]:
    """The operands of a matmul, and the range of a weight whose scale is learned: gradients reach it through both."""
    left, right = operands
    if site.config is None or site.gradient is not None:
        return (left, right), {}
    side = int(site.weights[1])
    operand, weight = (site.config.fwd.lhs, site.config.fwd.rhs)[side], operands[side]
    if operand is None or not operand.calibration.learned or isinstance(weight, QArray):
        return (left, right), {}
    key, quantizer = learned_key(site), operand.quantizer(weight.ndim, **axes[side])
    scale = frame.read(key, lambda: _initial_scale(quantizer, weight))
    weight, bounds = _with_scale(quantizer, weight, scale)
    return ((left, weight) if side else (weight, right)), {("lhs", "rhs")[side]: bounds}


def learned_key(site: Site) -> Key:
    """The key of the scale of a site's weight, which is in the layout of the stored parameter.

    Raises:
      ValueError: The weight is none, or has another layout as an operand.
    """
    origin = site.origins[int(site.weights[1])]
    layout = [[(f.axis, f.stride) for f in axis] for axis in origin.axes or ()]
    first = layout[0][0][0] if layout and layout[0] else 0
    if site.leaf is None or not origin.is_stored or layout != [[(first + n, 1)] for n in range(len(layout))]:
        raise ValueError(
            f"{site.op_id} at {site.path!r}: the scale of its weight {site.leaf or ''!r} cannot be learned, because "
            "the weight is computed or rearranged before the matmul: exempt it by an earlier rule, or with another "
            "calibration, such as weight_calibration_method='mse'"
        )
    return Key(LEARNED, site.leaf, "scale")


def learned_bounds(quantizer: Quantizer, scale: Array) -> Bounds:
    """The range of a learned scale."""
    return {"absmax": jnp.abs(scale) * quantizer.format.bound}


def _initial_scale(quantizer: Quantizer, weight: Array) -> Array:
    absmax = quantizer.measure(weight)["absmax"].astype(jnp.float32)
    # A scale of zero would stay zero: groups of zeros begin with the widest range.
    return jnp.where(absmax > 0, absmax, jnp.max(absmax)) / quantizer.format.bound


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_scale(quantizer: Quantizer, weight: Array, scale: Array) -> tuple[Array, Bounds]:
    """The weight, and the range by which the matmul quantizes it."""
    return weight, learned_bounds(quantizer, scale)


def _backward(quantizer: Quantizer, saved: tuple[Array, Array], cotangents: Any) -> tuple[Array, Array]:
    (weight, scale), gradient = saved, cotangents[0]
    bounds, tiles = learned_bounds(quantizer, scale), quantizer.tiles(weight.shape)
    values = quantizer.quantize(weight, bounds=bounds).dequantize(jnp.float32)
    kept = inside(quantizer, weight, bounds)
    off = gradient.astype(jnp.float32) * (values - jnp.where(kept, weight.astype(jnp.float32), 0))
    total = tiles.merge(jnp.sum(tiles.split(off), axis=tiles.axes, keepdims=True))
    share = 1 / math.sqrt(math.prod(tiles.sizes) * float(quantizer.format.largest))
    of_scale = jnp.where(scale == 0, 0, share * total / jnp.where(scale == 0, 1, scale))
    return jnp.where(kept, gradient, jnp.zeros_like(gradient)), of_scale.astype(scale.dtype)


_with_scale.defvjp(lambda q, weight, scale: (_with_scale(q, weight, scale), (weight, scale)), _backward)
