"""Drop-in matmuls: the signatures of jax.lax and jax.numpy, with QArrays as operands or a config to quantize by."""

from typing import Any

import jax
import jax.numpy as jnp

from octavo._typing import Array, DTypeLike, PRNGKeyArray
from octavo.ops.config import DotConfig
from octavo.ops.dims import Dims
from octavo.ops.dot import Call, quantized_dot
from octavo.ops.factor import Factor
from octavo.ops.multiply import describe, multiply
from octavo.ops.training import Scaling, trackers_of
from octavo.qarray import QArray


def dot_general(
    lhs: Factor,
    rhs: Factor,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    *,
    config: DotConfig | None = None,
    key: PRNGKeyArray | None = None,
    scaling: Scaling | None = None,
) -> Array:
    """`jax.lax.dot_general` in low precision.

    Operands that are QArrays are multiplied as they are, in any mix with arrays. With a `config`, float operands are
    quantized here, and so are the two gradients. `key` drives stochastic rounding; `scaling` holds ranges that come
    from outside: bounds, or tracker states, whose gradient is the updated state.

    >>> import octavo
    >>> x, w = jnp.ones((2, 4)), jnp.eye(4)
    >>> octavo.dot_general(x, w, (((1,), (0,)), ((), ())), config=octavo.DotConfig.qt("int8")).shape
    (2, 4)
    """
    dims = Dims.of(dimension_numbers, lhs.ndim, rhs.ndim)
    dtype = result_dtype(lhs, rhs, preferred_element_type)
    if config is None:
        return multiply(lhs, rhs, dims, dtype=dtype, precision=precision, out_sharding=out_sharding)
    if isinstance(lhs, QArray) or isinstance(rhs, QArray):
        raise TypeError("a config quantizes float operands; QArrays are quantized already: leave the config out")
    return quantized_dot(lhs, rhs, key, scaling or {}, Call(dims, config, dtype, precision, out_sharding))


def dot(
    a: Factor,
    b: Factor,
    *,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    config: DotConfig | None = None,
    key: PRNGKeyArray | None = None,
    scaling: Scaling | None = None,
) -> Array:
    """`jax.numpy.dot` in low precision: the last axis of `a` with the second to last of `b`.

    >>> import octavo
    >>> q = octavo.quantize(jnp.eye(3), "int8")
    >>> dot(jnp.arange(3.0), q).tolist()
    [0.0, 0.9960784912109375, 1.992156982421875]
    """
    if a.ndim == 0 or b.ndim == 0:
        raise TypeError("dot of a scalar is a product: multiply instead, or dequantize first")
    contract = ((a.ndim - 1,), (max(0, b.ndim - 2),))
    return dot_general(
        a,
        b,
        (contract, ((), ())),
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        config=config,
        key=key,
        scaling=scaling,
    )


def init_scaling(config: DotConfig, lhs: Any, rhs: Any, dimension_numbers: Any) -> Scaling:
    """The first state of every tracker of a config, and of what gradients lose, for operands of these shapes."""
    dims = Dims.of(dimension_numbers, len(lhs.shape), len(rhs.shape))
    out = jax.ShapeDtypeStruct(_out_shape(lhs.shape, rhs.shape, dims), jnp.float32)
    dlhs, drhs = dims.gradient(True).dims, dims.gradient(False).dims
    sides = {
        "lhs": (config.fwd.lhs, lhs, dims.lhs_contract, dims.lhs_batch),
        "rhs": (config.fwd.rhs, rhs, dims.rhs_contract, dims.rhs_batch),
        "dlhs": (config.dlhs.lhs, out, dlhs.lhs_contract, dlhs.lhs_batch),
        "drhs": (config.drhs.lhs, out, drhs.lhs_contract, drhs.lhs_batch),
    }
    state = {}
    for name, tracker in trackers_of(config).items():
        operand, x, contract, batch = sides[name]
        assert operand is not None
        how = operand.quantizer(len(x.shape), contracting=contract, batch=batch)
        bounds = jax.eval_shape(lambda shape=x.shape, how=how: how.measure(jnp.zeros(shape)))
        state[name] = tracker.init({k: jnp.zeros(v.shape, v.dtype) for k, v in bounds.items()})
    if config.scatter is None:
        return state
    return state | config.scatter.losses(lhs.shape if config.scatter.left else rhs.shape)


def lowering_of(config: DotConfig, lhs: Any, rhs: Any, dimension_numbers: Any) -> str:
    """How the forward product of a config runs, for operands of these shapes: quantized ones, or arrays left alone."""
    dims = Dims.of(dimension_numbers, len(lhs.shape), len(rhs.shape))
    inputs = [
        jax.ShapeDtypeStruct(x.shape, x.dtype) if o is not None and o.dequant == "input" else x
        for o, x in ((config.fwd.lhs, lhs), (config.fwd.rhs, rhs))
    ]
    if not any(isinstance(x, QArray) for x in inputs):
        return "dequantized"
    said = []
    jax.eval_shape(lambda a, b: said.append(describe(a, b, dims, config.lowering)), *inputs)
    return said[0]


def _out_shape(lhs: tuple[int, ...], rhs: tuple[int, ...], dims: Dims) -> tuple[int, ...]:
    kept = [lhs[a] for a in (*dims.lhs_batch, *dims.lhs_remaining)] + [rhs[a] for a in dims.rhs_remaining]
    return tuple(kept)


def result_dtype(lhs: Factor, rhs: Factor, preferred: DTypeLike | None) -> Any:
    """The dtype of a product: the preferred one, or what the operands' values promote to."""
    return jnp.dtype(preferred) if preferred is not None else jnp.promote_types(lhs.dtype, rhs.dtype)
