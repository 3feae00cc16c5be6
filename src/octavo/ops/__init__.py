"""How do quantized things multiply? Matmuls with quantized gradients, and how they run."""

from octavo.ops.api import dot, dot_general, init_scaling, lowering_of
from octavo.ops.config import DotConfig, Matmul, Operand
from octavo.ops.conv import conv_general_dilated, init_conv_scaling
from octavo.ops.dims import Dims
from octavo.ops.einsum import einsum
from octavo.ops.experts import init_ragged_scaling
from octavo.ops.hadamard import rotate
from octavo.ops.lowering import lowerings
from octavo.ops.ragged import gmm, ragged_dot, ragged_dot_general, tgmm
from octavo.ops.sparsity import nm_mask
from octavo.ops.training import RESIDUAL, trackers_of

__all__ = [
    "RESIDUAL",
    "Dims",
    "DotConfig",
    "Matmul",
    "Operand",
    "conv_general_dilated",
    "dot",
    "dot_general",
    "einsum",
    "gmm",
    "init_conv_scaling",
    "init_ragged_scaling",
    "init_scaling",
    "lowering_of",
    "lowerings",
    "nm_mask",
    "ragged_dot",
    "ragged_dot_general",
    "rotate",
    "tgmm",
    "trackers_of",
]
