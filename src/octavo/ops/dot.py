"""A matmul whose three products are quantized as a DotConfig says, with the gradient that goes with it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from octavo import _sharding
from octavo._typing import Array, PRNGKeyArray
from octavo.calibration import Bounds
from octavo.ops.calls import call_known
from octavo.ops.config import DotConfig, Matmul, Operand
from octavo.ops.dims import Dims
from octavo.ops.factor import Factor
from octavo.ops.gather import brought, kept
from octavo.ops.hadamard import rotate
from octavo.ops.lowering import explicit_shardings
from octavo.ops.multiply import SMALLEST_TILE, multiply
from octavo.ops.sparsity import nm_mask
from octavo.ops.training import (
    Scaled,
    Scaling,
    as_input,
    check_scaling,
    finish,
    gradient_mask,
    masked,
    once_differentiable,
    quantize_operand,
    save,
    settled,
    six_keys,
    trace_of,
    traced_once,
    updated_scaling,
    vary_alike,
)
from octavo.ops.watch import seen_by
from octavo.qarray import QArray


class Call(NamedTuple):
    """What is static about one matmul."""

    dims: Dims
    config: DotConfig
    dtype: np.dtype
    precision: Any
    out_sharding: Any
    operand_shardings: tuple[Any, Any] = (None, None)
    """Where sharding is part of the types: what the gradients are to have."""


def quantized_dot(lhs: Array, rhs: Array, key: PRNGKeyArray | None, scaling: Scaling, call: Call) -> Array:
    """The product of two float arrays, each quantized on the way, with quantized gradients."""
    check_scaling(call.config, scaling, smooths=True)
    lhs, rhs = vary_alike(lhs, rhs)
    if call.config.sparsity is not None:
        n, m = call.config.sparsity
        mask = nm_mask(_sharding.settled(rhs), n, m, axis=call.dims.rhs_contract[-1])
        rhs = masked(rhs, _sharding.restored(mask, _sharding.explicit(rhs)))
    call = call._replace(operand_shardings=explicit_shardings(lhs, rhs))
    return call_known(
        _dot,
        call,
        (lhs, rhs, key, scaling),
        op="dot_general",
        primitive="dot_general",
        params={"dimension_numbers": call.dims.numbers},
        config=call.config,
        run=_primal,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(call: Call, lhs: Array, rhs: Array, key: PRNGKeyArray | None, scaling: Scaling) -> Array:
    return _primal(call, lhs, rhs, key, scaling)


@traced_once
def _primal(call: Call, lhs: Factor, rhs: Factor, key: PRNGKeyArray | None, scaling: Scaling) -> Array:
    return _forward(call, *settled(lhs, rhs), key, scaling)[0]


def _forward(call: Call, lhs: Factor, rhs: Factor, key: PRNGKeyArray | None, scaling: Scaling):
    keys = six_keys(key)
    if call.config.smooth is not None:
        lhs, rhs = _smoothed(lhs, rhs, call.dims, call.config.smooth)
    left, right, seen = quantize_operands(call.config.fwd, lhs, rhs, call.dims, keys[:2], scaling, ("lhs", "rhs"))
    left, right = kept(call.config.gather, left, right)
    whole = brought(call.config.gather, left, right)
    out = multiply(
        as_input(call.config.fwd.lhs, whole[0]),
        as_input(call.config.fwd.rhs, whole[1]),
        call.dims,
        dtype=call.dtype,
        precision=call.precision,
        out_sharding=call.out_sharding,
        lowering=call.config.lowering,
        accumulator=call.config.fwd.accumulator,
    )
    return out, (left, right, seen, keys, (lhs, rhs))


@traced_once
def _dot_fwd(call: Call, lhs: Array, rhs: Array, key: PRNGKeyArray | None, scaling: Scaling):
    lhs, rhs = settled(lhs, rhs)
    out, (left, right, seen, keys, smoothed) = _forward(call, lhs, rhs, key, scaling)
    config = call.config
    # Only what the gradients read is saved, in low precision wherever a gradient takes it so.
    rhs_saved = rhs if config.dlhs.residual == "original" else right
    lhs_saved = lhs if config.drhs.residual == "original" else left
    masks = [
        gradient_mask(config, operand, x, axes, scaling.get(name)) for operand, x, axes, name in _sides(call, *smoothed)
    ]
    return out, (save((lhs_saved, rhs_saved, masks)), seen, keys, scaling, (trace_of(lhs), trace_of(rhs)))


@traced_once
def _dot_bwd(call: Call, residuals: Any, g: Array):
    (lhs, rhs, masks), seen, keys, scaling, like = residuals
    g, wheres = once_differentiable(_sharding.settled(g), *like), call.operand_shardings
    # What is masked is summed first: a sum that is not taken has no values to be zero.
    places = [_sharding.of_gradient(x if m is None else _sharding.plain(x)) for x, m in zip(wheres, masks, strict=True)]
    dlhs, seen_dlhs = _gradient(call, call.config.dlhs, g, rhs, True, keys[2:4], scaling, places[0])
    drhs, seen_drhs = _gradient(call, call.config.drhs, g, lhs, False, keys[4:6], scaling, places[1])
    grads = [finish(*parts) for parts in zip((dlhs, drhs), like, masks, wheres, strict=True)]
    return *grads, None, updated_scaling(call.config, scaling, seen | seen_dlhs | seen_drhs)


_dot.defvjp(_dot_fwd, _dot_bwd)


def _gradient(call: Call, matmul: Matmul, g: Any, residual: Factor, of_lhs: bool, keys, scaling: Scaling, where: Any):
    """One of the two gradients, and what was measured on the way."""
    gradient = call.dims.gradient(of_lhs)
    operand = call.config.fwd.rhs if of_lhs else call.config.fwd.lhs
    if isinstance(residual, QArray):
        if matmul.residual == "reuse":
            folded = _fold(g, residual, gradient.dims) if matmul.lhs is not None else (g, residual)
            if folded is None:
                # Tiles along the other axis: the codes cannot be used as they are.
                residual, matmul = residual.dequantize(jnp.float32), matmul.replace(rhs=matmul.rhs or operand)
            else:
                (g, residual), matmul = folded, matmul.replace(rhs=None)
        else:
            residual = residual.dequantize(jnp.float32)
    elif matmul.residual == "reuse":
        matmul = matmul.replace(rhs=None)
    name = "dlhs" if of_lhs else "drhs"
    left, right, seen = quantize_operands(matmul, g, residual, gradient.dims, keys, scaling, (name, None))
    gather = call.config.gather
    if gather is not None and gather.left != of_lhs:
        right = gather.bring(right)
    left, right, dims = as_input(matmul.lhs, left), as_input(matmul.rhs, right), gradient.dims
    if gradient.swapped:
        left, right, dims = right, left, dims.swap()
    product = functools.partial(
        multiply,
        dims=dims,
        dtype=jnp.float32,
        precision=call.precision,
        lowering=call.config.lowering,
        accumulator=matmul.accumulator,
    )
    scatter = call.config.scatter
    if scatter is not None and scatter.left == of_lhs and dims.lhs_contract:
        if any(x is not None for x in call.operand_shardings):
            raise NotImplementedError("a mesh with explicit axes adds up gradients in float: leave reduce_qtype out")
        out, lost = scatter.sum(product, left, right, dims, gradient, scaling)
        return out, seen | lost
    out = product(left, right, out_sharding=gradient.sharding(where))
    return gradient.arrange(out), seen


def quantize_operands(matmul: Matmul, lhs: Any, rhs: Factor, dims: Dims, keys, scaling: Scaling, names):
    """Both operands of a matmul, rotated and quantized as it says, and the bounds that were measured."""
    seen: dict[str, Bounds] = {}
    if matmul.rotate is not None:
        assert not isinstance(lhs, QArray)
        assert not isinstance(rhs, QArray)
        lhs = rotate(lhs, matmul.rotate, axis=dims.lhs_contract[-1])
        rhs = rotate(rhs, matmul.rotate, axis=dims.rhs_contract[-1])

    def quantized(operand: Operand | None, x: Any, left: bool) -> Factor:
        if operand is None or isinstance(x, QArray):
            return x.product() if isinstance(x, Scaled) else x
        contract, batch = (dims.lhs_contract, dims.lhs_batch) if left else (dims.rhs_contract, dims.rhs_batch)
        name, key = (names[0], keys[0]) if left else (names[1], keys[1])
        q, measured = quantize_operand(operand, x, contract, batch, key, scaling.get(name))
        if measured is not None:
            seen[name] = measured
        seen.update(seen_by(scaling, name, x.product() if isinstance(x, Scaled) else x, q))
        return q

    if matmul.rhs is not None and matmul.rhs.dequant == "other":
        rhs = quantized(matmul.rhs, rhs, False)
        assert isinstance(rhs, QArray)
        assert not isinstance(lhs, QArray)
        moved, rhs = _move_scale(rhs, lhs, dims, from_left=False)
        return quantized(matmul.lhs, moved, True), rhs, seen
    lhs = quantized(matmul.lhs, lhs, True)
    if matmul.lhs is not None and matmul.lhs.dequant == "other":
        assert isinstance(lhs, QArray)
        assert not isinstance(rhs, QArray)
        moved, lhs = _move_scale(lhs, rhs, dims, from_left=True)
        return lhs, quantized(matmul.rhs, moved, False), seen
    return lhs, quantized(matmul.rhs, rhs, False), seen


def _fold(g: Array, residual: QArray, dims: Dims) -> tuple[Array | Scaled, QArray] | None:
    """The residual's scale moved into the gradient, if it must be and can be; None if only requantizing helps."""
    residual = residual.unpack()
    tiles = residual.tile_shape
    direct = all(tiles[a] == residual.shape[a] or tiles[a] >= SMALLEST_TILE for a in dims.rhs_contract)
    if direct and not residual.padding:
        return g, residual
    constant = all(
        residual.scale.shape[a] == 1 for a in range(residual.ndim) if a not in (*dims.rhs_contract, *dims.rhs_batch)
    )
    single = all(tiles[a] == 1 or residual.scale.shape[a] == 1 for a in dims.rhs_contract)
    if residual.zero_point is not None or residual.padding or not (constant and single):
        return None
    return _move_scale(residual, g, dims, from_left=False)


def _move_scale(q: QArray, other: Array, dims: Dims, *, from_left: bool) -> tuple[Scaled, QArray]:
    """A scale that runs along the contraction, multiplied into the other operand instead."""
    mine = (*dims.lhs_batch, *dims.lhs_contract) if from_left else (*dims.rhs_batch, *dims.rhs_contract)
    theirs = (*dims.rhs_batch, *dims.rhs_contract) if from_left else (*dims.lhs_batch, *dims.lhs_contract)
    scale = q.scale.astype(jnp.float32)
    if q.outer_scale is not None:
        scale = scale * q.outer_scale.astype(jnp.float32)
    ones = jnp.ones((1,) * q.ndim, jnp.float32)
    return Scaled(other, _across(scale, mine, theirs, other.ndim)), q._replace(scale=ones, outer_scale=None)


def _across(part: Array, mine: tuple[int, ...], theirs: tuple[int, ...], ndim: int) -> Array:
    """What runs along the shared axes of one operand, laid out for the other, whose kept axes come in with size one."""
    part = jnp.transpose(part, (*mine, *(a for a in range(part.ndim) if a not in mine)))
    part = part.reshape(part.shape[: len(mine)])
    place = dict(zip(theirs, range(len(theirs)), strict=True))
    part = jnp.transpose(part, [place[a] for a in sorted(theirs)])
    shape = iter(part.shape)
    return part.reshape([next(shape) if a in theirs else 1 for a in range(ndim)])


def _smoothed(lhs: Factor, rhs: Factor, dims: Dims, alpha: float) -> tuple[Array, Array]:
    """Both operands with their outliers evened out along the contraction; their product stays what it is.

    Xiao et al., SmoothQuant (2022), equation 4, for each contracted index k (and each batch):

        s_k = max|lhs_k|**alpha / max|rhs_k|**(1 - alpha),   lhs_k / s_k,   rhs_k * s_k
    """
    if isinstance(lhs, QArray) or isinstance(rhs, QArray):
        raise TypeError("smooth scales float operands before they are quantized; a QArray is quantized already")
    wide = jnp.float64 if jnp.float64 in (lhs.dtype, rhs.dtype) else jnp.float32
    lhs, rhs = lhs.astype(wide), rhs.astype(wide)
    mine, theirs = (*dims.lhs_batch, *dims.lhs_contract), (*dims.rhs_batch, *dims.rhs_contract)
    left = jnp.max(jnp.abs(lhs), axis=dims.lhs_remaining, keepdims=True, initial=0)
    right = jnp.max(jnp.abs(rhs), axis=dims.rhs_remaining, keepdims=True, initial=0)
    right = _sharding.beside(_across(right, theirs, mine, lhs.ndim), left)
    s = left**alpha / right ** (1 - alpha)
    # What is not finite stays so, for its own row alone.
    s = jnp.where((s > 0) & jnp.isfinite(s), s, 1)
    # An index whose one side is all zeros adds nothing: the other side must not widen a range with it.
    used = ((left != 0) & (right != 0)).astype(wide)
    return lhs * (used / s), rhs * _sharding.beside(_across(used * s, mine, theirs, rhs.ndim), rhs)


def _sides(call: Call, lhs: Array, rhs: Array):
    dims, fwd = call.dims, call.config.fwd
    yield fwd.lhs, lhs, (dims.lhs_contract, dims.lhs_batch), "lhs"
    yield fwd.rhs, rhs, (dims.rhs_contract, dims.rhs_batch), "rhs"
