"""Native CPU kernels on plain arrays; `octavo.ops` decides when they run."""

from octavo.kernels.layer import LayerWeights, Matrix, decode_layer, decode_layer_reference
from octavo.kernels.library import available, disabled, status, versions
from octavo.kernels.matvec import MATVEC, int_matvec, matvec, reference

__all__ = [
    "MATVEC",
    "LayerWeights",
    "Matrix",
    "available",
    "decode_layer",
    "decode_layer_reference",
    "disabled",
    "int_matvec",
    "matvec",
    "reference",
    "status",
    "versions",
]
