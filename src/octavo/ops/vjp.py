"""Helpers of the custom_vjp of a `Product`: operands, external ranges, masks, residuals."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from octavo import _sharding
from octavo._typing import Array, PRNGKeyArray
from octavo.calibration import AbsMax, Bounds
from octavo.ops.codes import ArrayOrQArray
from octavo.ops.config import DotConfig, Operand
from octavo.ops.layout import materialize
from octavo.ops.scales import Scaled
from octavo.ops.telemetry import telemetry_operands
from octavo.qarray import QArray, Quantizer, inside

RESIDUAL = "octavo_residual"
"""The `checkpoint_name` of residuals, for rematerialization policies."""

ERROR_FEEDBACK = "error_feedback"
"""The key in a scaling for error feedback: each device's rounding error of a reduced gradient."""

type Scaling = dict[str, dict[str, Array]]
"""External ranges: per operand ("lhs", "rhs", "dlhs", "drhs") bounds, or the state of its tracker."""


def jit_if_tracing(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Jit a function of a static argument and arrays when it is called under a trace.

    A model multiplies the same shapes in every layer, so they share one trace and one lowered function. Outside of any
    trace the function runs eagerly, because compiling it for a single call would take longer.
    """
    jitted = jax.jit(fn, static_argnums=0)

    @functools.wraps(fn)
    def call(static: Any, *args: Any) -> Any:
        tracing = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args))
        return (jitted if tracing else fn)(static, *args)

    return call


def vary_alike(*arrays: Array) -> tuple[Array, ...]:
    """Make operands varying over the same axes of a shard_map, as its type system requires of a custom_vjp.

    For an operand that is replicated while the other is not, the transpose of this cast is a psum over devices; for
    one that is `reduced`, the gradient is unreduced instead.
    """
    for x in arrays:
        _sharding.check_not_unreduced(x)
    varying = [_sharding.manual_axes(x, "varying") for x in arrays]
    every = frozenset().union(*varying, *(_sharding.manual_axes(x, "reduced") for x in arrays))
    return tuple(
        jax.lax.pcast(x, tuple(sorted(every - own)), to="varying") if every - own else x
        for x, own in zip(arrays, varying, strict=True)
    )


def without_reduced[L: ArrayOrQArray, R: ArrayOrQArray](lhs: L, rhs: R) -> tuple[L, R]:
    """Make both operands `reduced` over no mesh axis."""
    return jax.tree.map(_sharding.without_reduced, lhs), jax.tree.map(_sharding.without_reduced, rhs)


@jax.custom_vjp
def masked(x: Array, mask: Array) -> Array:
    """Zero where the mask is False, in the gradient too; the mask is the only residual."""
    return jnp.where(mask, x, jnp.zeros_like(x))


def _masked_bwd(mask: Array, g: Array) -> tuple[Array, None]:
    if _sharding.is_unreduced(_sharding.explicit(g)):
        return g * mask.astype(g.dtype), None  # an unreduced array supports multiplication only
    return jnp.where(mask, g, jnp.zeros_like(g)), None


masked.defvjp(lambda x, mask: (masked(x, mask), mask), _masked_bwd)


def quantize_operand(operand: Operand, x: Array | Scaled, contract, batch, key, given: dict[str, Array] | None):
    array = x.product() if isinstance(x, Scaled) else x
    how = operand.quantizer(array.ndim, contracting=contract, batch=batch)
    if isinstance(x, Scaled) and isinstance(operand.calibration, AbsMax) and given is None:
        # -(g s) has the range of g s. Written this way, XLA fuses the multiplication into the reduction; if it were the
        # same expression as the one that is rounded, CPUs would materialize g s in float32 for both uses.
        bounds, measured = how.measure(x.product(-1), witness=x.value), None
        q = how.quantize(array, key=key, bounds=bounds, own=True)
    else:
        bounds, measured = _bounds(operand, how, array, given)
        q = how.quantize(array, key=key, bounds=bounds)
    # Materialized once, in row-major order: otherwise CPUs fuse the quantization into later transposes of the codes.
    return materialize(q), measured


def dequantize_if_fake_quant(operand: Operand | None, x: ArrayOrQArray) -> ArrayOrQArray:
    return x.dequantize() if operand is not None and operand.dequant == "input" and isinstance(x, QArray) else x


def gradient_mask(
    config: DotConfig, operand: Operand | None, x: Array, axes, given: dict[str, Array] | None
) -> Array | None:
    """The mask of values within the calibrated range, where gradients pass; None if nothing can be clipped."""
    if not config.clip_gradient or operand is None or config.fwd.rotate:
        return None
    if given is None and not operand.calibration.may_clip:
        return None
    how = operand.quantizer(x.ndim, contracting=axes[0], batch=axes[1])
    return inside(how, x, _bounds(operand, how, x, given)[0])


def _bounds(operand: Operand, how: Quantizer, x: Array, given: dict[str, Array] | None):
    """The range to quantize with, if it is external, and the bounds with which a tracker is updated."""
    if operand.tracker is None:
        return given, None
    measured = how.measure(x)
    return operand.tracker.read(given or operand.tracker.init(measured), measured), measured


def split_operand_keys(key: PRNGKeyArray | None):
    return (None,) * 6 if key is None else tuple(jax.random.split(key, 6))


def trackers_of(config: DotConfig):
    operands = {"lhs": config.fwd.lhs, "rhs": config.fwd.rhs, "dlhs": config.dlhs.lhs, "drhs": config.drhs.lhs}
    return {name: o.tracker for name, o in operands.items() if o is not None and o.tracker is not None}


def check_scaling(config: DotConfig, scaling: Scaling, reduction: Any = None) -> None:
    """Raise for ranges of unknown operands, and for missing state."""
    if unknown := telemetry_operands(scaling) - {"lhs", "rhs", "dlhs", "drhs", ERROR_FEEDBACK}:
        raise ValueError(f"scaling has ranges for lhs, rhs, dlhs and drhs; got {sorted(unknown)}")
    if reduction is not None and reduction.feedback and ERROR_FEEDBACK not in scaling:
        raise ValueError(
            "reducing a gradient with error feedback needs its state: pass scaling=octavo.ops.init_scaling(...)"
        )
    if missing := set(trackers_of(config)) - set(scaling):
        raise ValueError(
            f"the trackers of {sorted(missing)} need their state: pass scaling=octavo.ops.init_scaling(...), or for an "
            "einsum init_einsum_scaling(...)"
        )


def updated_scaling(config: DotConfig, scaling: Scaling, seen: dict[str, Bounds]) -> Scaling:
    """The cotangent of the scaling: the new state of each tracker, telemetry, zeros for fixed bounds."""
    trackers = trackers_of(config)
    fixed = {name: jax.tree.map(jnp.zeros_like, state) for name, state in scaling.items()}
    return {
        name: _tracked(trackers[name], state, seen[name]) if name in trackers else seen.get(name, fixed[name])
        for name, state in scaling.items()
    }


def _tracked(tracker: Any, state: dict[str, Array], bounds: Bounds) -> dict[str, Array]:
    """A tracker's new state, with the sharding of the old state."""
    new = tracker.update(state, {name: _sharding.replicate_axes(x) for name, x in bounds.items()})
    return {name: _sharding.reshard_if_explicit(x, _sharding.explicit(state[name])) for name, x in new.items()}


def save(tree: Any) -> Any:
    """Name residuals, so that a rematerialization policy can save them."""
    return jax.tree.map(lambda x: checkpoint_name(x, RESIDUAL), tree)


def tangent_probe(x: Array) -> Array:
    """A zero-size slice that carries the dtype and the tangent of x."""
    return jax.lax.slice(x, (0,) * x.ndim, (0,) * x.ndim)


def finish(grad: Array, like: Array, mask: Array | None, sharding: Any = None) -> Array:
    """Cast and reshard a gradient to its operand's dtype and sharding, zero where the operand was clipped."""
    grad = grad.astype(like.dtype)
    grad = grad if mask is None else jnp.where(mask, grad, jnp.zeros_like(grad))
    return _sharding.reshard_if_explicit(grad, _sharding.gradient_sharding(sharding))


@jax.custom_jvp
def once_differentiable(g: Array, lhs: Array, rhs: Array) -> Array:
    """The cotangent, in a backward pass that raises if it is differentiated again.

    It also takes tangent probes of the operands, because residuals are codes, which have no tangents.
    """
    del lhs, rhs
    return g


@once_differentiable.defjvp
def _refuse(primals, tangents):
    raise NotImplementedError(
        "a quantized matmul has no second derivative: rounding has none, and zero would be wrong. Use config=None for "
        "the part that is differentiated twice, or octavo.fake_quant around a float matmul"
    )
