"""Quantizing an array with the absmax of its groups: range, scale and codes in one custom call.

As XLA's own operations these are five kernels for each operand, which are compiled anew in every program.
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo._typing import Array, Float, Shape
from octavo.kernels.library import QUANTIZE_TARGET, require

# With shorter runs of adjacent values, or no axis to distribute, XLA's code is faster.
_FEWEST_ADJACENT, _MOST_AXES, _LARGE = 16, 8, 1 << 15


def quantize_absmax(
    x: Float[Array, "..."],
    factor: Float[Array, "..."] | None = None,
    *,
    scale_shape: Shape,
    unit: float,
    low: int,
    high: int,
    isa: str = "",
    threads: int = 0,
) -> tuple[Array, Array]:
    """The int8 codes of `x * factor` and their float32 scales, bit-equal to `octavo.qarray.Quantizer`'s.

    Args:
      x: float32 values, none of whose axes is empty.
      factor: multiplies the values; its axes have size 1 or that of `x`.
      scale_shape: the shape of the scale: of each axis 1 or the size of `x`.
      unit: the scale of an absmax of 1.
      low: the lowest code.
      high: the highest code.
      isa: forces one of `versions()`; "" for the fastest.
      threads: forces a number of threads; 0 for the default.

    Returns:
      Codes and scales.

    >>> codes, scale = quantize_absmax(jnp.ones((2, 4)), scale_shape=(2, 1), unit=1 / 127, low=-128, high=127)
    >>> codes.tolist()
    [[127, 127, 127, 127], [127, 127, 127, 127]]
    """
    require()
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.int8), jax.ShapeDtypeStruct(scale_shape, jnp.float32)]
    factors = () if factor is None else (factor,)
    more = {"factor": None if factor is None else factor.shape, "isa": isa, "threads": threads}
    static = quantize_attributes(x.shape, scale_shape, unit, low, high, **more)
    codes, scale = jax.ffi.ffi_call(QUANTIZE_TARGET, shapes)(x, *factors, **static)
    return codes, scale


def quantize_attributes(
    shape: Shape,
    scale_shape: Shape,
    unit: float,
    low: int,
    high: int,
    *,
    factor: Shape | None = None,
    isa: str = "",
    threads: int = 0,
) -> dict[str, Any]:
    """The attributes of the custom call, for shapes in place of arrays."""
    floats = {"unit": np.float32(unit), "low": np.float32(low), "high": np.float32(high)}
    return _axes(shape, scale_shape, factor) | floats | {"isa": isa, "threads": np.int32(threads)}


def _axes(shape: Shape, scale: Shape, factor: Shape | None) -> dict[str, Any]:
    """Sizes of axes, and which of them have scales and factors; adjacent axes that are alike are one."""
    kinds = [
        (size, own != 1, factor is not None and factor[axis] != 1)
        for axis, (size, own) in enumerate(zip(shape, scale, strict=True))
        if size != 1
    ] or [(1, True, False)]
    axes = [(key, [size for size, *_ in of]) for key, of in itertools.groupby(kinds, lambda kind: kind[1:])]
    return {
        "sizes": np.asarray([math.prod(sizes) for _, sizes in axes], np.int64),
        "has_scale": np.asarray([own for (own, _), _ in axes], np.int64),
        "has_factor": np.asarray([multiplied for (_, multiplied), _ in axes], np.int64),
    }


def can_quantize(shape: Shape, scale_shape: Shape, factor: Shape | None = None) -> bool:
    """Whether the custom call supports these shapes, and is no slower than XLA's code."""
    if 0 in shape or not all(isinstance(size, int) for size in shape):
        return False
    axes = _axes(shape, scale_shape, factor)
    sizes = [int(size) for size in axes["sizes"]]
    parallel = max((size for size, own in zip(sizes, axes["has_scale"], strict=True) if own), default=0)
    distributed = parallel >= 8 or (parallel > 0 and math.prod(shape) < _LARGE)
    return len(sizes) <= _MOST_AXES and sizes[-1] >= _FEWEST_ADJACENT and distributed
