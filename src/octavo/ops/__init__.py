"""How do quantized things multiply? Matmuls with quantized gradients, and how they run."""

from octavo.ops.api import dot, dot_general, init_scaling
from octavo.ops.config import DotConfig, Matmul, Operand
from octavo.ops.dims import Dims
from octavo.ops.dot import RESIDUAL
from octavo.ops.einsum import einsum
from octavo.ops.hadamard import rotate
from octavo.ops.lowering import lowerings
from octavo.ops.sparsity import nm_mask

__all__ = [
    "RESIDUAL",
    "Dims",
    "DotConfig",
    "Matmul",
    "Operand",
    "dot",
    "dot_general",
    "einsum",
    "init_scaling",
    "lowerings",
    "nm_mask",
    "rotate",
]
