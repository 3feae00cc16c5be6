"""Normalization with float32 statistics, whose result (and gain) is rounded.

layer_norm: (x - mean x) / sqrt(var x + epsilon) * scale + bias
rms_norm:   x / sqrt(mean x^2 + epsilon) * scale
"""

import jax
import jax.numpy as jnp

from octavo._typing import Array, Float, PRNGKeyArray
from octavo.numerics import FormatLike
from octavo.qarray import QArray, Quantizer, fake_quant


def layer_norm(
    x: Float[Array, "..."] | QArray,
    scale: Float[Array, "..."] | QArray | None = None,
    bias: Float[Array, "..."] | None = None,
    *,
    axis: int | tuple[int, ...] = -1,
    epsilon: float = 1e-6,
    quantizer: Quantizer | FormatLike | None = None,
    scale_quantizer: Quantizer | FormatLike | None = None,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "..."]:
    """`x` with mean zero and variance one along the axes, times `scale`, plus `bias`, rounded by the quantizer.

    All is computed in float32, also for bfloat16, and the result has the dtype of `x`. `scale` and `bias` have the
    shape of the normalized axes; `scale_quantizer` rounds the former, which may be a QArray instead. Gradients pass
    straight through both roundings.

    >>> layer_norm(jnp.asarray([1.0, 2.0, 3.0]), quantizer="int4").round(2).tolist()
    [-1.3..., 0.0, 1.13...]
    """
    values, axes = _float(x), _axes(x, axis)
    centred = values - jnp.mean(values, axis=axes, keepdims=True)
    normal = _scaled_to_one(centred, axes, epsilon)
    out = _gained(normal, axes, scale, scale_quantizer)
    if bias is not None:
        out = out + _along(bias.astype(out.dtype), out.shape, axes, "bias")
    return _rounded(out, quantizer, key).astype(x.dtype)


def rms_norm(
    x: Float[Array, "..."] | QArray,
    scale: Float[Array, "..."] | QArray | None = None,
    *,
    axis: int | tuple[int, ...] = -1,
    epsilon: float = 1e-6,
    quantizer: Quantizer | FormatLike | None = None,
    scale_quantizer: Quantizer | FormatLike | None = None,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "..."]:
    """`x` with a mean square of one along the axes, times `scale`, rounded by the quantizer; as `layer_norm` otherwise.

    >>> rms_norm(jnp.asarray([3.0, 4.0]), quantizer=Quantizer("int8", calibration="fixed,2")).round(2).tolist()
    [0.84..., 1.12...]
    """
    axes = _axes(x, axis)
    out = _gained(_scaled_to_one(_float(x), axes, epsilon), axes, scale, scale_quantizer)
    return _rounded(out, quantizer, key).astype(x.dtype)


def _float(x: Array | QArray) -> Array:
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    return x.dequantize(wide) if isinstance(x, QArray) else x.astype(wide)


def _axes(x: Array | QArray, axis: int | tuple[int, ...]) -> tuple[int, ...]:
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    if wrong := [a for a in axes if not -x.ndim <= a < x.ndim]:
        raise ValueError(f"axis {wrong[0]} is out of range for an array of shape {x.shape}")
    return tuple(sorted(a % x.ndim for a in axes))


def _scaled_to_one(x: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True) + epsilon)


def _gained(x: Array, axes: tuple[int, ...], scale: Array | QArray | None, how: Quantizer | FormatLike | None) -> Array:
    if scale is None:
        if how is not None:
            raise ValueError("scale_quantizer rounds the scale, but there is none: leave it out")
        return x
    if isinstance(scale, QArray) and how is not None:
        raise TypeError("the scale is quantized already: leave scale_quantizer out")
    return x * _along(_rounded(_float(scale), how), x.shape, axes, "scale")


def _along(part: Array, shape: tuple[int, ...], axes: tuple[int, ...], name: str) -> Array:
    wanted = tuple(shape[a] for a in axes)
    if part.shape != wanted:
        raise ValueError(f"the {name} of a norm along axes {axes} of {shape} has shape {wanted}, got {part.shape}")
    return part.reshape([n if a in axes else 1 for a, n in enumerate(shape)])


def _rounded(x: Array, how: Quantizer | FormatLike | None, key: PRNGKeyArray | None = None) -> Array:
    return x if how is None else fake_quant(x, how, key=key)
