"""`dot_general` and `dot` in low precision: the bilinear map, its two transposes, and the drop-in functions."""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from octavo import _sharding
from octavo._typing import Array, DTypeLike, PRNGKeyArray, Shape
from octavo.ops.config import DotConfig
from octavo.ops.lowerings import describe, multiply
from octavo.ops.lowerings.xla import row_major
from octavo.ops.operands import SMALLEST_TILE, ArrayOrQArray, Dims, MatmulOptions, result_dtype
from octavo.ops.product import UNPLACED, Placement, Product, Scaling, Transpose
from octavo.ops.quantize import move_scale
from octavo.ops.vjp import Call, init_product_scaling, quantized_product
from octavo.qarray import QArray


@dataclasses.dataclass(frozen=True)
class Dot(Product):
    """`out = lhs . rhs`, contracted along some axes, with batch axes first."""

    op: ClassVar[str] = "dot_general"
    primitive: ClassVar[str] = "dot_general"

    dims: Dims

    @property
    def params(self) -> dict[str, Any]:
        return {"dimension_numbers": self.dims.numbers}

    def out_shape(self, lhs: Shape, rhs: Shape) -> Shape:
        left = (lhs[a] for a in (*self.dims.lhs_batch, *self.dims.lhs_remaining))
        return (*left, *(rhs[a] for a in self.dims.rhs_remaining))

    def multiply(self, lhs: ArrayOrQArray, rhs: ArrayOrQArray, *extra: Array, options: MatmulOptions) -> Array:
        return multiply(lhs, rhs, self.dims, options)

    def transpose(self, of_lhs: bool) -> "DotTranspose":
        dims = self.dims
        nb, nl = len(dims.lhs_batch), len(dims.lhs_remaining)
        g_batch = tuple(range(nb))
        if of_lhs:
            g_contract = tuple(range(nb + nl, dims.out_ndim))
            axes = Dims(dims.out_ndim, dims.rhs_ndim, g_contract, dims.rhs_remaining, g_batch, dims.rhs_batch)
            contracted = [dims.lhs_contract[i] for i in np.argsort(np.asarray(dims.rhs_contract, int))]
            order = [*dims.lhs_batch, *dims.lhs_remaining, *contracted]
        else:
            g_contract = tuple(range(nb, nb + nl))
            axes = Dims(dims.out_ndim, dims.lhs_ndim, g_contract, dims.lhs_remaining, g_batch, dims.lhs_batch)
            contracted = [dims.rhs_contract[i] for i in np.argsort(np.asarray(dims.lhs_contract, int))]
            order = [*dims.rhs_batch, *contracted, *dims.rhs_remaining]
        return DotTranspose(axes, tuple(int(a) for a in np.argsort(order)), swapped=not of_lhs)


@dataclasses.dataclass(frozen=True)
class DotTranspose(Transpose):
    """The dot of a cotangent and a residual, and the transpose that makes the result an operand's gradient.

    If `swapped`, the dot is computed with its operands swapped: for a plain matmul, `drhs = lhs.T @ g` then needs no
    transpose of the result, and of the two operands only the residual is transposed.
    """

    op: ClassVar[str] = "dot_general"
    primitive: ClassVar[str] = "dot_general"

    dims: Dims
    order: tuple[int, ...]
    swapped: bool

    def fold(self, g: Array, residual: QArray, *extra: Array, quantized: bool) -> Any:
        if not quantized:
            return g, residual
        dims, residual = self.dims, residual.unpack()
        tiles = residual.tile_shape
        direct = all(tiles[a] == residual.shape[a] or tiles[a] >= SMALLEST_TILE for a in dims.rhs_contract)
        if direct and not residual.padding:
            return g, residual
        kept = [a for a in range(residual.ndim) if a not in (*dims.rhs_contract, *dims.rhs_batch)]
        constant = all(residual.scale.shape[a] == 1 for a in kept)
        single = all(tiles[a] == 1 or residual.scale.shape[a] == 1 for a in dims.rhs_contract)
        if residual.zero_point is not None or residual.padding or not (constant and single):
            return None
        return move_scale(residual, g, dims, from_left=False)

    def multiply(self, lhs: ArrayOrQArray, rhs: ArrayOrQArray, *extra: Array, options: MatmulOptions) -> Array:
        options = options._replace(out_sharding=self.out_sharding(options.out_sharding))
        lhs, rhs, dims = (rhs, lhs, self.dims.swap()) if self.swapped else (lhs, rhs, self.dims)
        out = self.arrange_out(multiply(lhs, rhs, dims, options))
        # TPU's compiler may swap the operands of the dot and then copy the gradient of a wide weight to its layout. It
        # copies that of a tall one, in float32 after bfloat16, if it is constrained.
        rows = math.prod(lhs.shape[a] for a in dims.lhs_remaining)
        columns = math.prod(rhs.shape[a] for a in dims.rhs_remaining)
        constrained = self.swapped and not dims.lhs_batch and columns >= rows
        return row_major(out, platform="tpu") if constrained else out

    def arrange_out(self, out: Array) -> Array:
        """The result transposed to the operand's order of axes."""
        return out if self.order == tuple(range(len(self.order))) else jax.lax.transpose(out, self.order)

    def out_sharding(self, wanted: NamedSharding | None) -> NamedSharding | None:
        """The sharding of the dot before `arrange_out`, for a gradient with the sharding `wanted`."""
        if wanted is None:
            return None
        parts, spec = _sharding.partitions(wanted, len(self.order)), wanted.spec
        turned = (parts[self.order.index(a)] for a in range(len(self.order)))
        return NamedSharding(wanted.mesh, PartitionSpec(*turned, unreduced=spec.unreduced, reduced=spec.reduced))

    def reduce(self, reduction, lhs, rhs, *extra, options, scaling, scales):
        lhs, rhs, dims = (rhs, lhs, self.dims.swap()) if self.swapped else (lhs, rhs, self.dims)
        if not dims.lhs_contract:
            return None
        product = functools.partial(multiply, dims=dims, options=options)
        return reduction.sum(product, lhs, rhs, dims, self, scaling)


def dot_general(
    lhs: ArrayOrQArray,
    rhs: ArrayOrQArray,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    *,
    config: DotConfig | None = None,
    key: PRNGKeyArray | None = None,
    scaling: Scaling | None = None,
    placement: Placement = UNPLACED,
) -> Array:
    """`jax.lax.dot_general` in low precision.

    QArray operands are multiplied without requantization, in any mix with arrays. With a `config`, float operands are
    quantized here, and so are the operands of the two gradient matmuls.

    Args:
      lhs: the left operand.
      rhs: the right operand.
      dimension_numbers: as in `jax.lax.dot_general`.
      precision: as in `jax.lax.dot_general`, for dots computed in float.
      preferred_element_type: the dtype of the result; by default the operands' promoted dtype.
      out_sharding: the sharding of the result, on a mesh with explicit axes.
      config: the quantization of the operands of the three matmuls; None quantizes nothing.
      key: for stochastic rounding.
      scaling: external ranges per operand: bounds, or tracker states, whose gradient is the updated state.
      placement: how the weight is all-gathered and its gradient reduced over devices.

    Returns:
      The dot of `lhs` and `rhs`.

    >>> import jax.numpy as jnp, octavo
    >>> x, w = jnp.ones((2, 4)), jnp.eye(4)
    >>> config = octavo.DotConfig.qt("int8")
    >>> jax.jit(lambda x, w: octavo.dot_general(x, w, (((1,), (0,)), ((), ())), config=config))(x, w).shape
    (2, 4)
    """
    dims = Dims.of(dimension_numbers, lhs.ndim, rhs.ndim)
    dtype = result_dtype(lhs, rhs, preferred_element_type)
    if config is None:
        if isinstance(lhs, QArray) or isinstance(rhs, QArray):
            lhs, rhs = _sharding.without_reduced((lhs, rhs))
        return multiply(lhs, rhs, dims, MatmulOptions(dtype, precision, out_sharding=out_sharding))
    call = Call(Dot(dims), config, dtype, precision, out_sharding, placement)
    return quantized_product(call, lhs, rhs, key=key, scaling=scaling)


def dot(
    a: ArrayOrQArray,
    b: ArrayOrQArray,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    *,
    config: DotConfig | None = None,
    key: PRNGKeyArray | None = None,
    scaling: Scaling | None = None,
) -> Array:
    """`jax.numpy.dot` in low precision: contracts the last axis of `a` with the second to last of `b`.

    A scalar multiplies the other operand.

    Args:
      a: the left operand.
      b: the right operand.
      precision: as in `octavo.dot_general`, like the following arguments.
      preferred_element_type: the dtype of the result.
      out_sharding: the sharding of the result.
      config: the quantization of the operands.
      key: for stochastic rounding.
      scaling: external ranges.

    Returns:
      The dot of `a` and `b`.

    >>> import jax.numpy as jnp, octavo
    >>> q = octavo.quantize(jnp.eye(3), "int8")
    >>> dot(jnp.arange(3.0), q).tolist()
    [0.0, 0.9960784912109375, 1.992156982421875]
    """
    scalar = a.ndim == 0 or b.ndim == 0
    contract = ((), ()) if scalar else ((a.ndim - 1,), (max(0, b.ndim - 2),))
    kinds = (precision, preferred_element_type, out_sharding)
    return dot_general(a, b, (contract, ((), ())), *kinds, config=config, key=key, scaling=scaling)


def init_scaling(
    config: DotConfig, lhs: Any, rhs: Any, product: Product | Any, *, placement: Placement = UNPLACED
) -> Scaling:
    """The initial state of every tracker of a config, and of error feedback.

    Args:
      config: the config of the operation.
      lhs: the left operand, or anything with its shape.
      rhs: the right operand, or anything with its shape.
      product: the dimension numbers of a `dot_general`, or a `Product`: `Conv(ConvDims.of(...))`, `Ragged()`.
      placement: the placement of the operation.

    Returns:
      The `scaling` argument of the operation.
    """
    if not isinstance(product, Product):
        product = Dot(Dims.of(product, len(lhs.shape), len(rhs.shape)))
    return init_product_scaling(config, product, lhs, rhs, placement.reduction)


def lowering_of(config: DotConfig, lhs: Any, rhs: Any, dimension_numbers: Any) -> str:
    """The lowering of the forward matmul of a config, in a few words.

    Args:
      config: the config of the matmul.
      lhs: the left operand: a QArray, or an array (or its shape and dtype) if it is left in float.
      rhs: the right operand, likewise.
      dimension_numbers: as in `jax.lax.dot_general`.

    Returns:
      A description such as "int8 -> int32", as in the plan.
    """
    dims = Dims.of(dimension_numbers, len(lhs.shape), len(rhs.shape))
    inputs = [
        jax.ShapeDtypeStruct(x.shape, x.dtype) if o is not None and o.dequant == "input" else x
        for o, x in ((config.fwd.lhs, lhs), (config.fwd.rhs, rhs))
    ]
    if not any(isinstance(x, QArray) for x in inputs):
        return "dequantized"
    said = []
    jax.eval_shape(lambda a, b: said.append(describe(a, b, dims, config.lowering)), *inputs)
    return said[0]
