"""What the kernels have in common: how two blocks multiply and add up, and what a block is told of its rows."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from octavo._typing import Array

FLOAT8 = tuple(map(jnp.dtype, (jnp.float8_e4m3fn, jnp.float8_e5m2)))
_FLOATS = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float32)))
_INTEGERS = tuple(map(jnp.dtype, (jnp.int8, jnp.int4)))
# So many products of two int8 have a sum that float32 holds exactly.
EXACT = 2**24 // 2**14


def type_refusal(lhs: Any, rhs: Any) -> str | None:
    """Why blocks of these types cannot be multiplied; None if they can."""
    for name, dtype in (("lhs", jnp.dtype(lhs)), ("rhs", jnp.dtype(rhs))):
        if dtype not in (*FLOAT8, *_FLOATS, *_INTEGERS):
            return f"the kernel takes int8, int4, float8, bfloat16 and float32, not an {name} of {dtype}"
    return None


def accumulator(lhs: Any, rhs: Any) -> np.dtype:
    """int32 for two operands of integers, else float32."""
    return jnp.dtype(jnp.int32 if all(jnp.dtype(x) in _INTEGERS for x in (lhs, rhs)) else jnp.float32)


def native(lhs: Any, rhs: Any) -> bool:
    """Whether the TPU that is there, or is lowered for, multiplies two operands of eight bits as they are.

    Where none is known, integers are taken to be and float8 not: the first TPUs with int8 had no float8.
    """
    integers = accumulator(lhs, rhs) == jnp.int32
    types = (jnp.int8, jnp.int8) if integers else (lhs, rhs)
    return pltpu.get_tpu_info().is_matmul_supported(*types) if pltpu.is_tpu_device() else integers


def multiplied(lhs: Any, rhs: Any, *, native: bool) -> np.dtype | None:
    """The type in which both operands are multiplied, exact for the values of either; None: as they are."""
    lhs, rhs = jnp.dtype(lhs), jnp.dtype(rhs)
    if accumulator(lhs, rhs) == jnp.int32 and native:
        return jnp.dtype(jnp.int8)
    if lhs in FLOAT8 and rhs in FLOAT8 and native:
        return None
    return jnp.dtype(jnp.float32 if jnp.float32 in (lhs, rhs) else jnp.bfloat16)


def block_dot(lhs: Array, rhs: Array, contract: tuple[int, int], *, wide: np.dtype | None, precision: Any) -> Array:
    """The product of two blocks, in int32 or float32, of integers exact also where it is floats that multiply."""
    out = accumulator(lhs.dtype, rhs.dtype)
    if wide is not None:
        lhs, rhs = widened(lhs, wide), widened(rhs, wide)
    numbers = (((contract[0],), (contract[1],)), ((), ()))
    dot = functools.partial(lax.dot_general, dimension_numbers=numbers, precision=precision)
    if out == jnp.float32 or wide == jnp.int8:
        return dot(lhs, rhs, preferred_element_type=out)
    depth = lhs.shape[contract[0]]
    cut = lambda x, axis, at: lax.slice_in_dim(x, at, min(at + EXACT, depth), axis=axis)  # noqa: E731
    parts = [(cut(lhs, contract[0], at), cut(rhs, contract[1], at)) for at in range(0, depth, EXACT)]
    exact = (dot(x, y, preferred_element_type=jnp.float32).astype(jnp.int32) for x, y in parts)
    return functools.reduce(jnp.add, exact)


def over_steps(part: Array, step: Any, steps: int, sums: Sequence[Any], write: Callable[[Array], None]) -> None:
    """Write the sum of the parts of all steps of depth, once the last is there; with one step, `sums` has no block."""
    if steps == 1:
        return write(part)
    (sum_ref,) = sums

    @pl.when(step == 0)
    def _():
        sum_ref[...] = part

    @pl.when(step > 0)
    def _():
        sum_ref[...] += part

    @pl.when(step == steps - 1)
    def _():
        write(sum_ref[...])


def widened(x: Array, dtype: np.dtype) -> Array:
    """The values in another type that holds them exactly."""
    if x.dtype == dtype:
        return x
    return x.astype(jnp.float32).astype(dtype) if x.dtype in _INTEGERS and dtype == jnp.bfloat16 else x.astype(dtype)


def masked(x: Array, keep: Array) -> Array:
    """Zero where not kept, whatever is there: a product with zero would let NaN through."""
    return jnp.where(keep, x, jnp.zeros_like(x))


def typed(shape: tuple[int, ...], dtype: Any, *like: Array) -> jax.ShapeDtypeStruct:
    """The type of an output: under shard_map, varying over the axes over which any of the operands does."""
    varying = frozenset().union(*(jax.typeof(x).mat.varying for x in like))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.sharding.ManualAxisType(varying=varying))
