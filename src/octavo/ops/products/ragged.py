"""Ragged dots as a `Product`: rows sorted by group, one matrix per group, and the two transposes.

`out = lhs[rows of i] @ rhs[i]` has the gradients `dlhs = g[rows of i] @ rhs[i].T` and `drhs[i] = lhs[rows of i].T @
g[rows of i]`. Where codes are reused, the scale that would run along the contraction is multiplied into `g` first: for
`dlhs` that of the row's expert, for `drhs` that of the row.
"""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from octavo._typing import Array, PRNGKeyArray, Shape
from octavo.calibration import AbsMax
from octavo.ops.config import DotConfig, Operand
from octavo.ops.lowerings.grouped import Rows, group_absmax
from octavo.ops.lowerings.ragged import multiply_groups, multiply_rows, multiply_rows_reduced
from octavo.ops.lowerings.xla import row_major
from octavo.ops.operands import ArrayOrQArray, Dims, MatmulOptions
from octavo.ops.product import Product, Transpose, mark
from octavo.ops.products.conv import NO_SMOOTHING
from octavo.ops.quantize import full_scale, without_scale
from octavo.ops.telemetry import measure_fit
from octavo.qarray import QArray

NUMBERS = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))


@dataclasses.dataclass(frozen=True)
class _Grouped:
    """Common fields of the three maps: the expert sharding and what depends on it."""

    op: ClassVar[str] = "ragged_dot"
    primitive: ClassVar[str] = "ragged_dot_general"
    has_explicit_shardings: ClassVar[bool] = False

    sharding: Any = None
    """An `octavo.distributed.ExpertSharding`: rows are sharded over the devices of their experts."""

    def rows(self, count: int, sizes: Array) -> Rows:
        return Rows(count, sizes, self.sharding)

    def gradient_dtype(self, out: Any, operand: Any, accumulator: str | None) -> Any:
        """Gradients are psummed over devices in the operand's dtype; on one device they are float32."""
        del out, accumulator
        return jnp.float32 if self.sharding is None else operand


class Ragged(_Grouped, Product):
    """[m, k] x [g, k, n] -> [m, n]; the group axis counts as a remaining axis."""

    dims = Dims(2, 3, (1,), (1,))

    @property
    def params(self) -> dict[str, Any]:
        return {"ragged_dot_dimension_numbers": NUMBERS}

    def check(self, config: DotConfig) -> None:
        if any(m.smooth is not None for m in (config.fwd, config.dlhs, config.drhs)):
            raise NotImplementedError(NO_SMOOTHING)
        if config.drhs.rotate is not None:
            raise ValueError(
                "drhs of a ragged dot contracts rows of changing groups, which cannot be rotated: rotate=None"
            )
        if any(matmul.accumulator not in (None, "float32") for matmul in (config.fwd, config.dlhs)):
            raise ValueError("a ragged dot sums floats in float32: leave the accumulator out of its fwd and dlhs")

    def out_shape(self, lhs: Shape, rhs: Shape) -> Shape:
        return (lhs[0], rhs[2])

    def multiply(self, lhs: ArrayOrQArray, rhs: ArrayOrQArray, *extra: Array, options: MatmulOptions) -> Array:
        return multiply_groups(lhs, rhs, self.rows(lhs.shape[0], *extra), options)

    def transpose(self, of_lhs: bool) -> Transpose:
        return _RaggedDlhs(self.sharding) if of_lhs else _RaggedDrhs(self.sharding)


class _RaggedDlhs(_Grouped, Transpose):
    """[m, n] x [g, k, n] -> [m, k]."""

    dims = Dims(2, 3, (1,), (2,))

    def fold(self, g: Array, residual: QArray, *extra: Array, quantized: bool) -> Any:
        """Move the scale [g, 1, n] of the experts' codes into the cotangent, row by row."""
        if not quantized:
            return g, residual
        q = residual.unpack()
        if q.zero_point is not None or q.padding or q.scale.shape[1] != 1 or q.scale.shape[2] not in (1, q.shape[2]):
            return None
        if q.scale.shape[2] == 1:
            return g, q
        scale = full_scale(q)[:, 0]
        scale = self.rows(g.shape[0], *extra).pick(scale) if len(scale) > 1 else scale
        return g.astype(jnp.float32) * scale, without_scale(q)

    def multiply(self, lhs: ArrayOrQArray, rhs: ArrayOrQArray, *extra: Array, options: MatmulOptions) -> Array:
        return multiply_groups(lhs, rhs, self.rows(lhs.shape[0], *extra), options, contract=2)


class _RaggedDrhs(_Grouped, Transpose):
    """[m, n] x [m, k] -> [g, k, n], contracted over the rows of each group."""

    dims = Dims(2, 2, (0,), (0,))

    def gradient_dtype(self, out: Any, operand: Any, accumulator: str | None) -> Any:
        return super().gradient_dtype(out, accumulator or operand, accumulator)

    def fold(self, g: Array, residual: QArray, *extra: Array, quantized: bool) -> Any:
        """Move the scale [m, 1] of the rows' codes into the cotangent."""
        if not quantized:
            return g, residual
        q = residual.unpack()
        if q.zero_point is not None or q.padding or q.scale.shape[1] != 1 or q.scale.shape[0] not in (1, q.shape[0]):
            return None
        return (g, q) if q.scale.shape[0] == 1 else (g.astype(jnp.float32) * full_scale(q), without_scale(q))

    def quantize_by_group(self, matmul, g, residual, *extra, keys, scaling, name):
        """Use one scale per group and column if it can be measured in one pass; these scale the result."""
        matmul = matmul.replace(lhs=_without_tiles(matmul.lhs), rhs=_without_tiles(matmul.rhs))
        rows, scales, measured, q = self.rows(g.shape[0], *extra), (), {}, g
        if matmul.lhs is not None and name not in scaling and _is_by_group(matmul.lhs):
            q, scale = _quantize_by_group(matmul.lhs, g, rows, keys[0])
            scales = (scale[:, None, :],)
            if scaling:
                measured = measure_fit(scaling, name, g, q._replace(scale=rows.pick(scale)))
        if matmul.rhs is not None and not isinstance(residual, QArray) and _is_by_group(matmul.rhs):
            residual, scale = _quantize_by_group(matmul.rhs, residual, rows, keys[1])
            scales = (*scales, scale[:, :, None])
        return matmul, q, residual, measured, scales

    def multiply(self, lhs, rhs, *extra, options, scales: tuple[Array, ...] = ()):
        return multiply_rows(rhs, lhs, self.rows(lhs.shape[0], *extra), options, scales)

    def reduce(self, reduction, lhs, rhs, *extra, options, scaling, scales):
        rows = self.rows(lhs.shape[0], *extra)
        return multiply_rows_reduced(reduction, rhs, lhs, rows, options, scaling, scales)


def _without_tiles(operand: Operand | None) -> Operand | None:
    """Drop tiles, except those of block formats: groups partition the contracted rows already."""
    return operand if operand is None or operand.qtype.tile is not None else operand.replace(tile=None, square=False)


def _is_by_group(operand: Operand) -> bool:
    """Whether to use one scale per group and column: if it can be measured in one pass."""
    own = operand.tile is None and operand.tracker is None and not operand.per_tensor
    return own and operand.dequant == "output" and isinstance(operand.calibration, AbsMax)


def _quantize_by_group(operand: Operand, x: Array, rows: Rows, key: PRNGKeyArray | None) -> tuple[QArray, Array]:
    """Codes with a scale of one, and their scale [g, n] per group and column."""
    quantizer = operand.quantizer(2, contracting=(0,)).replace(channelwise_axes=(0, 1))
    bounds = operand.calibration.measure(group_absmax(x.astype(jnp.float32), rows), axes=())
    scale = quantizer.quantize(jnp.zeros_like(bounds["absmax"], x.dtype), key=key, bounds=bounds).scale
    q = quantizer.quantize(x, key=key, bounds={k: rows.pick(v) for k, v in bounds.items()})
    ones = jnp.ones((1, 1), jnp.float32)
    return q._replace(qvalue=row_major(q.qvalue), scale=ones), scale.astype(jnp.float32)


class FloatCall(NamedTuple):
    """The static arguments of a float ragged dot with sharded rows; a rule may still quantize it."""

    product: Ragged
    dtype: np.dtype
    precision: Any
    config: None = None

    @property
    def params(self) -> dict[str, Any]:
        options = {"precision": self.precision, "preferred_element_type": self.dtype}
        return self.product.params | options | {"sharding": self.product.sharding}

    def run(self, *args: Any) -> Array:
        return float_ragged_dot(self, *args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def float_ragged_dot(call: FloatCall, lhs: Array, rhs: Array, sizes: Array) -> Array:
    """[m, k] x [g, k, n] -> [m, n] in float, with sharded rows."""
    rows = call.product.rows(lhs.shape[0], sizes)
    out = multiply_groups(lhs, rhs, rows, MatmulOptions(call.dtype, call.precision))
    return mark(out, call, (lhs, rhs, sizes))


def _float_fwd(call: FloatCall, lhs: Array, rhs: Array, sizes: Array):
    return float_ragged_dot(call, lhs, rhs, sizes), (lhs, rhs, sizes)


def _float_bwd(call: FloatCall, saved: Any, g: Array):
    lhs, rhs, sizes = saved
    rows = call.product.rows(lhs.shape[0], sizes)
    g = rows.keep(g)
    dlhs = multiply_groups(g, rhs, rows, MatmulOptions(lhs.dtype, call.precision), contract=2)
    return dlhs, multiply_rows(rows.keep(lhs), g, rows, MatmulOptions(rhs.dtype, call.precision)), None


float_ragged_dot.defvjp(_float_fwd, _float_bwd)
