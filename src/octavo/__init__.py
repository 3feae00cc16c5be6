"""Octavo: quantized training and inference for JAX."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from octavo.frameworks.nnx import QuantStat
    from octavo.inspect import verify
    from octavo.lora import LoraProvider, LoraRule, apply_lora_to_model
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

__version__ = "0.1.0"

__all__ = [
    "Calibration",
    "DotConfig",
    "Format",
    "LoraProvider",
    "LoraRule",
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
    "apply_lora_to_model",
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

# Names are imported when they are first used, so that `octavo --help` need not wait for JAX.
_MODULES = {
    "calibration": "Calibration register_calibration",
    "frameworks": "WithAux accumulate_gradients convert overwrite_with_gradients plan quantize_model quantize_params "
    "served split_gradients",
    "inspect": "verify",
    "lora": "LoraProvider LoraRule apply_lora_to_model",
    "numerics": "Format formats get_format register_format",
    "ops": "DotConfig Matmul Operand conv_general_dilated dot dot_general einsum gmm ragged_dot "
    "ragged_dot_general tgmm",
    "qarray": "QArray Quantizer dequantize fake_quant quantize",
    "rules": "QtRule QuantizationRule Recipe Schedule recipe recipes register_recipe",
    "transform": "PtqProvider QtProvider QuantizationProvider get_current_rule quantized scheduled",
    "frameworks.nnx": "QuantStat",
}
_ORIGINS = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _ORIGINS:
        value = getattr(importlib.import_module(f"octavo.{_ORIGINS[name]}"), name)
    elif name.startswith("_") or importlib.util.find_spec(f"octavo.{name}") is None:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    else:
        value = importlib.import_module(f"octavo.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_ORIGINS]
