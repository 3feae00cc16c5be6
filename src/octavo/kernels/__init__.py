"""Native CPU kernels on plain arrays; `octavo.ops` decides when they run."""

from octavo.kernels.layer import CacheScales, LayerWeights, Matrix, decode_layer, decode_layer_reference
from octavo.kernels.library import allowed, available, disabled, status, versions
from octavo.kernels.matvec import INT4, MATVEC, int_matvec, matvec, reference, tiled_matmul
from octavo.kernels.quantize import (
    Rounding,
    can_quantize,
    dequantize_float4,
    noise,
    quantize_absmax,
    quantize_groups,
    runs_alone,
)
from octavo.kernels.zeros import zeros

__all__ = [
    "INT4",
    "MATVEC",
    "CacheScales",
    "LayerWeights",
    "Matrix",
    "Rounding",
    "allowed",
    "available",
    "can_quantize",
    "decode_layer",
    "decode_layer_reference",
    "dequantize_float4",
    "disabled",
    "int_matvec",
    "matvec",
    "noise",
    "quantize_absmax",
    "quantize_groups",
    "reference",
    "runs_alone",
    "status",
    "tiled_matmul",
    "versions",
    "zeros",
]
