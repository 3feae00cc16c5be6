"""A ragged dot whose three products are quantized as a DotConfig says, with the gradient that goes with it.

`out = lhs[rows of i] @ rhs[i]` has the gradients `dlhs = g[rows of i] @ rhs[i].T` and `drhs[i] = lhs[rows of i].T @
g[rows of i]`. Where codes are reused, the scale that would run along the contraction goes into `g` first: for `dlhs`
that of the row's expert, for `drhs` that of the row.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from octavo._typing import Array, PRNGKeyArray
from octavo.calibration import AbsMax
from octavo.ops.calls import call_known
from octavo.ops.config import DotConfig, Matmul, Operand
from octavo.ops.dims import Dims
from octavo.ops.dot import quantize_operands
from octavo.ops.factor import Factor
from octavo.ops.gather import brought, kept
from octavo.ops.grouped import Rows, group_absmax
from octavo.ops.grouped_multiply import multiply_groups, multiply_rows, multiply_rows_as
from octavo.ops.lowering import materialize
from octavo.ops.parts import Parts
from octavo.ops.sparsity import nm_mask
from octavo.ops.training import (
    Scaling,
    as_input,
    check_scaling,
    finish,
    gradient_mask,
    masked,
    once_differentiable,
    save,
    six_keys,
    trace_of,
    trackers_of,
    updated_scaling,
    vary_alike,
)
from octavo.ops.watch import seen_by
from octavo.qarray import QArray

# The three products, for quantizing their operands: the axis of the groups counts as one that is kept. In a gradient
# the first operand is the incoming gradient.
_FWD = Dims(2, 3, (1,), (1,))
_DLHS = Dims(2, 3, (1,), (2,))
_DRHS = Dims(2, 2, (0,), (0,))
_NUMBERS = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))


class Call(NamedTuple):
    """What is static about one ragged dot."""

    config: DotConfig
    dtype: np.dtype
    precision: Any
    parts: Parts | None = None

    @property
    def how(self) -> dict[str, Any]:
        return {"precision": self.precision, "lowering": self.config.lowering}


def quantized_ragged_dot(
    lhs: Array,
    rhs: Array,
    rows: Rows,
    key: PRNGKeyArray | None,
    scaling: Scaling,
    config: DotConfig,
    *,
    dtype: Any,
    precision: Any = None,
) -> Array:
    """[m, k] x [g, k, n] -> [m, n] of float arrays, each quantized on the way, with quantized gradients."""
    check_scaling(config, scaling)
    lhs, rhs = vary_alike(lhs, rhs)
    if config.drhs.rotate is not None:
        raise ValueError("drhs of a ragged dot contracts rows of changing groups, which cannot be rotated: rotate=None")
    if any(matmul.accumulator not in (None, "float32") for matmul in (config.fwd, config.dlhs)):
        raise ValueError("a ragged dot sums floats in float32: leave the accumulator out of its fwd and dlhs")
    if config.sparsity is not None:
        n, m = config.sparsity
        rhs = masked(rhs, nm_mask(rhs, n, m, axis=1))
    # Rows of no group are cut off here, on the way in and on the way out, and thereby in the gradients as well.
    call = Call(config, jnp.dtype(dtype), precision, rows.parts)
    out = call_known(
        _dot,
        call,
        (masked(lhs, rows.owned), rhs, rows.sizes, key, scaling),
        op="ragged_dot",
        primitive="ragged_dot_general",
        params={"ragged_dot_dimension_numbers": _NUMBERS},
        config=config,
        run=lambda *args: _forward(*args)[0],
    )
    return masked(out, rows.owned)


def init_ragged_scaling(config: DotConfig, lhs: Any, rhs: Any) -> Scaling:
    """The first state of every tracker of a config, and of what gradients lose, for operands of these shapes."""
    out = jax.ShapeDtypeStruct((lhs.shape[0], rhs.shape[2]), jnp.float32)
    sides = {
        "lhs": (config.fwd.lhs, lhs, _FWD.lhs_contract),
        "rhs": (config.fwd.rhs, rhs, _FWD.rhs_contract),
        "dlhs": (config.dlhs.lhs, out, _DLHS.lhs_contract),
        "drhs": (config.drhs.lhs, out, _DRHS.lhs_contract),
    }
    state = {}
    for name, tracker in trackers_of(config).items():
        operand, x, contract = sides[name]
        assert operand is not None
        how = operand.quantizer(len(x.shape), contracting=contract)
        bounds = jax.eval_shape(lambda x=x, how=how: how.measure(jnp.zeros(x.shape)))
        state[name] = tracker.init({k: jnp.zeros(v.shape, v.dtype) for k, v in bounds.items()})
    return state if config.scatter is None else state | config.scatter.losses(rhs.shape)


class FloatCall(NamedTuple):
    """What is static about one ragged dot in float whose rows lie in parts."""

    dtype: np.dtype
    precision: Any
    parts: Parts | None


def float_ragged_dot(lhs: Array, rhs: Array, rows: Rows, *, dtype: Any, precision: Any = None) -> Array:
    """[m, k] x [g, k, n] -> [m, n] in float, of rows that lie in parts; a rule may still quantize it."""
    call = FloatCall(jnp.dtype(dtype), precision, rows.parts)
    return call_known(
        _float,
        call,
        (lhs, rhs, rows.sizes),
        op="ragged_dot",
        primitive="ragged_dot_general",
        params={
            "ragged_dot_dimension_numbers": _NUMBERS,
            "precision": precision,
            "preferred_element_type": call.dtype,
            "parts": rows.parts,
        },
        config=None,
        run=_float,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _float(call: FloatCall, lhs: Array, rhs: Array, sizes: Array) -> Array:
    rows = Rows(lhs.shape[0], sizes, call.parts)
    return multiply_groups(lhs, rhs, rows, dtype=call.dtype, precision=call.precision)


def _float_fwd(call: FloatCall, lhs: Array, rhs: Array, sizes: Array):
    return _float(call, lhs, rhs, sizes), (lhs, rhs, sizes)


def _float_bwd(call: FloatCall, saved: Any, g: Array):
    lhs, rhs, sizes = saved
    rows, how = Rows(lhs.shape[0], sizes, call.parts), {"precision": call.precision}
    g = rows.keep(g)
    dlhs = multiply_groups(g, rhs, rows, contract=2, dtype=lhs.dtype, **how)
    return dlhs, multiply_rows(rows.keep(lhs), g, rows, dtype=rhs.dtype, **how), None


_float.defvjp(_float_fwd, _float_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(call: Call, lhs: Array, rhs: Array, sizes: Array, key: PRNGKeyArray | None, scaling: Scaling) -> Array:
    return _forward(call, lhs, rhs, sizes, key, scaling)[0]


def _forward(call: Call, lhs: Factor, rhs: Factor, sizes: Array, key: PRNGKeyArray | None, scaling: Scaling):
    keys, fwd = six_keys(key), call.config.fwd
    left, right, seen = quantize_operands(fwd, lhs, rhs, _FWD, keys[:2], scaling, ("lhs", "rhs"))
    left, right = kept(call.config.gather, left, right)
    whole, rows = brought(call.config.gather, left, right), Rows(lhs.shape[0], sizes, call.parts)
    out = multiply_groups(as_input(fwd.lhs, whole[0]), as_input(fwd.rhs, whole[1]), rows, dtype=call.dtype, **call.how)
    return out, (left, right, seen, keys)


def _dot_fwd(call: Call, lhs: Array, rhs: Array, sizes: Array, key: PRNGKeyArray | None, scaling: Scaling):
    out, (left, right, seen, keys) = _forward(call, lhs, rhs, sizes, key, scaling)
    config = call.config
    rhs_saved = rhs if config.dlhs.residual == "original" else right
    lhs_saved = lhs if config.drhs.residual == "original" else left
    masks = [
        gradient_mask(config, config.fwd.lhs, lhs, (_FWD.lhs_contract, ()), scaling.get("lhs")),
        gradient_mask(config, config.fwd.rhs, rhs, (_FWD.rhs_contract, ()), scaling.get("rhs")),
    ]
    return out, (save((lhs_saved, rhs_saved, masks)), sizes, seen, keys, scaling, (trace_of(lhs), trace_of(rhs)))


def _dot_bwd(call: Call, residuals: Any, g: Array):
    (lhs, rhs, masks), sizes, seen, keys, scaling, like = residuals
    g = once_differentiable(g, *like)
    rows = Rows(g.shape[0], sizes, call.parts)
    dlhs, seen_dlhs = _dlhs(call, g, rhs, rows, keys[2:4], scaling, _sent(call, like[0].dtype))
    drhs, seen_drhs = _drhs(
        call, g, lhs, rows, keys[4:6], scaling, _sent(call, call.config.drhs.accumulator or like[1].dtype)
    )
    grads = [finish(grad, x, mask) for grad, x, mask in zip((dlhs, drhs), like, masks, strict=True)]
    return *grads, None, None, updated_scaling(call.config, scaling, seen | seen_dlhs | seen_drhs)


_dot.defvjp(_dot_fwd, _dot_bwd)


def _sent(call: Call, dtype: Any) -> Any:
    """The dtype in which devices add up a gradient; on one device it is summed in float32."""
    return jnp.float32 if call.parts is None else dtype


def _dlhs(call: Call, g: Array, residual: Factor, rows: Rows, keys, scaling: Scaling, dtype: Any):
    fold = functools.partial(_fold_experts, rows=rows)
    g, residual, matmul = _residual(call.config.dlhs, g, residual, call.config.fwd.rhs, fold)
    left, right, seen = quantize_operands(matmul, g, residual, _DLHS, keys, scaling, ("dlhs", None))
    left, right = brought(call.config.gather, left, right)
    left, right = as_input(matmul.lhs, left), as_input(matmul.rhs, right)
    return multiply_groups(left, right, rows, contract=2, dtype=dtype, **call.how), seen


def _drhs(call: Call, g: Array, residual: Factor, rows: Rows, keys, scaling: Scaling, dtype: Any):
    g, residual, matmul = _residual(call.config.drhs, g, residual, call.config.fwd.lhs, _fold_rows)
    matmul = matmul.replace(lhs=_without_tiles(matmul.lhs), rhs=_without_tiles(matmul.rhs))
    scales: tuple[Array, ...] = ()
    watched: dict[str, Any] = {}
    if matmul.lhs is not None and "drhs" not in scaling and _by_group(matmul.lhs):
        q, scale = _quantize_by_group(matmul.lhs, g, rows, keys[0])
        scales = (scale[:, None, :],)
        watched = seen_by(scaling, "drhs", g, q._replace(scale=rows.pick(scale)))
    else:
        q = g
    if matmul.rhs is not None and not isinstance(residual, QArray) and _by_group(matmul.rhs):
        residual, scale = _quantize_by_group(matmul.rhs, residual, rows, keys[1])
        scales = (*scales, scale[:, :, None])
    left, right, seen = quantize_operands(matmul, q, residual, _DRHS, keys, scaling, ("drhs", None))
    left, right = as_input(matmul.lhs, left), as_input(matmul.rhs, right)
    if call.config.scatter is not None:
        out, lost = multiply_rows_as(call.config.scatter, right, left, rows, scaling, scales=scales, **call.how)
        return out, seen | watched | lost
    return multiply_rows(right, left, rows, dtype=dtype, scales=scales, **call.how), seen | watched


def _residual(
    matmul: Matmul, g: Array, residual: Factor, operand: Operand | None, fold: Any
) -> tuple[Array, Factor, Matmul]:
    """The gradient, the residual as the matmul wants it, and the matmul with what is left to quantize."""
    if not isinstance(residual, QArray):
        return g, residual, matmul.replace(rhs=None) if matmul.residual == "reuse" else matmul
    if matmul.residual != "reuse":
        return g, residual.dequantize(jnp.float32), matmul
    folded = (g, residual) if matmul.lhs is None else fold(g, residual)
    if folded is None:
        return g, residual.dequantize(jnp.float32), matmul.replace(rhs=matmul.rhs or operand)
    g, residual = folded
    return g, residual, matmul.replace(rhs=None)


def _fold_experts(g: Array, residual: QArray, *, rows: Rows) -> tuple[Array, QArray] | None:
    """The scale [g, 1, n] of the experts' codes moved into the gradient, row by row."""
    q = residual.unpack()
    if q.zero_point is not None or q.padding or q.scale.shape[1] != 1 or q.scale.shape[2] not in (1, q.shape[2]):
        return None
    if q.scale.shape[2] == 1:
        return g, q
    scale = _full_scale(q)[:, 0]
    return _move(g, q, rows.pick(scale) if len(scale) > 1 else scale)


def _fold_rows(g: Array, residual: QArray) -> tuple[Array, QArray] | None:
    """The scale [m, 1] of the rows' codes moved into the gradient."""
    q = residual.unpack()
    if q.zero_point is not None or q.padding or q.scale.shape[1] != 1 or q.scale.shape[0] not in (1, q.shape[0]):
        return None
    return (g, q) if q.scale.shape[0] == 1 else _move(g, q, _full_scale(q))


def _full_scale(q: QArray) -> Array:
    scale = q.scale.astype(jnp.float32)
    return scale if q.outer_scale is None else scale * q.outer_scale.astype(jnp.float32)


def _move(g: Array, q: QArray, scale: Array) -> tuple[Array, QArray]:
    return g.astype(jnp.float32) * scale, q._replace(scale=jnp.ones((1,) * q.ndim, jnp.float32), outer_scale=None)


def _without_tiles(operand: Operand | None) -> Operand | None:
    """Groups cut the contracted rows already; only formats that are made of tiles keep theirs."""
    return operand if operand is None or operand.qtype.tile is not None else operand.replace(tile=None, square=False)


def _by_group(operand: Operand) -> bool:
    """Whether to have one scale per group and column: where measuring that takes one pass."""
    own = operand.tile is None and operand.tracker is None and not operand.per_tensor
    return own and operand.dequant == "output" and isinstance(operand.calibration, AbsMax)


def _quantize_by_group(operand: Operand, x: Array, rows: Rows, key: PRNGKeyArray | None) -> tuple[QArray, Array]:
    """Codes whose scale is one, and the scale [g, n] of each group and column that belongs to them."""
    how = operand.quantizer(2, contracting=(0,)).replace(channelwise_axes=(0, 1))
    bounds = operand.calibration.measure(group_absmax(x.astype(jnp.float32), rows), axes=())
    scale = how.quantize(jnp.zeros_like(bounds["absmax"], x.dtype), key=key, bounds=bounds).scale
    q = how.quantize(x, key=key, bounds={k: rows.pick(v) for k, v in bounds.items()})
    ones = jnp.ones((1, 1), jnp.float32)
    return q._replace(qvalue=materialize(q.qvalue), scale=ones), scale.astype(jnp.float32)
