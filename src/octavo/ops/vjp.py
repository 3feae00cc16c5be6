"""One custom_vjp for every bilinear operation, whose six operands are quantized according to a DotConfig."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from octavo import _sharding
from octavo._typing import Array, PRNGKeyArray
from octavo.calibration import AbsMax, Bounds
from octavo.ops.config import DotConfig, Matmul
from octavo.ops.lowerings.quantize import dequantize_operand
from octavo.ops.lowerings.xla import own_values
from octavo.ops.operands import ArrayOrQArray, MatmulOptions, at_least
from octavo.ops.product import UNPLACED, Placement, Product, Scaling, Transpose, mark, reverse_only
from octavo.ops.quantize import Scaled, fake_quant_operand, gradient_mask, materialize, quantize_operands, smooth
from octavo.ops.sparsity import nm_mask
from octavo.ops.telemetry import telemetry_operands
from octavo.qarray import QArray

RESIDUAL = "octavo_residual"
"""The `checkpoint_name` of residuals, for rematerialization policies."""

LARGE = 2**20
"""Cotangents of at least this size have scales of their own on TPUs."""

ERROR_FEEDBACK = "error_feedback"
"""The key in a scaling for error feedback: each device's rounding error of a reduced gradient."""


class Call(NamedTuple):
    """The static arguments of one quantized product."""

    product: Product
    config: DotConfig
    dtype: np.dtype
    precision: Any = None
    out_sharding: Any = None
    placement: Placement = UNPLACED
    operand_shardings: tuple[Any, Any] = (None, None)
    """On a mesh with explicit axes: the required shardings of the gradients."""

    @property
    def params(self) -> dict[str, Any]:
        return self.product.params

    def run(self, *args: Any) -> Array:
        """The forward pass for these arguments; operands may be QArrays."""
        return _primal(self, *args)


def quantized_product(
    call: Call,
    lhs: ArrayOrQArray,
    rhs: ArrayOrQArray,
    *extra: Array,
    key: PRNGKeyArray | None,
    scaling: Scaling | None,
) -> Array:
    """Apply a product, quantizing its float operands and those of its gradients; QArrays are operands as they are."""
    config, product, scaling = call.config, call.product, scaling or {}
    if scaling or config.tracked or call.placement.reduction is not None:
        _check_scaling(config, scaling, call.placement.reduction)
    if isinstance(lhs, QArray) or isinstance(rhs, QArray):
        # Codes are multiplied as they are: they are not masked again, and have no gradient.
        lhs, rhs = (x if isinstance(x, QArray) else reverse_only(x) for x in (lhs, rhs))
        return _product(call._replace(placement=UNPLACED), lhs, rhs, extra, key, scaling)
    typed = _sharding.is_typed(lhs, rhs)
    if typed:
        lhs, rhs = _sharding.vary_alike(lhs, rhs)
    if config.sparsity is not None:
        n, m = config.sparsity
        kept = nm_mask(_sharding.without_reduced(rhs), n, m, axis=product.dims.rhs_contract[-1])
        rhs = masked(rhs, _sharding.restore_reduced(kept, _sharding.explicit(rhs)))
    if typed and product.has_explicit_shardings:
        call = call._replace(operand_shardings=_sharding.explicit_shardings(lhs, rhs))
    return _product(call, reverse_only(lhs), reverse_only(rhs), extra, key, scaling)


def init_product_scaling(config: DotConfig, product: Product, lhs: Any, rhs: Any, reduction: Any = None) -> Scaling:
    """The initial state of every tracker of a config, and of error feedback, for operands of these shapes."""
    out = jax.ShapeDtypeStruct(product.out_shape(lhs.shape, rhs.shape), jnp.float32)
    dims, dlhs, drhs = product.dims, product.transpose(True).dims, product.transpose(False).dims
    sides = {
        "lhs": (lhs, dims.lhs_contract, dims.lhs_batch),
        "rhs": (rhs, dims.rhs_contract, dims.rhs_batch),
        "dlhs": (out, dlhs.lhs_contract, dlhs.lhs_batch),
        "drhs": (out, drhs.lhs_contract, drhs.lhs_batch),
    }
    state = {}
    for name, operand in config.tracked.items():
        x, contract, batch = sides[name]
        quantizer = operand.quantizer(len(x.shape), contracting=contract, batch=batch)
        bounds = jax.eval_shape(lambda x=x, q=quantizer: q.measure(jnp.zeros(x.shape)))
        assert operand.tracker is not None
        state[name] = operand.tracker.init({k: jnp.zeros(v.shape, v.dtype) for k, v in bounds.items()})
    return state if reduction is None else state | reduction.init_error(lhs.shape if reduction.left else rhs.shape)


def _check_scaling(config: DotConfig, scaling: Scaling, reduction: Any = None) -> None:
    """Raise for ranges of unknown operands, and for missing state."""
    if unknown := telemetry_operands(scaling) - {"lhs", "rhs", "dlhs", "drhs", ERROR_FEEDBACK}:
        raise ValueError(f"scaling has ranges for lhs, rhs, dlhs and drhs; got {sorted(unknown)}")
    if reduction is not None and reduction.feedback and ERROR_FEEDBACK not in scaling:
        raise ValueError(
            "reducing a gradient with error feedback needs its state: pass scaling=octavo.ops.init_scaling(...)"
        )
    if missing := set(config.tracked) - set(scaling):
        raise ValueError(
            f"the trackers of {sorted(missing)} need their state: pass scaling=octavo.ops.init_scaling(...), or for an "
            "einsum init_einsum_scaling(...)"
        )


def jit_if_tracing(
    fn: Callable[..., Any], *, inline: Callable[[Call], bool] = lambda call: False
) -> Callable[..., Any]:
    """Jit a function of a `Call`, which is static, and arrays when it is called under a trace.

    A model multiplies the same shapes in every layer, so they share one trace and, unless it is inlined, one lowered
    function. Outside of any trace the function runs eagerly, because compiling it for a single call would take longer.
    """
    shared, inlined = jax.jit(fn, static_argnums=0), jax.jit(fn, static_argnums=0, inline=True)

    @functools.wraps(fn)
    def run(call: Call, *args: Any) -> Any:
        if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
            return fn(call, *args)
        return (inlined if inline(call) else shared)(call, *args)

    return run


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    call: Call, lhs: ArrayOrQArray, rhs: ArrayOrQArray, extra: Any, key: PRNGKeyArray | None, scaling: Scaling
) -> Array:
    return mark(_primal(call, lhs, rhs, extra, key, scaling), call, (lhs, rhs, extra, key, scaling))


@jit_if_tracing
def _primal(
    call: Call, lhs: ArrayOrQArray, rhs: ArrayOrQArray, extra: Any, key: PRNGKeyArray | None, scaling: Scaling
) -> Array:
    return _forward(call, *_sharding.without_reduced((lhs, rhs)), extra, key, scaling)[0]


def _forward(
    call: Call, lhs: ArrayOrQArray, rhs: ArrayOrQArray, extra: Any, key: PRNGKeyArray | None, scaling: Scaling
):
    config, product, gather = call.config, call.product, call.placement.gather
    keys = (None,) * 6 if key is None else tuple(jax.random.split(key, 6))
    if config.fwd.smooth is not None:
        lhs, rhs = smooth(lhs, rhs, product.dims, config.fwd.smooth)
    left, right, seen = quantize_operands(config.fwd, lhs, rhs, product.dims, keys[:2], scaling, ("lhs", "rhs"))
    operands = left, right
    if gather is not None and product.has_placement:
        left, right = (gather.shard_codes(left), right) if gather.left else (left, gather.shard_codes(right))
        operands = (gather.all_gather(left), right) if gather.left else (left, gather.all_gather(right))
    options = MatmulOptions(call.dtype, call.precision, config.lowering, config.fwd.accumulator, call.out_sharding)
    out = product.multiply(
        fake_quant_operand(config.fwd.lhs, operands[0]),
        fake_quant_operand(config.fwd.rhs, operands[1]),
        *extra,
        options=options,
    )
    return out, (left, right, seen, keys, (lhs, rhs))


@jit_if_tracing
def _product_fwd(
    call: Call, lhs: ArrayOrQArray, rhs: ArrayOrQArray, extra: Any, key: PRNGKeyArray | None, scaling: Scaling
):
    if key is None and call.config.stochastic:
        raise ValueError(
            f"the gradient of a {call.product.op} rounds stochastically and needs a random key: pass key= to the "
            "operation, call octavo.quantized(fn, rules).stateful(key=key)(...), or in a Flax model give the rng "
            "stream 'stochastic_rounding'"
        )
    lhs, rhs = _sharding.without_reduced((lhs, rhs))
    out, (left, right, seen, keys, smoothed) = _forward(call, lhs, rhs, extra, key, scaling)
    config, dims = call.config, call.product.dims
    # Only residuals that the gradients read are saved, in low precision where a gradient uses codes.
    rhs_saved = rhs if config.dlhs.residual == "original" else right
    lhs_saved = lhs if config.drhs.residual == "original" else left
    masks = (
        gradient_mask(config, config.fwd.lhs, smoothed[0], dims.lhs_contract, dims.lhs_batch, scaling.get("lhs")),
        gradient_mask(config, config.fwd.rhs, smoothed[1], dims.rhs_contract, dims.rhs_batch, scaling.get("rhs")),
    )
    saved = jax.tree.map(lambda x: checkpoint_name(x, RESIDUAL), (lhs_saved, rhs_saved, masks))
    probes = tuple(None if isinstance(x, QArray) else tangent_probe(x) for x in (lhs, rhs))
    return out, (saved, extra, seen, keys, scaling, probes)


# Inlined, because TPU's compiler moves reshapes before it inlines a function with several callers. Behind the reshape
# of heads it measures the cotangents of q, k and v in a pass of its own; inlined, in the matmuls of attention that
# write them. With delayed ranges they are measured where they are rounded, and inlining costs 1.6 % of a layer.
# Lowering takes 0.6 ms longer per matmul.
@functools.partial(jit_if_tracing, inline=lambda call: not call.config.tracked)
def _product_bwd(call: Call, residuals: Any, g: Array):
    (lhs, rhs, masks), extra, seen, keys, scaling, like = residuals
    probes = [g[:0] if x is None else x for x in like]
    g, shardings = _once_differentiable(_sharding.without_reduced(g), *probes), call.operand_shardings
    g = materialize(g, call.config.drhs.lhs)
    gradients, given = [], _shared_scaling(call.config, scaling)
    both = [
        None if probe is None else _use_residual(call, of_lhs, g, residual, extra)
        for of_lhs, residual, probe in zip((True, False), (rhs, lhs), like, strict=True)
    ]
    if at_least(g.size, LARGE) and at_least(math.prod(lhs.shape) - g.size, 0) and _measures_cotangent(call.config):
        both = _own_scales(both)
    for of_lhs, operands, probe, mask, wanted in zip((True, False), both, like, masks, shardings, strict=True):
        if operands is None:  # of a QArray
            gradients.append(None)
            continue
        # A masked gradient is reduced first: the values of an unreduced array cannot be masked.
        sharding = _sharding.gradient_sharding(wanted if mask is None else _sharding.plain(wanted))
        operand_keys = keys[2:4] if of_lhs else keys[4:6]
        grad, more = _gradient(call, of_lhs, operands, extra, operand_keys, given, probe.dtype, sharding)
        seen = seen | more
        grad = grad.astype(probe.dtype)
        if mask is not None:
            grad = jnp.where(mask, grad, jnp.zeros_like(grad)) if mask.dtype == bool else grad * mask.astype(grad.dtype)
        if wanted is not None:
            grad = _sharding.reshard_if_explicit(grad, _sharding.gradient_sharding(wanted))
        gradients.append(grad)
    return *gradients, (None,) * len(extra), None, _updated_scaling(call.config, scaling, seen)


_product.defvjp(_product_fwd, _product_bwd)


def _shared_scaling(config: DotConfig, scaling: Scaling) -> Scaling:
    """The scaling from which both gradients read, with one state for a cotangent that both quantize alike.

    Both of its histories hold the same ranges. Read from one, its codes are the same expression in both gradients, and
    XLA computes them once.
    """
    left, right = (matmul.lhs if matmul.smooth is None else None for matmul in (config.dlhs, config.drhs))
    alike = left is not None and left == right and left.per_tensor and left.tile is None
    return scaling | {"drhs": scaling["dlhs"]} if alike and {"dlhs", "drhs"} <= config.tracked.keys() else scaling


def _gradient(
    call: Call,
    of_lhs: bool,
    operands: tuple[Any, ArrayOrQArray, Matmul],
    extra: Any,
    keys: Any,
    scaling: Scaling,
    dtype: Any,
    sharding: Any,
):
    """One of the two gradients, and the bounds and telemetry measured for it."""
    config, transpose, (gather, reduction) = call.config, call.product.transpose(of_lhs), call.placement
    name, (g, residual, matmul) = "dlhs" if of_lhs else "drhs", operands
    residual = transpose.arrange_residual(residual)
    if matmul.smooth is not None:
        g, residual = smooth(g, residual, transpose.dims, matmul.smooth)
    matmul, left, right, measured, scales = transpose.quantize_by_group(
        matmul, g, residual, *extra, keys=keys, scaling=scaling, name=name
    )
    left, right, seen = quantize_operands(matmul, left, right, transpose.dims, keys, scaling, (name, None))
    seen = seen | measured
    if gather is not None and call.product.has_placement and gather.left != of_lhs:
        right = gather.all_gather(right)
    left, right = fake_quant_operand(matmul.lhs, left), fake_quant_operand(matmul.rhs, right)
    dtype = transpose.gradient_dtype(call.dtype, dtype, matmul.accumulator)
    options = MatmulOptions(dtype, call.precision, config.lowering, matmul.accumulator, sharding)
    if reduction is not None and call.product.has_placement and reduction.left == of_lhs:
        if any(x is not None for x in call.operand_shardings):
            raise NotImplementedError("a mesh with explicit axes reduces gradients in float: leave reduce_qtype out")
        reduced = transpose.reduce(reduction, left, right, *extra, options=options, scaling=scaling, scales=scales)
        if reduced is not None:
            return reduced[0], seen | reduced[1]
    by_group = {"scales": scales} if scales else {}
    return transpose.multiply(left, right, *extra, options=options, **by_group), seen


def _use_residual(
    call: Call, of_lhs: bool, g: Array, residual: ArrayOrQArray, extra: Any
) -> tuple[Any, ArrayOrQArray, Matmul]:
    """The cotangent, the residual as an operand, and the config of what remains to be quantized."""
    config, transpose = call.config, call.product.transpose(of_lhs)
    matmul, forward = (config.dlhs, config.fwd.rhs) if of_lhs else (config.drhs, config.fwd.lhs)
    if not isinstance(residual, QArray):
        return g, residual, matmul.replace(rhs=None) if matmul.residual == "reuse" else matmul
    if matmul.residual != "reuse":
        return g, dequantize_operand(residual, transpose.residual_dtype), matmul
    folded = transpose.fold(g, residual, *extra, quantized=matmul.lhs is not None)
    if folded is None:
        # A scale along the contraction that cannot be moved: requantize along the new contraction.
        return g, dequantize_operand(residual, transpose.residual_dtype), matmul.replace(rhs=matmul.rhs or forward)
    return *folded, matmul.replace(rhs=None)


def _measures_cotangent(config: DotConfig) -> bool:
    """Whether the range of the cotangent is measured for both gradients, before it is rounded."""
    operands = (config.dlhs.lhs, config.drhs.lhs)
    return not config.tracked and all(x is not None and isinstance(x.calibration, AbsMax) for x in operands)


def _own_scales(both: list[Any]) -> list[Any]:
    """The operands of both gradients, as `_use_residual` returns them, with scales that no other matmul shares on TPUs.

    The matmuls of q, k and v have one input, whose scale is moved into the cotangents of all three. If it is one value,
    TPU's compiler measures and rounds them in common fusions, for which all three are kept in HBM. If each matmul has
    its own, it takes one after the other, and they stay in VMEM: 5 % of a Llama-1B layer. That loses in small matmuls,
    and in those that widen: the cotangents of gate and up are computed together.
    """
    cotangents = [operands[0] for operands in both if operands is not None]
    if len(cotangents) < 2 or not all(isinstance(g, Scaled) for g in cotangents):
        return both
    scales = [g.scale for g in cotangents]
    owned = own_values(*scales, *(-scale for scale in scales))
    return [(Scaled(both[n][0].value, owned[n], owned[n + 2]), *both[n][1:]) for n in range(2)]


def _updated_scaling(config: DotConfig, scaling: Scaling, seen: dict[str, Bounds]) -> Scaling:
    """The cotangent of the scaling: the new state of each tracker, telemetry, zeros for fixed bounds."""
    new = {}
    for name, state in scaling.items():
        operand = config.tracked.get(name)
        if operand is not None and operand.tracker is not None and name in seen:
            bounds = {k: _sharding.replicate_axes(x) for k, x in seen[name].items()}
            updated = operand.tracker.update(state, bounds)
            # With the sharding of the old state.
            new[name] = {k: _sharding.reshard_if_explicit(x, _sharding.explicit(state[k])) for k, x in updated.items()}
        else:
            new[name] = seen[name] if name in seen else jax.tree.map(jnp.zeros_like, state)
    return new


def quantized_transpose(
    transpose: Transpose,
    g: Array,
    residual: Array,
    *extra: Array,
    config: DotConfig,
    options: MatmulOptions,
    key: PRNGKeyArray | None,
) -> Array:
    """A gradient that is part of the function itself, with operands quantized by `config.fwd` as in a backward pass.

    It has no derivative.
    """
    keys, matmul = (None, None) if key is None else tuple(jax.random.split(key)), config.fwd
    g = _once_differentiable(g, tangent_probe(g), tangent_probe(residual))
    matmul, left, right, _, scales = transpose.quantize_by_group(
        matmul, g, residual, *extra, keys=keys, scaling={}, name="lhs"
    )
    left, right, _ = quantize_operands(matmul, left, right, transpose.dims, keys, {}, ("lhs", "rhs"))
    left, right = fake_quant_operand(matmul.lhs, left), fake_quant_operand(matmul.rhs, right)
    by_group = {"scales": scales} if scales else {}
    return transpose.multiply(left, right, *extra, options=options._replace(lowering=config.lowering), **by_group)


@jax.custom_vjp
def masked(x: Array, mask: Array) -> Array:
    """Zero where the mask is False, in the gradient too; the mask is the only residual."""
    return jnp.where(mask, x, jnp.zeros_like(x))


def _masked_bwd(mask: Array, g: Array) -> tuple[Array, None]:
    if _sharding.is_unreduced(_sharding.explicit(g)):
        return g * mask.astype(g.dtype), None  # an unreduced array supports multiplication only
    return jnp.where(mask, g, jnp.zeros_like(g)), None


masked.defvjp(lambda x, mask: (masked(x, mask), mask), _masked_bwd)


def tangent_probe(x: Array) -> Array:
    """A zero-size slice that carries the dtype and the tangent of x."""
    return jax.lax.slice(x, (0,) * x.ndim, (0,) * x.ndim)


@jax.custom_jvp
def _once_differentiable(g: Array, lhs: Array, rhs: Array) -> Array:
    """The cotangent, in a backward pass that raises if it is differentiated again.

    It also takes tangent probes of the operands, because residuals are codes, which have no tangents.
    """
    del lhs, rhs
    return g


@_once_differentiable.defjvp
def _raise_second_derivative(primals, tangents):
    raise NotImplementedError(
        "a quantized matmul has no second derivative: rounding has none, and zero would be wrong. Use config=None for "
        "the part that is differentiated twice, or octavo.fake_quant around a float matmul"
    )
