"""Convolutions as a `Product`, with the geometry of `conv_dims`; their two transposes are convolutions too."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from octavo import _sharding
from octavo._typing import Array, DTypeLike, PRNGKeyArray, Shape
from octavo.ops.config import DotConfig
from octavo.ops.lowerings.conv import convolve, per_example, per_feature
from octavo.ops.operands import ArrayOrQArray, Dims, MatmulOptions, result_dtype, widen_integer
from octavo.ops.product import Product, Scaling, Transpose
from octavo.ops.products.conv_dims import ConvDims
from octavo.ops.quantize import full_scale, without_scale
from octavo.ops.vjp import Call, quantized_product
from octavo.qarray import QArray


@dataclasses.dataclass(frozen=True)
class Conv(Product):
    """A convolution. An operand has one scale per example, per output feature or per tensor."""

    op: ClassVar[str] = "conv_general_dilated"
    primitive: ClassVar[str] = "conv_general_dilated"
    has_placement: ClassVar[bool] = False
    residual_dtype: ClassVar[Any] = None

    geometry: ConvDims

    @property
    def dims(self) -> Dims:
        return _axes(self.geometry.lhs[0], self.geometry.rhs[0], len(self.geometry.lhs))

    @property
    def params(self) -> dict[str, Any]:
        return self.geometry.params

    def out_shape(self, lhs: Shape, rhs: Shape) -> Shape:
        return jax.eval_shape(self.geometry, *(jax.ShapeDtypeStruct(x, jnp.float32) for x in (lhs, rhs))).shape

    def multiply(self, lhs: ArrayOrQArray, rhs: ArrayOrQArray, *extra: Array, options: MatmulOptions) -> Array:
        return convolve(lhs, rhs, self.geometry, options)

    def transpose(self, of_lhs: bool) -> Transpose:
        return _ConvDlhs(self.geometry) if of_lhs else _ConvDrhs(self.geometry)

    def check(self, config: DotConfig) -> None:
        if any(m.smooth is not None for m in (config.fwd, config.dlhs, config.drhs)):
            raise NotImplementedError(NO_SMOOTHING)
        if config.sparsity is not None:
            raise NotImplementedError(
                "a convolution has no n:m sparsity: mask the kernel with octavo.ops.nm_mask first"
            )
        for name, matmul in (("fwd", config.fwd), ("dlhs", config.dlhs), ("drhs", config.drhs)):
            if matmul.rotate is not None:
                raise NotImplementedError(
                    f"{name} rotates its operands, which a window of a convolution does not allow"
                )
            for side, operand in (("lhs", matmul.lhs), ("rhs", matmul.rhs)):
                if operand is not None and operand.tile is not None:
                    raise NotImplementedError(
                        f"{name}.{side} has tiles of {operand.tile}, but a convolution has one scale per example, per "
                        "output feature or per tensor: leave the tile out, and choose a format without tiles of its own"
                    )
                if operand is not None and operand.dequant == "other":
                    raise NotImplementedError(
                        f"{name}.{side} moves its scale into the other operand, which has no such axis in a "
                        "convolution: use dequant='output' or 'input'"
                    )


NO_SMOOTHING = (
    "smooth scales the contracted indices of a dot_general or an einsum; a convolution and a ragged dot have no such "
    "scaling: leave smooth out of their config"
)


@dataclasses.dataclass(frozen=True)
class _ConvTranspose(Transpose):
    """Common code of both transposes: the residual has a scale per example or per feature of the forward."""

    op: ClassVar[str] = "conv_general_dilated"
    primitive: ClassVar[str] = "conv_general_dilated"
    residual_dtype: ClassVar[Any] = None

    forward: ConvDims

    def fold(self, g: Array, residual: QArray, *extra: Array, quantized: bool) -> Any:
        if not quantized:
            return g, residual.dequantize()
        if residual.scale.size == 1:
            return g, residual
        if residual.zero_point is not None:
            return None
        return g.astype(jnp.float32) * self._to_output_axes(full_scale(residual), g), without_scale(residual)

    def _to_output_axes(self, scale: Array, g: Array) -> Array:
        raise NotImplementedError

    def gradient_dtype(self, out: Any, operand: Any, accumulator: str | None) -> Any:
        del operand, accumulator
        return jnp.float64 if out == jnp.float64 else jnp.float32


class _ConvDlhs(_ConvTranspose):
    """g convolved with the reversed kernel: g has a scale per example, the kernel one per input feature."""

    @property
    def dims(self) -> Dims:
        grad = self.forward.dlhs()
        return _axes(grad.lhs[0], grad.rhs[0], len(grad.lhs))

    def _to_output_axes(self, scale: Array, g: Array) -> Array:
        return per_feature(scale, self.forward, g.shape)

    def arrange_residual(self, residual: ArrayOrQArray) -> ArrayOrQArray:
        if isinstance(residual, QArray):
            return residual._replace(qvalue=self.forward.kernel(residual.qvalue))
        return self.forward.kernel(residual)

    def multiply(self, lhs: ArrayOrQArray, rhs: ArrayOrQArray, *extra: Array, options: MatmulOptions) -> Array:
        # Batch groups come out as feature groups, so the result has another shape and sharding than the operand.
        sharding = _sharding.plain(options.out_sharding) if self.forward.batch_groups == 1 else None
        options = options._replace(out_sharding=sharding)
        return self.forward.arrange(convolve(lhs, rhs, self.forward.dlhs(), options))


class _ConvDrhs(_ConvTranspose):
    """The input convolved with g: g has a scale per output feature, the input one per feature."""

    @property
    def dims(self) -> Dims:
        grad = self.forward.drhs()
        return _axes(grad.rhs[0], grad.lhs[0], len(grad.lhs))

    def _to_output_axes(self, scale: Array, g: Array) -> Array:
        return per_example(scale, self.forward, g.shape)

    def multiply(self, lhs: ArrayOrQArray, rhs: ArrayOrQArray, *extra: Array, options: MatmulOptions) -> Array:
        options = options._replace(out_sharding=_sharding.plain(options.out_sharding))
        return convolve(rhs, lhs, self.forward.drhs(), options)


def _axes(lhs: int, rhs: int, ndim: int) -> Dims:
    """Dims for operands whose scales vary along one axis each."""
    rest = lambda axis: tuple(a for a in range(ndim) if a != axis)  # noqa: E731
    return Dims(ndim, ndim, rest(lhs), rest(rhs))


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
        if preferred_element_type is None and lhs.dtype == rhs.dtype:
            preferred_element_type = widen_integer(lhs.dtype)
        kinds = {"precision": precision, "preferred_element_type": preferred_element_type}
        return jax.lax.conv_general_dilated(lhs, rhs, *geometry, **kinds, out_sharding=out_sharding)  # pyrefly: ignore
    product = Conv(ConvDims.of(lhs.shape, rhs.shape, *geometry))
    dtype = result_dtype(lhs, rhs, preferred_element_type)
    if config is None:
        lhs, rhs = _sharding.without_reduced((lhs, rhs))
        return convolve(lhs, rhs, product.geometry, MatmulOptions(dtype, precision, out_sharding=out_sharding))
    product.check(config)
    call = Call(product, config, dtype, precision, out_sharding)
    return quantized_product(call, lhs, rhs, key=key, scaling=scaling)
