"""`dot_general` as a `Product`: its axes and its two transposes."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from octavo import _sharding
from octavo._typing import Array
from octavo.ops.codes import ArrayOrQArray
from octavo.ops.config import DotConfig
from octavo.ops.dims import Dims
from octavo.ops.lowerings import multiply
from octavo.ops.lowerings.problem import SMALLEST_TILE
from octavo.ops.product import Product, Transpose
from octavo.ops.scales import move_scale
from octavo.qarray import QArray


@dataclasses.dataclass(frozen=True)
class Dot(Product):
    """`out = lhs . rhs`, contracted along some axes, with batch axes first."""

    op: ClassVar[str] = "dot_general"
    primitive: ClassVar[str] = "dot_general"

    axes: Dims

    @staticmethod
    def of(dimension_numbers: Any, lhs_ndim: int, rhs_ndim: int) -> "Dot":
        """From the dimension numbers of `lax.dot_general`."""
        return Dot(Dims.of(dimension_numbers, lhs_ndim, rhs_ndim))

    @property
    def dims(self) -> Dims:
        return self.axes

    @property
    def params(self) -> dict[str, Any]:
        return {"dimension_numbers": self.axes.numbers}

    def check(self, config: DotConfig) -> None:
        del config  # every config is supported

    def out_shape(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[int, ...]:
        left = (lhs[a] for a in (*self.axes.lhs_batch, *self.axes.lhs_remaining))
        return (*left, *(rhs[a] for a in self.axes.rhs_remaining))

    def multiply(self, lhs: ArrayOrQArray, rhs: ArrayOrQArray, *extra: Array, **options: Any) -> Array:
        return multiply(lhs, rhs, self.axes, **options)

    def transpose(self, of_lhs: bool) -> "DotTranspose":
        dims = self.axes
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

    axes: Dims
    order: tuple[int, ...]
    swapped: bool

    @property
    def dims(self) -> Dims:
        return self.axes

    def fold(self, g: Array, residual: QArray, *extra: Array, quantized: bool) -> Any:
        if not quantized:
            return g, residual
        dims, residual = self.axes, residual.unpack()
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

    def multiply(
        self, lhs: ArrayOrQArray, rhs: ArrayOrQArray, *extra: Array, out_sharding: Any, **options: Any
    ) -> Array:
        sharding = self.out_sharding(out_sharding)
        return self.arrange_out(self._multiply(lhs, rhs, out_sharding=sharding, **options))

    def _multiply(self, lhs: ArrayOrQArray, rhs: ArrayOrQArray, **options: Any) -> Array:
        if self.swapped:
            return multiply(rhs, lhs, self.axes.swap(), **options)
        return multiply(lhs, rhs, self.axes, **options)

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

    def reduce(
        self,
        reduction: Any,
        lhs: ArrayOrQArray,
        rhs: ArrayOrQArray,
        extra: Any,
        scaling: Any,
        scales: Any,
        options: Any,
    ):
        lhs, rhs, dims = (rhs, lhs, self.axes.swap()) if self.swapped else (lhs, rhs, self.axes)
        if not dims.lhs_contract:
            return None
        product = functools.partial(multiply, dims=dims, dtype=self.gradient_dtype(None, None, None), **options)
        return reduction.sum(product, lhs, rhs, dims, self, scaling)
