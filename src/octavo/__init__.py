"""Octavo: quantized training and inference for JAX."""

from octavo.calibration import register_calibration
from octavo.numerics import formats, get_format, register_format
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

__version__ = "0.1.0"

__all__ = [
    "DotConfig",
    "Matmul",
    "Operand",
    "QArray",
    "Quantizer",
    "conv_general_dilated",
    "dequantize",
    "dot",
    "dot_general",
    "einsum",
    "fake_quant",
    "formats",
    "get_format",
    "gmm",
    "quantize",
    "ragged_dot",
    "ragged_dot_general",
    "register_calibration",
    "register_format",
    "tgmm",
]
