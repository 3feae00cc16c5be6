"""Telemetry of quantized operands: how well a format fits the values, as sums over an operand.

A `Product` whose `scaling` has zeros under `telemetry_name(name)` returns these sums as their gradient. They are
measured on the codes that are multiplied, after rotation, smoothing or moving scales, so nothing is quantized twice;
like the state of delayed scaling they pass through loops and rematerialization.
"""

from typing import Any

import jax.numpy as jnp

from octavo import _sharding
from octavo._typing import Array
from octavo.ops.config import DotConfig, Operand
from octavo.qarray import QArray

SUMS = ("count", "saturated", "underflowed", "signal", "noise", "scale", "largest_scale")
"""The measured quantities, over nonzero values: sums, except for the last, a maximum."""
_PREFIX = "telemetry_"


def telemetry_name(name: str) -> str:
    """The key in a scaling for the telemetry of an operand ("lhs", "rhs", "dlhs", "drhs")."""
    return f"{_PREFIX}{name}"


def telemetry_operands(names: Any) -> set[str]:
    """The operands that keys of a scaling refer to."""
    return {name.removeprefix(_PREFIX) for name in names}


def measured_operands(config: DotConfig) -> dict[str, Operand]:
    """The operands with telemetry: both of the forward, and the cotangent in each of the two gradients."""
    operands = {"lhs": config.fwd.lhs, "rhs": config.fwd.rhs, "dlhs": config.dlhs.lhs, "drhs": config.drhs.lhs}
    return {name: operand for name, operand in operands.items() if operand is not None}


def init_telemetry(config: DotConfig) -> dict[str, dict[str, Array]]:
    """Zeros for every quantized operand of a config."""
    return {name: {part: jnp.zeros((), jnp.float32) for part in SUMS} for name in measured_operands(config)}


def measure_fit(scaling: dict[str, Any], name: str | None, x: Array, q: Any) -> dict[str, dict[str, Array]]:
    """The telemetry of an operand, if the scaling asks for it."""
    if name is None or telemetry_name(name) not in scaling or not isinstance(q, QArray):
        return {}
    return {telemetry_name(name): fit(x, q)}


def fit(x: Array, q: QArray) -> dict[str, Array]:
    """Sums that measure how well codes represent the values they were quantized from.

    `saturated` counts values outside the format's range by more than the rounding of their scale explains,
    `underflowed` nonzero values that became zero; `scale` is the sum of the scales of all values.

    >>> import octavo
    >>> x = jnp.asarray([1e-3, 0.0, 1.0, 4.0])
    >>> sums = fit(x, octavo.quantize(x, "int8", calibration_method="fixed,-2,2"))
    >>> int(sums["count"]), int(sums["saturated"]), int(sums["underflowed"])
    (3, 1, 1)
    """
    q = q.unpack()
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    x, back = x.astype(wide), q.dequantize(wide)
    scale = _spread(q.scale, q, wide)
    if q.outer_scale is not None:
        scale = scale * _spread(q.outer_scale, q, wide)
    zero = jnp.zeros((1,) * x.ndim, wide) if q.zero_point is None else _spread(q.zero_point, q, wide)
    fmt = q.qtype
    high = max(fmt.bound, fmt.largest)
    low = fmt.smallest - (high - fmt.largest)
    slack = 1 + _rounding(q.scale.dtype)
    nonzero = x != 0
    outside = (x > (high * slack - zero) * scale) | (x < (low * slack - zero) * scale)
    count = lambda mask: jnp.sum(mask, dtype=jnp.int32)  # noqa: E731
    sums = {
        "count": count(nonzero),
        "saturated": count(nonzero & outside),
        "underflowed": count(nonzero & (back == 0)),
        "signal": jnp.sum(x * x),
        "noise": jnp.sum((x - back) ** 2),
        "scale": jnp.sum(jnp.where(nonzero, scale, jnp.zeros_like(scale))),
        "largest_scale": jnp.max(jnp.where(nonzero, scale, jnp.zeros_like(scale)), initial=0),
    }
    return {name: value.astype(jnp.float32) for name, value in sums.items()}


def _rounding(dtype: Any) -> float:
    """The relative rounding error of a stored scale; power-of-two scales are rounded down only on purpose."""
    single = float(jnp.finfo(jnp.float32).eps)
    return 4 * single + (0.0 if dtype == jnp.float8_e8m0fnu else float(jnp.finfo(dtype).eps) / 2)


def _spread(part: Array, q: QArray, dtype: Any) -> Array:
    """A scale expanded to one entry per value along tiled axes, without padding; axes of size one stay."""
    for axis, (stored, size) in enumerate(zip(q.qvalue.shape, q.shape, strict=True)):
        if 1 < part.shape[axis] < stored:
            part = _sharding.repeat(part, stored // part.shape[axis], axis)
        if part.shape[axis] > size:
            part = part[(slice(None),) * axis + (slice(0, size),)]
    return jnp.asarray(part, dtype)
