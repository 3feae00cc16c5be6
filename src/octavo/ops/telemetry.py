"""How well a number format fits what it is given: sums over the values of an operand, as the product quantizes it.

A product whose `scaling` has zeros under `telemetry_name(name)` returns these sums as their gradient. They are measured
on the very codes that are multiplied, after a rotation, smoothing or a scale that was moved in, so that nothing is
quantized twice, and they come out of loops and rematerialization as the state of delayed scaling does.
"""

from typing import Any

import jax.numpy as jnp

from octavo import _sharding
from octavo._typing import Array
from octavo.ops.config import DotConfig, Operand
from octavo.qarray import QArray

SUMS = ("count", "saturated", "underflowed", "signal", "noise", "scale", "largest_scale")
"""What is measured, of values that are not zero; all are sums over values but the last, a maximum."""
_PREFIX = "telemetry_"


def telemetry_name(name: str) -> str:
    """The name in a scaling under which the sums of an operand ("lhs", "rhs", "dlhs", "drhs") come out."""
    return f"{_PREFIX}{name}"


def telemetry_operands(names: Any) -> set[str]:
    """The operands that names in a scaling are about."""
    return {name.removeprefix(_PREFIX) for name in names}


def measured_operands(config: DotConfig) -> dict[str, Operand]:
    """The operands that a product quantizes anew: both of the forward, and the gradient in each of the two others."""
    operands = {"lhs": config.fwd.lhs, "rhs": config.fwd.rhs, "dlhs": config.dlhs.lhs, "drhs": config.drhs.lhs}
    return {name: operand for name, operand in operands.items() if operand is not None}


def init_telemetry(config: DotConfig) -> dict[str, dict[str, Array]]:
    """Zeros for every operand that a product quantizes."""
    return {name: {part: jnp.zeros((), jnp.float32) for part in SUMS} for name in measured_operands(config)}


def measure_fit(scaling: dict[str, Any], name: str | None, x: Array, q: Any) -> dict[str, dict[str, Array]]:
    """The sums of an operand, if they are asked for."""
    if name is None or telemetry_name(name) not in scaling or not isinstance(q, QArray):
        return {}
    return {telemetry_name(name): fit(x, q)}


def fit(x: Array, q: QArray) -> dict[str, Array]:
    """Sums that tell how well codes fit the values that they are of.

    `saturated` counts values beyond the end of the format by more than the rounding of their scale explains,
    `underflowed` those that became zero; `scale` adds up the scale of every value.

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
    there = x != 0
    outside = (x > (high * slack - zero) * scale) | (x < (low * slack - zero) * scale)
    count = lambda mask: jnp.sum(mask, dtype=jnp.int32)  # noqa: E731
    sums = {
        "count": count(there),
        "saturated": count(there & outside),
        "underflowed": count(there & (back == 0)),
        "signal": jnp.sum(x * x),
        "noise": jnp.sum((x - back) ** 2),
        "scale": jnp.sum(jnp.where(there, scale, jnp.zeros_like(scale))),
        "largest_scale": jnp.max(jnp.where(there, scale, jnp.zeros_like(scale)), initial=0),
    }
    return {name: value.astype(jnp.float32) for name, value in sums.items()}


def _rounding(dtype: Any) -> float:
    """By how much, relatively, a scale may be smaller for being stored; a power of two is smaller only on purpose."""
    single = float(jnp.finfo(jnp.float32).eps)
    return 4 * single + (0.0 if dtype == jnp.float8_e8m0fnu else float(jnp.finfo(dtype).eps) / 2)


def _spread(part: Array, q: QArray, dtype: Any) -> Array:
    """A scale with an entry for each value of a tiled axis, without padding; what all share stays one entry."""
    for axis, (stored, size) in enumerate(zip(q.qvalue.shape, q.shape, strict=True)):
        if 1 < part.shape[axis] < stored:
            part = _sharding.repeat(part, stored // part.shape[axis], axis)
        if part.shape[axis] > size:
            part = part[(slice(None),) * axis + (slice(0, size),)]
    return jnp.asarray(part, dtype)
