"""AWQ: statistics by a calibration model, then parameters for `AwqInferenceProvider`.

`octavo.ptq.awq` folds the factors into the scales of norms instead, which costs nothing when serving.
"""

import dataclasses
import functools
from typing import Any

import jax

from octavo.compat.qwix.contrib import awq_core
from octavo.compat.qwix.contrib.calibration import (
    CalibratedQuantContext,
    SinglePassCalibrationProvider,
    quantize_params_with_calibration,
)
from octavo.compat.qwix.contrib.input_scales import InputScaleProvider
from octavo.frameworks import WithAux
from octavo.rules import QuantizationRule


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class AwqRule(QuantizationRule):
    """A rule whose weights are quantized by AWQ.

    Attributes:
        n_grid: Accepted for Qwix, which does not read it either: `quantize_params` has an argument of this name.
    """

    n_grid: int = 20


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array", "awq_scale"],
    meta_fields=["how", "contracting_axis"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class WithAwqScale(WithAux):
    """A quantized parameter that was multiplied by a factor for each input.

    Attributes:
        awq_scale: The factors, [inputs].
        contracting_axis: The axis of the inputs.
    """

    awq_scale: Any
    contracting_axis: int

    @property
    def companions(self) -> dict[str, Any]:
        return {"awq_scale": self.awq_scale}


class AwqCalibrationProvider(SinglePassCalibrationProvider):
    """Records the mean magnitude of the inputs of each weight."""

    def get_rule_type(self) -> type[QuantizationRule]:
        return AwqRule

    def compute_stats(self, lhs: jax.Array) -> dict[str, Any]:
        return {"act_scale": awq_core.compute_act_scale(lhs, axis=1)}

    def get_stats_suffix(self) -> str:
        return "_awq"


def quantize_params(
    params: Any,
    abstract_quantized_params: Any,
    awq_quant_stats: Any,
    *,
    allow_extra_params: bool = False,
    n_grid: int = 20,
) -> Any:
    """Quantize parameters by AWQ where there are statistics, and others as `quantize_params` does.

    Args:
        params: As for `quantize_params`.
        abstract_quantized_params: As for `quantize_params`.
        awq_quant_stats: The statistics of an `AwqCalibrationProvider`.
        allow_extra_params: As for `quantize_params`.
        n_grid: The number of exponents that are tried.

    Returns:
        Parameters for a model of an `AwqInferenceProvider`.
    """

    def quantize(context: CalibratedQuantContext) -> WithAwqScale:
        w, scales = awq_core.quantize_weight(
            context.weight, context.calibration_stats["act_scale"], context.how, n_grid
        )
        return WithAwqScale(
            array=context.restore_shape(w),
            how=context.abs_w.how,
            awq_scale=scales[0],
            contracting_axis=context.contracting_axis,
        )

    return quantize_params_with_calibration(
        params, abstract_quantized_params, awq_quant_stats, "_awq", quantize, allow_extra_params=allow_extra_params
    )


class AwqInferenceProvider(InputScaleProvider):
    """Serves parameters of AWQ, and those of plain rounding."""

    suffix, divides = "awq_scale", True
