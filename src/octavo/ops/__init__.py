"""Quantized matmuls, convolutions, ragged dots and embedding lookups, with quantized gradients and their lowerings."""

from octavo.ops.config import DotConfig, Matmul, Operand
from octavo.ops.embedding import embedding_lookup
from octavo.ops.hadamard import rotate
from octavo.ops.lowerings import lowerings
from octavo.ops.operands import Dims
from octavo.ops.product import Placement, Product, ProductCall, marked_product
from octavo.ops.products.conv import Conv, ConvDims, conv_general_dilated
from octavo.ops.products.dot import Dot, dot, dot_general, init_scaling, lowering_of
from octavo.ops.products.einsum import einsum, init_einsum_scaling, pairwise
from octavo.ops.products.ragged import Ragged
from octavo.ops.ragged import gmm, ragged_dot, ragged_dot_general, tgmm
from octavo.ops.sparsity import nm_mask
from octavo.ops.vjp import RESIDUAL

__all__ = [
    "RESIDUAL",
    "Conv",
    "ConvDims",
    "Dims",
    "Dot",
    "DotConfig",
    "Matmul",
    "Operand",
    "Placement",
    "Product",
    "ProductCall",
    "Ragged",
    "conv_general_dilated",
    "dot",
    "dot_general",
    "einsum",
    "embedding_lookup",
    "gmm",
    "init_einsum_scaling",
    "init_scaling",
    "lowering_of",
    "lowerings",
    "marked_product",
    "nm_mask",
    "pairwise",
    "ragged_dot",
    "ragged_dot_general",
    "rotate",
    "tgmm",
]
