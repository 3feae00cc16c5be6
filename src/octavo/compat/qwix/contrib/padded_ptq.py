"""Tiles that do not divide an axis. Every function of Octavo pads them, so these are its functions by Qwix's names.

A QArray keeps its padded codes and knows how many values are padding; `shape` is the original one.
"""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from octavo.frameworks import quantize_params
from octavo.ops import dot_general, einsum
from octavo.qarray import QArray, Quantizer, dequantize
from octavo.transform import PtqProvider

__all__ = [
    "QARRAY_KEEP_PADDED_SHAPE",
    "HowToQuantize",
    "MaybeQArray",
    "PaddedPtqProvider",
    "PaddedQArray",
    "PtqProvider",
    "calibrate",
    "create_quantized_param",
    "dequantize",
    "dot_general",
    "einsum",
    "get_padded_shape",
    "pad_to_shape",
    "quantize",
    "quantize_act",
    "quantize_params",
]

QARRAY_KEEP_PADDED_SHAPE = True
"""Whether codes are stored with their padding: always here."""

PaddedQArray = QArray
PaddedPtqProvider = PtqProvider
MaybeQArray = jax.Array | QArray


def HowToQuantize(  # noqa: N802
    *,
    qtype: Any,
    channelwise_axes: Collection[int] = (),
    tiled_axes: Mapping[int, int | float] | None = None,
    calibration_method: str = "absmax",
    scale_dtype: Any = None,
) -> Quantizer:
    """A `Quantizer`, by the fields of Qwix's class.

    >>> HowToQuantize(qtype="int8", channelwise_axes=(0,), calibration_method="minmax")
    Quantizer('int8', channelwise_axes=(0,), calibration=MinMax())
    """
    return Quantizer(qtype, channelwise_axes, tiled_axes, calibration_method, scale_dtype=scale_dtype)


def calibrate(array: jax.Array, how: Quantizer) -> dict[str, jax.Array]:
    """The range of each tile."""
    return how.measure(array)


def pad_to_shape(array: jax.Array, target_shape: tuple[int, ...]) -> jax.Array:
    """An array with zeros added at the end of each axis.

    >>> pad_to_shape(jnp.ones((2, 3)), (2, 4))[0].tolist()
    [1.0, 1.0, 1.0, 0.0]
    """
    return jnp.pad(array, [(0, new - old) for old, new in zip(array.shape, target_shape, strict=True)])


def get_padded_shape(original_shape: tuple[int, ...], tiled_axes: Mapping[int, int | float]) -> tuple[int, ...]:
    """The shape with each tiled axis filled up to a multiple of its tile; a float 1/n is a count of tiles.

    >>> get_padded_shape((5, 6), {0: 4, 1: 0.5})
    (8, 6)
    """
    shape = list(original_shape)
    for axis, tile in tiled_axes.items():
        size = round(shape[axis] * tile) if isinstance(tile, float) else tile
        shape[axis] = -(-shape[axis] // size) * size if size > 0 else shape[axis]
    return tuple(shape)


def quantize(array: jax.Array, how: Quantizer) -> QArray:
    """Quantize an array, padded to whole tiles."""
    return how.quantize(array)


def quantize_act(array: jax.Array, how: Quantizer, rule: Any, act_name: str | None) -> Any:
    """Not offered: it reads the static range of a Flax module that is running."""
    raise NotImplementedError(
        "quantize_act reads state of the Flax module that is running: a provider's dot_general does it, with "
        "act_static_scale=True in the rule; without a static range, call how.quantize(array)"
    )


def create_quantized_param(name: str, value: jax.Array, how: Quantizer) -> Any:
    """Not offered: it replaces a parameter of a Flax module that is running."""
    raise NotImplementedError(
        "create_quantized_param replaces a parameter of the Flax module that is running: quantize_model with a "
        "PtqProvider does it, or octavo.compat.qwix.WithAux(how.quantize(value), how) makes a parameter"
    )
