"""How do quantized things multiply? Matmuls with quantized gradients, how they run, and operations beside them."""

from octavo.ops.api import dot, dot_general, init_scaling, lowering_of
from octavo.ops.calls import KnownCall, is_known_call, known_call
from octavo.ops.config import DotConfig, Matmul, Operand
from octavo.ops.conv import conv_general_dilated, init_conv_scaling
from octavo.ops.dims import Dims
from octavo.ops.einsum import einsum, init_einsum_scaling, pairwise
from octavo.ops.embedding import embedding_lookup
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
    "KnownCall",
    "Matmul",
    "Operand",
    "conv_general_dilated",
    "dot",
    "dot_general",
    "einsum",
    "embedding_lookup",
    "gmm",
    "init_conv_scaling",
    "init_einsum_scaling",
    "init_ragged_scaling",
    "init_scaling",
    "is_known_call",
    "known_call",
    "lowering_of",
    "lowerings",
    "nm_mask",
    "pairwise",
    "ragged_dot",
    "ragged_dot_general",
    "rotate",
    "tgmm",
    "trackers_of",
]
