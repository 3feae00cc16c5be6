"""A convolution whose three products are quantized as a DotConfig says, with the gradient that goes with it."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from octavo import _sharding
from octavo._typing import Array, DTypeLike, PRNGKeyArray
from octavo.ops.api import result_dtype
from octavo.ops.calls import call_known
from octavo.ops.config import DotConfig, Matmul, Operand
from octavo.ops.conv_dims import ConvDims
from octavo.ops.convolve import convolve, per_example, per_feature
from octavo.ops.factor import Factor
from octavo.ops.lowering import explicit_shardings
from octavo.ops.training import (
    Scaling,
    as_input,
    check_scaling,
    finish,
    gradient_mask,
    once_differentiable,
    quantize_operand,
    save,
    settled,
    six_keys,
    trace_of,
    trackers_of,
    updated_scaling,
    vary_alike,
)
from octavo.ops.watch import seen_by
from octavo.qarray import QArray


def conv_general_dilated(
    lhs: Factor,
    rhs: Factor,
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

    Operands that are QArrays are convolved as they are, in any mix with arrays: in the precision of their codes where
    there is one scale per example of `lhs`, per output feature of `rhs`, or per tensor; otherwise dequantized. With a
    `config`, float operands are quantized here with such scales, and so are the two gradients; its `lowering` is for
    dots alone. `key` drives stochastic rounding; `scaling` holds ranges that come from outside, as in
    `octavo.dot_general`.

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
    dims = ConvDims.of(lhs.shape, rhs.shape, *geometry)
    dtype = result_dtype(lhs, rhs, preferred_element_type)
    if config is None:
        return convolve(lhs, rhs, dims, dtype=dtype, precision=precision, out_sharding=out_sharding)
    if quantized:
        raise TypeError("a config quantizes float operands; QArrays are quantized already: leave the config out")
    _refuse(config)
    check_scaling(config, scaling or {})
    lhs, rhs = vary_alike(lhs, rhs)
    call = _Call(dims, config, dtype, precision, out_sharding, explicit_shardings(lhs, rhs))
    return call_known(
        _conv,
        call,
        (lhs, rhs, key, scaling or {}),
        op="conv_general_dilated",
        primitive="conv_general_dilated",
        params=dims.params,
        config=config,
        run=lambda *args: _forward(*args)[0],
    )


def init_conv_scaling(
    config: DotConfig,
    lhs: Any,
    rhs: Any,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    **geometry: Any,
) -> Scaling:
    """The first state of every tracker in a config, for a convolution of operands of these shapes."""
    dims = ConvDims.of(lhs.shape, rhs.shape, window_strides, padding, **geometry)
    out = jax.eval_shape(dims, *(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (lhs, rhs)))
    sides = {
        "lhs": (config.fwd.lhs, lhs, dims.lhs[0]),
        "rhs": (config.fwd.rhs, rhs, dims.rhs[0]),
        "dlhs": (config.dlhs.lhs, out, dims.dlhs().lhs[0]),
        "drhs": (config.drhs.lhs, out, dims.drhs().rhs[0]),
    }
    state = {}
    for name, tracker in trackers_of(config).items():
        operand, x, axis = sides[name]
        assert operand is not None
        how = operand.quantizer(len(x.shape), contracting=_but(axis, len(x.shape)))
        bounds = jax.eval_shape(lambda shape=x.shape, how=how: how.measure(jnp.zeros(shape)))
        state[name] = tracker.init({k: jnp.zeros(v.shape, v.dtype) for k, v in bounds.items()})
    return state


class _Call(NamedTuple):
    """What is static about one convolution."""

    dims: ConvDims
    config: DotConfig
    dtype: np.dtype
    precision: Any
    out_sharding: Any
    operand_shardings: tuple[Any, Any]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _conv(call: _Call, lhs: Array, rhs: Array, key: PRNGKeyArray | None, scaling: Scaling) -> Array:
    return _forward(call, lhs, rhs, key, scaling)[0]


def _forward(call: _Call, lhs: Factor, rhs: Factor, key: PRNGKeyArray | None, scaling: Scaling):
    keys, fwd, dims = six_keys(key), call.config.fwd, call.dims
    lhs, rhs = settled(lhs, rhs)
    left, seen_lhs = _operand(fwd.lhs, lhs, dims.lhs[0], keys[0], scaling, "lhs")
    right, seen_rhs = _operand(fwd.rhs, rhs, dims.rhs[0], keys[1], scaling, "rhs")
    out = convolve(
        as_input(fwd.lhs, left),
        as_input(fwd.rhs, right),
        dims,
        dtype=call.dtype,
        precision=call.precision,
        out_sharding=call.out_sharding,
        accumulator=fwd.accumulator,
    )
    return out, (left, right, seen_lhs | seen_rhs, keys)


def _conv_fwd(call: _Call, lhs: Array, rhs: Array, key: PRNGKeyArray | None, scaling: Scaling):
    out, (left, right, seen, keys) = _forward(call, lhs, rhs, key, scaling)
    config, dims = call.config, call.dims
    # Only what the gradients read is saved, in low precision wherever a gradient takes it so.
    lhs, rhs = settled(lhs, rhs)
    lhs_saved = lhs if config.drhs.residual == "original" else left
    rhs_saved = rhs if config.dlhs.residual == "original" else right
    masks = [
        gradient_mask(config, operand, x, (_but(axis, x.ndim), ()), scaling.get(name))
        for operand, x, axis, name in (
            (config.fwd.lhs, lhs, dims.lhs[0], "lhs"),
            (config.fwd.rhs, rhs, dims.rhs[0], "rhs"),
        )
    ]
    return out, (save((lhs_saved, rhs_saved, masks)), seen, keys, scaling, (trace_of(lhs), trace_of(rhs)))


def _conv_bwd(call: _Call, residuals: Any, g: Array):
    (lhs, rhs, masks), seen, keys, scaling, like = residuals
    g = once_differentiable(_sharding.settled(g), *like)
    dlhs, seen_dlhs = _dlhs(call, g, rhs, keys[2:4], scaling)
    drhs, seen_drhs = _drhs(call, g, lhs, keys[4:6], scaling)
    grads = [finish(*parts) for parts in zip((dlhs, drhs), like, masks, call.operand_shardings, strict=True)]
    return *grads, None, updated_scaling(call.config, scaling, seen | seen_dlhs | seen_drhs)


_conv.defvjp(_conv_fwd, _conv_bwd)


def _dlhs(call: _Call, g: Array, rhs: Factor, keys, scaling: Scaling):
    """g with the turned kernel: g has a scale per example, the kernel one per input feature."""
    dims, matmul = call.dims, call.config.dlhs
    scale, rhs, how = _residual(matmul, call.config.fwd.rhs, rhs)
    if scale is not None:
        g = g.astype(jnp.float32) * per_feature(scale, dims, g.shape)
    turned = rhs._replace(qvalue=dims.kernel(rhs.qvalue)) if isinstance(rhs, QArray) else dims.kernel(rhs)
    grad = dims.dlhs()
    left, seen = _operand(matmul.lhs, g, grad.lhs[0], keys[0], scaling, "dlhs")
    right, _ = _operand(how, turned, grad.rhs[0], keys[1], {}, None)
    # Groups of examples come out as groups of features, with the shape and so the sharding of something else.
    sharding = _sharding.plain(call.operand_shardings[0]) if dims.batch_groups == 1 else None
    return dims.arrange(_product(call, matmul, (matmul.lhs, left), (how, right), grad, sharding)), seen


def _drhs(call: _Call, g: Array, lhs: Factor, keys, scaling: Scaling):
    """The input with g: g has a scale per output feature, the input one per feature."""
    dims, matmul = call.dims, call.config.drhs
    scale, lhs, how = _residual(matmul, call.config.fwd.lhs, lhs)
    if scale is not None:
        g = g.astype(jnp.float32) * per_example(scale, dims, g.shape)
    grad = dims.drhs()
    right, seen = _operand(matmul.lhs, g, grad.rhs[0], keys[0], scaling, "drhs")
    left, _ = _operand(how, lhs, grad.lhs[0], keys[1], {}, None)
    return _product(
        call, matmul, (how, left), (matmul.lhs, right), grad, _sharding.plain(call.operand_shardings[1])
    ), seen


def _product(call: _Call, matmul: Matmul, left, right, grad: ConvDims, out_sharding: Any) -> Array:
    return convolve(
        as_input(*left),
        as_input(*right),
        grad,
        dtype=jnp.float64 if call.dtype == jnp.float64 else jnp.float32,
        precision=call.precision,
        out_sharding=out_sharding,
        accumulator=matmul.accumulator,
    )


def _residual(matmul: Matmul, forward: Operand | None, x: Factor) -> tuple[Array | None, Factor, Operand | None]:
    """A scale to move into the gradient, the residual without it, and how that is still to be quantized."""
    if not isinstance(x, QArray):
        return None, x, None if matmul.residual == "reuse" else matmul.rhs
    if matmul.residual == "requantize":
        return None, x.dequantize(), matmul.rhs
    if matmul.lhs is None:
        return None, x.dequantize(), None
    if x.scale.size == 1:
        return None, x, None
    if x.zero_point is not None:
        # Zero points that differ along the sum cannot be moved: new codes along the new one.
        return None, x.dequantize(), matmul.rhs or forward
    scale = x.scale.astype(jnp.float32)
    if x.outer_scale is not None:
        scale = scale * x.outer_scale.astype(jnp.float32)
    return scale, x._replace(scale=jnp.ones((1,) * x.ndim, jnp.float32), outer_scale=None), None


def _operand(
    operand: Operand | None, x: Factor, axis: int, key, scaling: Scaling, name: str | None
) -> tuple[Factor, dict[str, Any]]:
    """An operand with a scale for each index of an axis, and by its name what was measured of it."""
    if operand is None or isinstance(x, QArray):
        return x, {}
    given = None if name is None else scaling.get(name)
    q, measured = quantize_operand(operand, x, _but(axis, x.ndim), (), key, given)
    seen: dict[str, Any] = seen_by(scaling, name, x, q)
    return q, seen if name is None or measured is None else seen | {name: measured}


def _but(axis: int, ndim: int) -> tuple[int, ...]:
    return tuple(a for a in range(ndim) if a != axis)


def _refuse(config: DotConfig) -> None:
    """Raise for what a convolution cannot honour, rather than drop it."""
    if config.sparsity is not None:
        raise NotImplementedError("a convolution has no n:m sparsity: mask the kernel with octavo.ops.nm_mask first")
    for name in ("fwd", "dlhs", "drhs"):
        matmul = getattr(config, name)
        if matmul.rotate is not None:
            raise NotImplementedError(f"{name} rotates its operands, which a window of a convolution does not allow")
        for side in ("lhs", "rhs"):
            operand = getattr(matmul, side)
            if operand is not None and operand.tile is not None:
                raise NotImplementedError(
                    f"{name}.{side} has tiles of {operand.tile}, but a convolution has one scale per example, per "
                    "output feature or per tensor: leave the tile out, and choose a format without tiles of its own"
                )
            if operand is not None and operand.dequant == "other":
                raise NotImplementedError(
                    f"{name}.{side} moves its scale into the other operand, which has no such axis in a convolution: "
                    "use dequant='output' or 'input'"
                )
