"""Drop-in matmuls: the signatures of jax.lax and jax.numpy, for QArray operands or with a quantization config."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from octavo._typing import Array, DTypeLike, PRNGKeyArray
from octavo.ops.codes import ArrayOrQArray
from octavo.ops.config import DotConfig
from octavo.ops.dims import Dims
from octavo.ops.lowerings import describe, multiply
from octavo.ops.lowerings.conv import convolve
from octavo.ops.product import UNPLACED, Call, Placement, Product, init_product_scaling, quantized_product
from octavo.ops.products.conv import Conv, ConvDims
from octavo.ops.products.dot import Dot
from octavo.ops.vjp import Scaling
from octavo.qarray import QArray


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

    >>> import octavo
    >>> x, w = jnp.ones((2, 4)), jnp.eye(4)
    >>> config = octavo.DotConfig.qt("int8")
    >>> jax.jit(lambda x, w: octavo.dot_general(x, w, (((1,), (0,)), ((), ())), config=config))(x, w).shape
    (2, 4)
    """
    product = Dot.of(dimension_numbers, lhs.ndim, rhs.ndim)
    dtype = result_dtype(lhs, rhs, preferred_element_type)
    if config is None:
        return multiply(lhs, rhs, product.axes, dtype=dtype, precision=precision, out_sharding=out_sharding)
    call = Call(product, config, dtype, precision, out_sharding, placement)
    return quantized_product(call, lhs, rhs, key=key, scaling=scaling)


def dot(
    a: ArrayOrQArray,
    b: ArrayOrQArray,
    *,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    config: DotConfig | None = None,
    key: PRNGKeyArray | None = None,
    scaling: Scaling | None = None,
) -> Array:
    """`jax.numpy.dot` in low precision: contracts the last axis of `a` with the second to last of `b`.

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

    >>> import octavo
    >>> q = octavo.quantize(jnp.eye(3), "int8")
    >>> dot(jnp.arange(3.0), q).tolist()
    [0.0, 0.9960784912109375, 1.992156982421875]
    """
    if a.ndim == 0 or b.ndim == 0:
        raise TypeError("dot of a scalar is a product: multiply instead, or dequantize first")
    contract = ((a.ndim - 1,), (max(0, b.ndim - 2),))
    return dot_general(
        a,
        b,
        (contract, ((), ())),
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        config=config,
        key=key,
        scaling=scaling,
    )


def conv_general_dilated(
    lhs: ArrayOrQArray,
    rhs: ArrayOrQArray,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    *,
    config: DotConfig | None = None,
    key: PRNGKeyArray | None = None,
    scaling: Scaling | None = None,
) -> Array:
    """`jax.lax.conv_general_dilated` in low precision.

    QArray operands are convolved in the precision of their codes, in any mix with arrays, if they have one scale per
    example of `lhs`, per output feature of `rhs`, or per tensor; otherwise they are dequantized first. With a `config`,
    float operands are quantized here with such scales, and so are the operands of the two gradients.

    Args:
      lhs: the input.
      rhs: the kernel.
      window_strides: this and the following geometry as in `jax.lax.conv_general_dilated`.
      padding: the padding.
      lhs_dilation: the dilation of the input.
      rhs_dilation: the dilation of the kernel.
      dimension_numbers: the axes of input, kernel and output.
      feature_group_count: the number of feature groups.
      batch_group_count: the number of batch groups.
      precision: as in `jax.lax.conv_general_dilated`, for convolutions computed in float.
      preferred_element_type: the dtype of the result; by default the operands' promoted dtype.
      out_sharding: the sharding of the result, on a mesh with explicit axes.
      config: the quantization of the operands; its `lowering` applies to dots only.
      key: for stochastic rounding.
      scaling: external ranges, as in `octavo.dot_general`.

    Returns:
      The convolution of `lhs` and `rhs`.

    >>> import octavo
    >>> x, w = jnp.ones((2, 3, 8, 8)), jnp.ones((4, 3, 3, 3))
    >>> conv_general_dilated(x, w, (1, 1), "SAME", config=octavo.DotConfig.qt("int8")).shape
    (2, 4, 8, 8)
    """
    geometry = (window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers)
    geometry = (*geometry, feature_group_count, batch_group_count)
    quantized = isinstance(lhs, QArray) or isinstance(rhs, QArray)
    if config is None and not quantized:
        kinds = {"precision": precision, "preferred_element_type": preferred_element_type}
        return jax.lax.conv_general_dilated(lhs, rhs, *geometry, **kinds, out_sharding=out_sharding)  # pyrefly: ignore
    product = Conv(ConvDims.of(lhs.shape, rhs.shape, *geometry))
    dtype = result_dtype(lhs, rhs, preferred_element_type)
    if config is None:
        return convolve(lhs, rhs, product.geometry, dtype=dtype, precision=precision, out_sharding=out_sharding)
    call = Call(product, config, dtype, precision, out_sharding)
    return quantized_product(call, lhs, rhs, key=key, scaling=scaling)


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
        product = Dot.of(product, len(lhs.shape), len(rhs.shape))
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


def result_dtype(lhs: ArrayOrQArray, rhs: ArrayOrQArray, preferred: DTypeLike | None) -> Any:
    """The result dtype: the preferred one, or the promoted dtype of the operands."""
    return jnp.dtype(preferred) if preferred is not None else jnp.promote_types(lhs.dtype, rhs.dtype)
