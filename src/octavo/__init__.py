"""Octavo: quantized training and inference for JAX."""

from typing import TYPE_CHECKING, Any

from octavo.calibration import Calibration, register_calibration
from octavo.frameworks import (
    WithAux,
    accumulate_gradients,
    convert,
    overwrite_with_gradients,
    plan,
    quantize_model,
    quantize_params,
    served,
    split_gradients,
)
from octavo.inspect import verify
from octavo.numerics import Format, formats, get_format, register_format
from octavo.ops import (
    DotConfig,
    Matmul,
    Operand,
    conv_general_dilated,
    dot,
    dot_general,
    einsum,
    gmm,
    ragged_dot,
    ragged_dot_general,
    tgmm,
)
from octavo.qarray import QArray, Quantizer, dequantize, fake_quant, quantize
from octavo.rules import QtRule, QuantizationRule, Recipe, Schedule, recipe, recipes, register_recipe
from octavo.transform import PtqProvider, QtProvider, QuantizationProvider, get_current_rule, quantized, scheduled

if TYPE_CHECKING:
    from octavo.frameworks.nnx import QuantStat

__version__ = "0.1.0"

__all__ = [
    "Calibration",
    "DotConfig",
    "Format",
    "Matmul",
    "Operand",
    "PtqProvider",
    "QArray",
    "QtProvider",
    "QtRule",
    "QuantStat",
    "QuantizationProvider",
    "QuantizationRule",
    "Quantizer",
    "Recipe",
    "Schedule",
    "WithAux",
    "accumulate_gradients",
    "conv_general_dilated",
    "convert",
    "dequantize",
    "dot",
    "dot_general",
    "einsum",
    "fake_quant",
    "formats",
    "get_current_rule",
    "get_format",
    "gmm",
    "overwrite_with_gradients",
    "plan",
    "quantize",
    "quantize_model",
    "quantize_params",
    "quantized",
    "ragged_dot",
    "ragged_dot_general",
    "recipe",
    "recipes",
    "register_calibration",
    "register_format",
    "register_recipe",
    "scheduled",
    "served",
    "split_gradients",
    "tgmm",
    "verify",
]


def __getattr__(name: str) -> Any:
    # Only NNX users need QuantStat, and only they have imported Flax already.
    if name == "QuantStat":
        from octavo.frameworks.nnx import QuantStat

        return QuantStat
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
