"""A matmul whose three products are quantized as a DotConfig says, with the gradient that goes with it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from octavo._typing import Array, PRNGKeyArray
from octavo.calibration import AbsMax, Bounds
from octavo.ops.config import DotConfig, Matmul, Operand
from octavo.ops.dims import Dims
from octavo.ops.hadamard import rotate
from octavo.ops.lowering import materialize
from octavo.ops.multiply import SMALLEST_TILE, Factor, multiply
from octavo.ops.sparsity import nm_mask
from octavo.qarray import QArray, Quantizer, inside

RESIDUAL = "octavo_residual"
"""The name under which a rematerialization policy finds what the forward pass saves for the gradient."""

type Scaling = dict[str, dict[str, Array]]
"""Ranges from outside: per operand ("lhs", "rhs", "dlhs", "drhs") bounds, or the state of its tracker."""


class Call(NamedTuple):
    """What is static about one matmul."""

    dims: Dims
    config: DotConfig
    dtype: np.dtype
    precision: Any
    out_sharding: Any


def quantized_dot(lhs: Array, rhs: Array, key: PRNGKeyArray | None, scaling: Scaling, call: Call) -> Array:
    """The product of two float arrays, each quantized on the way, with quantized gradients."""
    _check(call.config, scaling)
    if call.config.sparsity is not None:
        n, m = call.config.sparsity
        mask = nm_mask(rhs, n, m, axis=call.dims.rhs_contract[-1])
        rhs = _masked(rhs, mask)
    return _dot(call, lhs, rhs, key, scaling)


@jax.custom_vjp
def _masked(x: Array, mask: Array) -> Array:
    """Zero where the mask is False, in the gradient too; saves the mask and nothing else."""
    return jnp.where(mask, x, jnp.zeros_like(x))


_masked.defvjp(lambda x, mask: (_masked(x, mask), mask), lambda mask, g: (jnp.where(mask, g, jnp.zeros_like(g)), None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(call: Call, lhs: Array, rhs: Array, key: PRNGKeyArray | None, scaling: Scaling) -> Array:
    return _forward(call, lhs, rhs, key, scaling)[0]


def _forward(call: Call, lhs: Array, rhs: Array, key: PRNGKeyArray | None, scaling: Scaling):
    keys = _keys(key)
    left, right, seen = _operands(call.config.fwd, lhs, rhs, call.dims, keys[:2], scaling, ("lhs", "rhs"))
    out = multiply(
        _as_input(call.config.fwd.lhs, left),
        _as_input(call.config.fwd.rhs, right),
        call.dims,
        dtype=call.dtype,
        precision=call.precision,
        out_sharding=call.out_sharding,
        lowering=call.config.lowering,
        accumulator=call.config.fwd.accumulator,
    )
    return out, (left, right, seen, keys)


def _dot_fwd(call: Call, lhs: Array, rhs: Array, key: PRNGKeyArray | None, scaling: Scaling):
    out, (left, right, seen, keys) = _forward(call, lhs, rhs, key, scaling)
    config = call.config
    # Only what the gradients read is saved, in low precision wherever a gradient takes it so.
    rhs_saved = rhs if config.dlhs.residual == "original" else right
    lhs_saved = lhs if config.drhs.residual == "original" else left
    masks = [_inside(config, operand, x, axes, scaling.get(name)) for operand, x, axes, name in _sides(call, lhs, rhs)]
    like = (jnp.zeros((0,), lhs.dtype), jnp.zeros((0,), rhs.dtype))
    saved = jax.tree.map(lambda x: checkpoint_name(x, RESIDUAL), (lhs_saved, rhs_saved, masks))
    return out, (*saved, seen, keys, scaling, like)


def _dot_bwd(call: Call, residuals: Any, g: Array):
    lhs, rhs, masks, seen, keys, scaling, (lhs_like, rhs_like) = residuals
    # The residuals depend on the operands, so they are guarded as well: g may be a constant.
    g, lhs, rhs = jax.tree.map(lambda x: _once_differentiable(x) if _is_float(x) else x, (g, lhs, rhs))
    dlhs, seen_dlhs = _gradient(call, call.config.dlhs, g, rhs, True, keys[2:4], scaling)
    drhs, seen_drhs = _gradient(call, call.config.drhs, g, lhs, False, keys[4:6], scaling)
    grads = []
    for grad, like, mask in ((dlhs, lhs_like, masks[0]), (drhs, rhs_like, masks[1])):
        grad = grad.astype(like.dtype)
        grads.append(grad if mask is None else jnp.where(mask, grad, jnp.zeros_like(grad)))
    return *grads, None, _updated(call.config, scaling, seen | seen_dlhs | seen_drhs)


_dot.defvjp(_dot_fwd, _dot_bwd)


def _gradient(call: Call, matmul: Matmul, g: Any, residual: Factor, of_lhs: bool, keys, scaling: Scaling):
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
    left, right, seen = _operands(matmul, g, residual, gradient.dims, keys, scaling, (name, None))
    left, right, dims = _as_input(matmul.lhs, left), _as_input(matmul.rhs, right), gradient.dims
    if gradient.swapped:
        left, right, dims = right, left, dims.swap()
    out = multiply(
        left,
        right,
        dims,
        dtype=jnp.float32,
        precision=call.precision,
        lowering=call.config.lowering,
        accumulator=matmul.accumulator,
    )
    return gradient.arrange(out), seen


def _operands(matmul: Matmul, lhs: Any, rhs: Factor, dims: Dims, keys, scaling: Scaling, names):
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
        q, measured = _quantize(operand, x, contract, batch, key, scaling.get(name))
        if measured is not None:
            seen[name] = measured
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


class Scaled(NamedTuple):
    """An array times a scale that was moved into it, not multiplied yet."""

    value: Array
    scale: Array

    def product(self) -> Array:
        return self.value.astype(jnp.float32) * self.scale


def _quantize(operand: Operand, x: Array | Scaled, contract, batch, key, given: dict[str, Array] | None):
    array = x.product() if isinstance(x, Scaled) else x
    how = operand.quantizer(array.ndim, contracting=contract, batch=batch)
    if isinstance(x, Scaled) and isinstance(operand.calibration, AbsMax) and given is None:
        # -(g s) has the range of g s. Written so, the range is found in the pass that multiplies; were it the same
        # expression as the one that is rounded, CPUs would write the product to memory in float32 for both uses.
        bounds, measured = how.measure(x.value.astype(jnp.float32) * -x.scale), None
        q = how.quantize(array, key=key, bounds=bounds, own=True)
    else:
        bounds, measured = _bounds(operand, how, array, given)
        q = how.quantize(array, key=key, bounds=bounds)
    # Written to memory once, by rows: otherwise CPUs fuse the quantization into whatever transposes the codes later.
    return q._map(lambda part: materialize(part) if part.size > 1 else part), measured


def _as_input(operand: Operand | None, x: Factor) -> Factor:
    return x.dequantize() if operand is not None and operand.dequant == "input" and isinstance(x, QArray) else x


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
    scale = jnp.transpose(scale, (*mine, *(a for a in range(q.ndim) if a not in mine)))
    scale = scale.reshape(scale.shape[: len(mine)])
    # Into the other's order of axes: its kept axes come in with size one.
    place = dict(zip(theirs, range(len(theirs)), strict=True))
    scale = jnp.transpose(scale, [place[a] for a in sorted(theirs)])
    shape = iter(scale.shape)
    scale = scale.reshape([next(shape) if a in theirs else 1 for a in range(other.ndim)])
    ones = jnp.ones((1,) * q.ndim, jnp.float32)
    return Scaled(other, scale), q._replace(scale=ones, outer_scale=None)


def _sides(call: Call, lhs: Array, rhs: Array):
    dims, fwd = call.dims, call.config.fwd
    yield fwd.lhs, lhs, (dims.lhs_contract, dims.lhs_batch), "lhs"
    yield fwd.rhs, rhs, (dims.rhs_contract, dims.rhs_batch), "rhs"


def _inside(config: DotConfig, operand: Operand | None, x: Array, axes, given: dict[str, Array] | None) -> Array | None:
    """Where the gradient passes: within the calibrated range. None when nothing can be outside."""
    if not config.clip_gradient or operand is None or config.fwd.rotate:
        return None
    if given is None and not operand.calibration.may_clip:
        return None
    how = operand.quantizer(x.ndim, contracting=axes[0], batch=axes[1])
    return inside(how, x, _bounds(operand, how, x, given)[0])


def _bounds(operand: Operand, how: Quantizer, x: Array, given: dict[str, Array] | None):
    """The range to quantize by, if it comes from outside, and what a tracker is to remember."""
    if operand.tracker is None:
        return given, None
    measured = how.measure(x)
    return operand.tracker.read(given or operand.tracker.init(measured), measured), measured


def _keys(key: PRNGKeyArray | None):
    return (None,) * 6 if key is None else tuple(jax.random.split(key, 6))


def _trackers(config: DotConfig):
    operands = {"lhs": config.fwd.lhs, "rhs": config.fwd.rhs, "dlhs": config.dlhs.lhs, "drhs": config.drhs.lhs}
    return {name: o.tracker for name, o in operands.items() if o is not None and o.tracker is not None}


def _check(config: DotConfig, scaling: Scaling) -> None:
    if unknown := set(scaling) - {"lhs", "rhs", "dlhs", "drhs"}:
        raise ValueError(f"scaling has ranges for lhs, rhs, dlhs and drhs; got {sorted(unknown)}")
    if missing := set(_trackers(config)) - set(scaling):
        raise ValueError(
            f"the trackers of {sorted(missing)} need their state: pass scaling=octavo.ops.init_scaling(...)"
        )


def _updated(config: DotConfig, scaling: Scaling, seen: dict[str, Bounds]) -> Scaling:
    """The cotangent of the scaling: the new state of each tracker, zeros for what is fixed."""
    trackers = _trackers(config)
    return {
        name: trackers[name].update(state, seen[name]) if name in trackers else jax.tree.map(jnp.zeros_like, state)
        for name, state in scaling.items()
    }


def _is_float(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


@jax.custom_jvp
def _once_differentiable(g: Array) -> Array:
    return g


@_once_differentiable.defjvp
def _refuse(primals, tangents):
    raise NotImplementedError(
        "a quantized matmul has no second derivative: rounding has none, and zero would be wrong. Use config=None for "
        "the part that is differentiated twice, or octavo.fake_quant around a float matmul"
    )
