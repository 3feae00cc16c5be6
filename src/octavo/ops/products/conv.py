"""Convolutions as a `Product`: their geometry and that of their two transposes, which are convolutions too.

With the stride s, the dilations a of the input and b of the kernel and the low padding p, along each spatial axis

    out[o] = sum_k dilated[s o + b k - p] rhs[k],        dilated[a i] = lhs[i], zero between.

So the gradient of the input convolves g, dilated by s, with the reversed kernel at stride a; the gradient of the
kernel convolves the input with g, dilated by s, at stride b. Feature groups in one are batch groups in the other.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from octavo import _sharding
from octavo._typing import Array
from octavo.ops.codes import ArrayOrQArray
from octavo.ops.config import DotConfig
from octavo.ops.dims import Dims
from octavo.ops.lowerings.conv import convolve, per_example, per_feature
from octavo.ops.product import Product, Transpose
from octavo.ops.products.conv_dims import ConvDims
from octavo.ops.scales import full_scale, without_scale
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

    def out_shape(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[int, ...]:
        return jax.eval_shape(self.geometry, *(jax.ShapeDtypeStruct(x, jnp.float32) for x in (lhs, rhs))).shape

    def multiply(
        self, lhs: ArrayOrQArray, rhs: ArrayOrQArray, *extra: Array, lowering: str = "auto", **options: Any
    ) -> Array:
        del lowering  # applies to dots only
        return convolve(lhs, rhs, self.geometry, **options)

    def transpose(self, of_lhs: bool) -> Transpose:
        return _ConvDlhs(self.geometry) if of_lhs else _ConvDrhs(self.geometry)

    def check(self, config: DotConfig) -> None:
        if config.smooth is not None:
            raise NotImplementedError(NO_SMOOTHING)
        if config.sparsity is not None:
            raise NotImplementedError(
                "a convolution has no n:m sparsity: mask the kernel with octavo.ops.nm_mask first"
            )
        for name in ("fwd", "dlhs", "drhs"):
            matmul = getattr(config, name)
            if matmul.rotate is not None:
                raise NotImplementedError(
                    f"{name} rotates its operands, which a window of a convolution does not allow"
                )
            for side in ("lhs", "rhs"):
                operand = getattr(matmul, side)
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
        return g.astype(jnp.float32) * self._beside(full_scale(residual), g), without_scale(residual)

    def _beside(self, scale: Array, g: Array) -> Array:
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

    def _beside(self, scale: Array, g: Array) -> Array:
        return per_feature(scale, self.forward, g.shape)

    def arrange_residual(self, residual: ArrayOrQArray) -> ArrayOrQArray:
        if isinstance(residual, QArray):
            return residual._replace(qvalue=self.forward.kernel(residual.qvalue))
        return self.forward.kernel(residual)

    def multiply(
        self,
        lhs: ArrayOrQArray,
        rhs: ArrayOrQArray,
        *extra: Array,
        out_sharding: Any,
        lowering: str = "auto",
        **options: Any,
    ) -> Array:
        # Batch groups come out as feature groups, so the result has another shape and sharding than the operand.
        sharding = _sharding.plain(out_sharding) if self.forward.batch_groups == 1 else None
        return self.forward.arrange(convolve(lhs, rhs, self.forward.dlhs(), out_sharding=sharding, **options))


class _ConvDrhs(_ConvTranspose):
    """The input convolved with g: g has a scale per output feature, the input one per feature."""

    @property
    def dims(self) -> Dims:
        grad = self.forward.drhs()
        return _axes(grad.rhs[0], grad.lhs[0], len(grad.lhs))

    def _beside(self, scale: Array, g: Array) -> Array:
        return per_example(scale, self.forward, g.shape)

    def multiply(
        self,
        lhs: ArrayOrQArray,
        rhs: ArrayOrQArray,
        *extra: Array,
        out_sharding: Any,
        lowering: str = "auto",
        **options: Any,
    ) -> Array:
        return convolve(rhs, lhs, self.forward.drhs(), out_sharding=_sharding.plain(out_sharding), **options)


def _axes(lhs: int, rhs: int, ndim: int) -> Dims:
    """Dims for operands whose scales vary along one axis each."""
    rest = lambda axis: tuple(a for a in range(ndim) if a != axis)  # noqa: E731
    return Dims(ndim, ndim, rest(lhs), rest(rhs))
