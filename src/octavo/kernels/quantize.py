"""Quantizing an array with the absmax of its groups: range, scale and codes in one custom call; and the way back.

As XLA's own operations these are five kernels for each operand, which are compiled anew in every program. Rounding to
float4, and drawing random bits, are far slower in XLA's.
"""

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from octavo._typing import Array, Float, Shape
from octavo.kernels.library import DEQUANTIZE_TARGET, NOISE_TARGET, QUANTIZE_TARGET, available, require
from octavo.numerics.rounding import noise_p

# With shorter runs of adjacent values, or no axis to distribute, XLA's code is faster.
_FEWEST_ADJACENT, _MOST_AXES, _LARGE = 16, 8, 1 << 15


class Rounding(NamedTuple):
    """How values are rounded: the codes, the scales, and the range that is mapped to them.

    Args:
      codes: the dtype of the codes: int8, float8_e4m3fn, float8_e5m2 or float4_e2m1fn.
      unit: the scale of an absmax of 1.
      low: the lowest code of int8.
      high: the highest code.
      scales: the dtype of the scales: float32; float8_e8m0fnu; or float8_e4m3fn, under a float32 scale of the tensor.
      mode: "" for scales of groups; "tensor" for one of all; "floor" for powers of two that are rounded down;
        "four_over_six" and "sums", for float4 under a scale of the tensor, as for `FourOverSix` and `Eden`.
      factor: multiplies the absmax.
      headroom: multiplies the range of the tensor that is mapped to the largest scale.
      outer_unit: the scale of a tensor whose range is 1.
      noise_bits: of stochastic rounding; 0 for rounding to nearest.
    """

    codes: str = "int8"
    unit: float = 1 / 127.5
    low: float = -128
    high: float = 127
    scales: str = "float32"
    mode: str = ""
    factor: float = 1.0
    headroom: float = 1.0
    outer_unit: float = 1.0
    noise_bits: int = 0

    def outputs(self, shape: Shape, scale_shape: Shape) -> list[jax.ShapeDtypeStruct]:
        """Codes, scales, the scale of the tensor and sums, as far as there are any."""
        found = [(shape, self.codes), (scale_shape, self.scales)]
        if self.scales == "float8_e4m3fn":
            found.append(((1,) * len(scale_shape), "float32"))
        if self.mode == "sums":
            found += [(scale_shape, "float32")] * 2
        return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in found]


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
    rounding = Rounding(unit=unit, low=low, high=high)
    codes, scale = quantize_groups(x, factor, rounding=rounding, scale_shape=scale_shape, isa=isa, threads=threads)
    return codes, scale


def quantize_groups(
    x: Float[Array, "..."],
    factor: Float[Array, "..."] | None = None,
    key: Array | None = None,
    *,
    rounding: Rounding,
    scale_shape: Shape,
    split: tuple[Shape, Shape] | None = None,
    isa: str = "",
    threads: int = 0,
) -> list[Array]:
    """The codes of `x * factor` and their scales, bit-equal to `octavo.qarray.Quantizer`'s.

    Args:
      x: float32 values, none of whose axes is empty.
      factor: multiplies the values; its axes have size 1 or that of `x`.
      key: the two words of a threefry key, for stochastic rounding.
      rounding: the formats and the range.
      scale_shape: the shape of the scale.
      split: the shapes of values and scale with tiles as axes of their own, if there are tiles: of each axis the scale
        has size 1 or that of the values. In mode "tensor", shapes in which the range is measured.
      isa: forces one of `versions()`; "" for the fastest.
      threads: forces a number of threads; 0 for the default.

    Returns:
      What `rounding.outputs` describes.

    >>> e4m3 = Rounding("float8_e4m3fn", unit=1 / 448, high=448)
    >>> quantize_groups(jnp.ones((2, 16)), rounding=e4m3, scale_shape=(2, 1))[0].dtype
    dtype(float8_e4m3fn)
    """
    require()
    shape, scales = split or (x.shape, scale_shape)
    floats = ("unit", "low", "high", "headroom", "outer_unit")
    static = _axes(shape, scales, None if factor is None else factor.shape)
    static |= {name: np.float32(getattr(rounding, name)) for name in floats} | {"range": np.float32(rounding.factor)}
    static |= {"mode": rounding.mode, "noise_bits": np.int32(rounding.noise_bits)}
    given = [a for a in (factor, key) if a is not None]
    call = jax.ffi.ffi_call(QUANTIZE_TARGET, rounding.outputs(x.shape, scale_shape))
    return list(call(x, *given, **static, isa=isa, threads=np.int32(threads)))


def dequantize_float4(
    codes: Array,
    scale: Array,
    outer: Array | None = None,
    *,
    split: tuple[Shape, Shape] | None = None,
    isa: str = "",
    threads: int = 0,
) -> Float[Array, "..."]:
    """The values of float4 codes in blocks, bit-equal to `octavo.QArray.dequantize`'s.

    Args:
      codes: float4_e2m1fn codes.
      scale: their scales, in float8_e8m0fnu or float8_e4m3fn.
      outer: the scale of the tensor, if there is one.
      split: as in `quantize_groups`.
      isa: forces one of `versions()`; "" for the fastest.
      threads: forces a number of threads; 0 for the default.

    Returns:
      Float32 values.

    >>> codes, scale = jnp.ones((2, 16), "float4_e2m1fn"), jnp.full((2, 1), 2, "float8_e8m0fnu")
    >>> float(dequantize_float4(codes, scale)[0, 0])
    2.0
    """
    require()
    shape, scales = split or (codes.shape, scale.shape)
    call = jax.ffi.ffi_call(DEQUANTIZE_TARGET, jax.ShapeDtypeStruct(codes.shape, jnp.float32))
    given = () if outer is None else (outer,)
    return call(codes, scale, *given, **_axes(shape, scales, None), isa=isa, threads=np.int32(threads))


def noise(key: Array, shape: Shape, bits: int, *, isa: str = "", threads: int = 0) -> Float[Array, "..."]:
    """The noise of `octavo.numerics.Stochastic` from the two words of a threefry key.

    >>> words = jax.random.key_data(jax.random.key(0))
    >>> noise(words, (2, 3), 24).shape
    (2, 3)
    """
    require()
    call = jax.ffi.ffi_call(NOISE_TARGET, jax.ShapeDtypeStruct(shape, jnp.float32))
    return call(key, bits=np.int32(bits), isa=isa, threads=np.int32(threads))


def runs_alone(ctx: Any) -> bool:
    """Whether a program that is lowered for CPUs may have custom calls: it is for one device, and not exported.

    XLA cannot partition a custom call, and a machine that runs an exported program may have no kernels.
    """
    module = ctx.module_context
    one = getattr(module.axis_context, "num_devices", 0) == 1
    return one and not module.lowering_parameters.for_export and available()


def _lower_noise(ctx: Any, key: Any, *, shape: Shape, bits: int) -> Any:
    def run(key: Array) -> Array:
        return noise(key, shape, bits) if runs_alone(ctx) else noise_p.impl(key, shape=shape, bits=bits)

    return mlir.lower_fun(run, multiple_results=False)(ctx, key)


mlir.register_lowering(noise_p, _lower_noise, platform="cpu")


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


def can_quantize(shape: Shape, scale_shape: Shape, factor: Shape | None = None, codes: str = "int8") -> bool:
    """Whether the custom call supports these shapes, and is no slower than XLA's code."""
    if not all(isinstance(size, int) for size in shape) or 0 in shape:
        return False
    axes = _axes(shape, scale_shape, factor)
    sizes = [int(size) for size in axes["sizes"]]
    if codes == "float4_e2m1fn" and sizes[-1] % 2:
        return False
    parallel = max((size for size, own in zip(sizes, axes["has_scale"], strict=True) if own), default=0)
    distributed = parallel >= 8 or (parallel > 0 and math.prod(shape) < _LARGE)
    return len(sizes) <= _MOST_AXES and sizes[-1] >= _FEWEST_ADJACENT and distributed
