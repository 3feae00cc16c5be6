"""Quantized arrays: QArray, the Quantizer that makes one, and their functions."""

from octavo.qarray.api import dequantize, fake_quant, from_numpy, inside, quantize, shardings, stack, to_numpy
from octavo.qarray.arithmetic import ARITHMETICS, Arithmetic
from octavo.qarray.indexing import dynamic_update_slice
from octavo.qarray.qarray import QArray, Tiles, is_qarray
from octavo.qarray.quantizer import Quantizer

__all__ = [
    "ARITHMETICS",
    "Arithmetic",
    "QArray",
    "Quantizer",
    "Tiles",
    "dequantize",
    "dynamic_update_slice",
    "fake_quant",
    "from_numpy",
    "inside",
    "is_qarray",
    "quantize",
    "shardings",
    "stack",
    "to_numpy",
]
