"""The methods of post-training quantization, by name: each quantizes one parameter, given statistics of its inputs."""

import dataclasses
from collections.abc import Callable, Mapping

import jax.numpy as jnp

from octavo._names import did_you_mean
from octavo._typing import Array, Float
from octavo.numerics import IntFormat
from octavo.ptq.gptq import gptq
from octavo.ptq.scales import encode, scales_of, search, signed_full_range
from octavo.ptq.statistics import Statistics
from octavo.qarray import QArray, Quantizer

type Method = Callable[[Array, Quantizer, Statistics], QArray]


@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A quantized parameter and its error on the calibration data.

    Attributes:
        array: The codes and scales.
        error: The squared error of the outputs, relative to their square.
        rounding_error: That of plain rounding.
    """

    array: QArray
    error: float
    rounding_error: float


def _round(x: Array, quantizer: Quantizer, statistics: Statistics) -> QArray:
    return quantizer.quantize(x)


def _signed(x: Array, quantizer: Quantizer, statistics: Statistics) -> QArray:
    return signed_full_range(x, quantizer)


def _search(x: Array, quantizer: Quantizer, statistics: Statistics) -> QArray:
    return search(x, quantizer, statistics.view.by_input(statistics.mean_square, x.shape))


def _gptq(x: Array, quantizer: Quantizer, statistics: Statistics) -> QArray:
    scaled, view = _search(x, quantizer, statistics), statistics.view
    grids = scales_of(scaled).map(view.matrices)
    rounded = gptq(view.matrices(x), statistics.hessian, grids, quantizer.qtype, drift=statistics.drift)
    return encode(view.restore(rounded, x.shape), scaled)


METHODS: dict[str, Method] = {"round": _round, "signed": _signed, "search": _search, "gptq": _gptq}


def method_names() -> tuple[str, ...]:
    """The names of all methods.

    >>> method_names()
    ('round', 'signed', 'search', 'gptq')
    """
    return tuple(METHODS)


def get_method(name: str) -> Method:
    """The method of this name."""
    if name == "awq":
        raise ValueError("awq changes parameters other than weights: call octavo.ptq.awq first, then use 'search'")
    if name == "gptaq":
        raise ValueError("gptaq needs the order of the weights: call octavo.ptq.quantize_weights(stages=...)")
    if name == "autoround":
        raise ValueError("autoround trains the codes of another method by blocks: call octavo.ptq.autoround after it")
    if name not in METHODS:
        hint = did_you_mean(name, METHODS)
        raise ValueError(f"{name!r} is no method of quantization: {hint}one of {', '.join(METHODS)}")
    return METHODS[name]


def check_method(name: str, quantizers: Mapping[str, Quantizer]) -> None:
    """Raise, before any work, if there is no such method or it does not apply to the format of a weight."""
    get_method(name)
    for weight, quantizer in quantizers.items():
        fmt = quantizer.qtype
        plain = isinstance(fmt, IntFormat) and fmt.signed and not quantizer.calibration.asymmetric
        if name == "signed" and not plain:
            raise ValueError(
                f"{weight} is quantized to {fmt.name}, but 'signed' is for symmetric signed integers: use 'search'"
            )


def quantize_weight(
    x: Float[Array, "..."], quantizer: Quantizer, statistics: Statistics, *, method: str = "gptq"
) -> QuantizedWeight:
    """Quantize one parameter for inputs with these statistics.

    Args:
        x: The parameter as it is stored.
        quantizer: Its quantizer, as `Quantized.stored_quantizers` gives it.
        statistics: The statistics of its inputs, by `collect_statistics`.
        method: "gptq", "search" for searched scales only, "signed" or "round".

    Returns:
        The codes, with the error on the calibration data and that of plain rounding.
    """
    x = jnp.asarray(x, jnp.float32)
    array = get_method(method)(x, quantizer, statistics)
    matrices = statistics.view.matrices
    power = float(statistics.loss(matrices(x)))

    def error(q: QArray) -> float:
        return float(statistics.loss(matrices(q.dequantize(jnp.float32) - x))) / max(power, 1e-30)

    return QuantizedWeight(array, error(array), error(quantizer.quantize(x)))
