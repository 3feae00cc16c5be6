"""SmoothQuant: statistics by a calibration model, then parameters for `SqInferenceProvider`.

Activations are divided by the factors and then quantized. `octavo.ptq.smooth` folds the factors into the scales of
norms instead, which costs nothing when serving.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from octavo.compat.qwix.contrib.calibration import (
    CalibratedQuantContext,
    SinglePassCalibrationProvider,
    quantize_params_with_calibration,
)
from octavo.compat.qwix.contrib.input_scales import InputScaleProvider
from octavo.frameworks import WithAux
from octavo.qarray import Quantizer
from octavo.rules import QuantizationRule


def compute_scales_ratio(act_stats: jax.Array, weight_stats: jax.Array, alpha: float) -> jax.Array:
    """The factor of each input, by the magnitudes of activations and weights.

    >>> compute_scales_ratio(jnp.asarray([4.0]), jnp.asarray([1.0]), 0.5).tolist()
    [2.0]
    """
    return jnp.clip(act_stats**alpha / weight_stats ** (1 - alpha), min=1e-5).astype(weight_stats.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class SqRule(QuantizationRule):
    """A rule whose weights and activations are quantized by SmoothQuant.

    Attributes:
        alpha: How much of the range of activations moves into the weights, between 0 and 1.
    """

    alpha: float = 0.5


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array", "inv_sq_scale"],
    meta_fields=["how", "contracting_axis"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class WithSqScale(WithAux):
    """A quantized parameter that was multiplied by a factor for each input.

    Attributes:
        inv_sq_scale: One over the factors, [inputs].
        contracting_axis: The axis of the inputs.
    """

    inv_sq_scale: Any
    contracting_axis: int

    @property
    def companions(self) -> dict[str, Any]:
        return {"inv_sq_scale": self.inv_sq_scale}


class SqCalibrationProvider(SinglePassCalibrationProvider):
    """Records the factor of each input, by the ranges of the batch and of the weight."""

    def get_rule_type(self) -> type[QuantizationRule]:
        return SqRule

    def compute_stats(self, lhs: jax.Array) -> dict[str, Any]:
        rule = self.operation.site.rule
        assert isinstance(rule, SqRule)
        if rule.act_qtype is None:
            raise ValueError(
                f"{rule} has no act_qtype: SmoothQuant is for quantized activations; for weights alone use contrib.awq"
            )
        sides = (
            (lhs, rule.act_qtype, rule.act_calibration_method or "absmax"),
            (self.weight, rule.weight_qtype, rule.weight_calibration_method),
        )
        act, weight = (_scale(x, Quantizer(qtype, (0,), calibration=method)) for x, qtype, method in sides)
        scale = compute_scales_ratio(act, weight, rule.alpha)
        return {"sq_scale": scale, "inv_sq_scale": 1 / scale}

    def get_stats_suffix(self) -> str:
        return "_sq"


def _scale(x: jax.Array, quantizer: Quantizer) -> jax.Array:
    found = quantizer.scale_of(quantizer.measure(x), x.dtype)
    if "zero_point" in found:
        raise ValueError(f"SmoothQuant needs symmetric ranges: use 'absmax' in place of {quantizer.calibration!r}")
    return found["scale"].reshape(-1)


def quantize_params(
    params: Any, abstract_quantized_params: Any, sq_quant_stats: Any, *, allow_extra_params: bool = False
) -> Any:
    """Quantize parameters by SmoothQuant where there are statistics, and others as `quantize_params` does.

    Args:
        params: As for `quantize_params`.
        abstract_quantized_params: As for `quantize_params`.
        sq_quant_stats: The statistics of a `SqCalibrationProvider`.
        allow_extra_params: As for `quantize_params`.

    Returns:
        Parameters for a model of a `SqInferenceProvider`.
    """

    def quantize(context: CalibratedQuantContext) -> WithSqScale:
        # The mean of the inverses is not the inverse of the mean: only the latter leaves the function unchanged.
        scale = context.calibration_stats["sq_scale"]
        return WithSqScale(
            array=context.restore_shape(context.how.quantize(context.weight * scale[None])),
            how=context.abs_w.how,
            inv_sq_scale=1 / scale,
            contracting_axis=context.contracting_axis,
        )

    return quantize_params_with_calibration(
        params, abstract_quantized_params, sq_quant_stats, "_sq", quantize, allow_extra_params=allow_extra_params
    )


class SqInferenceProvider(InputScaleProvider):
    """Serves parameters of SmoothQuant, with quantized activations, and those of plain rounding."""

    suffix, divides = "inv_sq_scale", False
