"""A softmax whose probabilities are rounded to a fixed grid on [0, 1].

p = round(exp(x - max x) / sum exp(x - max x)),    dx = p (g - sum p g)
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from octavo._typing import Array, Bool, Float, PRNGKeyArray
from octavo.calibration import Fixed
from octavo.numerics import Format, FormatLike, get_format
from octavo.qarray import QArray, Quantizer


def softmax(
    x: Float[Array, "..."] | QArray,
    axis: int | tuple[int, ...] = -1,
    *,
    quantizer: Quantizer | FormatLike,
    where: Bool[Array, "..."] | None = None,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "..."]:
    """The softmax of `x`, rounded to a grid that is known beforehand: nothing is calibrated.

    A format stands for its grid on [0, 1]: 256 steps of 1/255 for `"uint8"` and `"int8"`, and for `"fp8"` floats with
    their largest value at 1. A Quantizer has a fixed range, `calibration="fixed,0,1"` or, without a zero point,
    `"fixed,1"`. Exponentials and their sum are float32, and the result has the dtype of `x`.

    Rounded probabilities do not add up to one: n of them are off by up to n/2 steps. They are not divided by their sum,
    which would take them off the grid; what is computed from them can be. Where `where` is False, the probability is
    zero; if it is so everywhere, all are. The gradient is that of a softmax with the rounded probabilities.

    >>> jnp.round(softmax(jnp.asarray([0.0, 1.0, 2.0]), quantizer="uint8") * 255).tolist()
    [23.0, 62.0, 170.0]
    """
    how = _fixed(quantizer)
    if isinstance(x, QArray):
        x = x.dequantize()
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    mask = jnp.ones(x.shape, bool) if where is None else jnp.broadcast_to(where, x.shape)
    compute = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    return _softmax(how, axes, key, mask, x.astype(compute)).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _softmax(how: Quantizer, axes: tuple[int, ...], key: Any, mask: Array, x: Array) -> Array:
    most = jnp.max(x, axis=axes, keepdims=True, where=mask, initial=-jnp.inf)
    most = jnp.where(jnp.isfinite(most), most, 0)
    powers = jnp.where(mask, jnp.exp(jnp.where(mask, x, 0) - most), 0)
    total = jnp.sum(powers, axis=axes, keepdims=True)
    p = powers / jnp.where(total == 0, 1, total)
    # Rounded without what is not finite, which would spread to all that share the scale.
    fine = jnp.isfinite(p)
    rounded = how.quantize(jnp.where(fine, p, 0), key=key).dequantize(p.dtype)
    return jnp.where(fine, jnp.where(mask, rounded, 0), p)


@_softmax.defjvp
def _softmax_jvp(how: Quantizer, axes: tuple[int, ...], primals: tuple[Any, ...], tangents: tuple[Any, ...]):
    key, mask, x = primals
    p = _softmax(how, axes, key, mask, x)
    dx = p * tangents[2]
    return p, dx - p * jnp.sum(dx, axis=axes, keepdims=True)


def _fixed(quantizer: Quantizer | FormatLike) -> Quantizer:
    if not isinstance(quantizer, Quantizer):
        fmt = get_format(quantizer)
        return _check(Quantizer(fmt, calibration=_unit(fmt)))
    return _check(quantizer)


def _unit(fmt: Format) -> Fixed:
    return Fixed(0.0, 1.0) if fmt.asymmetric else Fixed(-1.0, 1.0)


def _check(how: Quantizer) -> Quantizer:
    name = how.qtype.name
    if not how.qtype.has_zero:
        raise ValueError(f"a softmax needs a format with a zero, which {name} has not")
    if not isinstance(how.calibration, Fixed):
        text = "fixed,0,1" if how.qtype.asymmetric else "fixed,1"
        raise ValueError(
            f"the range of a softmax is known, but {how!r} calibrates it: use quantizer={name!r}, or "
            f"Quantizer({name!r}, calibration={text!r})"
        )
    return how
