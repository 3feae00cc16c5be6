"""GPTQ: statistics by a calibration model, then parameters for `PtqProvider`.

`octavo.ptq.quantize` also searches scales and takes any function, convolutions aside.
"""

import dataclasses
from typing import Any

import jax

from octavo.compat.qwix.contrib import gptq_core
from octavo.compat.qwix.contrib.calibration import (
    CalibratedQuantContext,
    SinglePassCalibrationProvider,
    quantize_params_with_calibration,
)
from octavo.rules import QuantizationRule


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class GptqRule(QuantizationRule):
    """A rule whose weights are quantized by GPTQ."""


class GptqCalibrationProvider(SinglePassCalibrationProvider):
    """Records the Hessian of the inputs of each weight."""

    def get_rule_type(self) -> type[QuantizationRule]:
        return GptqRule

    def compute_stats(self, lhs: jax.Array) -> dict[str, Any]:
        return {"hessian": gptq_core.compute_hessian(lhs)}

    def get_stats_suffix(self) -> str:
        return "_gptq"


def quantize_params(
    params: Any,
    abstract_quantized_params: Any,
    gptq_quant_stats: Any,
    *,
    allow_extra_params: bool = False,
    gptq_block_size: int = 128,
    gptq_damping_factor: float = 0.01,
) -> Any:
    """Quantize parameters by GPTQ where there are statistics, and others as `quantize_params` does.

    Args:
        params: As for `quantize_params`.
        abstract_quantized_params: As for `quantize_params`.
        gptq_quant_stats: The statistics of a `GptqCalibrationProvider`.
        allow_extra_params: As for `quantize_params`.
        gptq_block_size: Accepted for Qwix; results do not depend on it.
        gptq_damping_factor: The share of the mean of the Hessian's diagonal that is added to it.

    Returns:
        Parameters for a model of a `PtqProvider`.
    """

    def quantize(context: CalibratedQuantContext) -> Any:
        hessian = context.calibration_stats["hessian"]
        w, _ = gptq_core.quantize_weight(context.weight, hessian, context.how, gptq_block_size, gptq_damping_factor)
        return context.abs_w.replace(array=context.restore_shape(w))

    return quantize_params_with_calibration(
        params,
        abstract_quantized_params,
        gptq_quant_stats,
        "_gptq",
        quantize,
        allow_extra_params=allow_extra_params,
    )
