"""Native CPU kernels on plain arrays; `octavo.ops` decides when they run."""

from octavo.kernels.layer import CacheScales, LayerWeights, Matrix, decode_layer, decode_layer_reference
from octavo.kernels.library import QUANTIZE_TARGET, allowed, available, disabled, status, versions
from octavo.kernels.matvec import INT4, MATVEC, int_matvec, matvec, reference, tiled_matmul
from octavo.kernels.quantize import can_quantize, quantize_absmax, quantize_attributes
from octavo.kernels.zeros import zeros

__all__ = [
    "INT4",
    "MATVEC",
    "QUANTIZE_TARGET",
    "CacheScales",
    "LayerWeights",
    "Matrix",
    "allowed",
    "available",
    "can_quantize",
    "decode_layer",
    "decode_layer_reference",
    "disabled",
    "int_matvec",
    "matvec",
    "quantize_absmax",
    "quantize_attributes",
    "reference",
    "status",
    "tiled_matmul",
    "versions",
    "zeros",
]
