"""A float row times an integer matrix, as an integer matmul: decoding a token with low-bit weights on CPUs.

Widening an int8 matrix to float32 takes a CPU longer than the matmul itself. Instead the row is split into three int8
digits of base 254, which together are as exact as float32 relative to the row's absmax:

    x = a / 127 * (d0 + d1 / 254 + d2 / 254**2),   |error| <= a * 2**-24,

and the three digits times the matrix are one integer matmul of three rows, exact in int32.
"""

import functools
import math

import jax
import jax.numpy as jnp

from octavo._typing import Array, Float
from octavo.ops.lowerings.xla import float_dot, integer_dot, scale_result
from octavo.ops.operands import Dims, DotProblem

MOST_ROWS = 2


class SplitFloat:
    """A dot of one or two float rows with symmetric integer codes."""

    def reason(self, p: DotProblem) -> str | None:
        if p.split is None or p.split.left.format or not p.split.right.is_int8 or p.split.right.has_zero_point:
            return "it splits a float operand that meets symmetric integer codes, in the order of activation and weight"
        if p.split.dims != p.dims:
            return "it knows no tiles along the contraction"
        rows = math.prod(p.lhs.shape[a] for a in p.dims.lhs_remaining)
        if p.dims.lhs_batch or rows not in range(1, MOST_ROWS + 1) or math.prod(p.lhs.shape) == 0:
            return f"it is for 1 to {MOST_ROWS} rows without batch axes, got an operand of shape {p.lhs.shape}"
        return None

    def run(self, p: DotProblem) -> Array:
        assert p.split is not None
        return scale_result(p, p.split, digit_dot(p.operands[0], p.split.right.integers(), p.dims), is_codes=True)  # pyrefly: ignore

    def describe(self, p: DotProblem) -> str:
        assert p.split is not None
        return f"exact in {p.split.kind}"


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def digit_dot(x: Float[Array, "..."], codes: Array, dims: Dims) -> Float[Array, "..."]:
    """The float32 dot of a float operand with few rows and int8 codes; by digits on CPUs."""
    return jax.lax.platform_dependent(
        x, codes, cpu=functools.partial(_by_digits, dims=dims), default=functools.partial(_widened, dims=dims)
    )


@digit_dot.defjvp
def _digit_dot_jvp(dims: Dims, primals, tangents):
    # The digits are an implementation detail, not a rounding: the dot is linear in x, and codes have no tangent.
    (x, codes), (dx, _) = primals, tangents
    return digit_dot(x, codes, dims), _widened(dx, codes, dims=dims)


def _widened(x: Array, codes: Array, *, dims: Dims) -> Array:
    return float_dot(x, codes.astype(x.dtype), dims)


def _by_digits(x: Array, codes: Array, *, dims: Dims) -> Array:
    kept = [x.shape[a] for a in dims.lhs_remaining]
    depth = [x.shape[a] for a in dims.lhs_contract]
    x = jnp.transpose(x.astype(jnp.float32), (*dims.lhs_remaining, *dims.lhs_contract))
    x = x.reshape(math.prod(kept), math.prod(depth))
    absmax = jnp.max(jnp.abs(x), axis=1, keepdims=True)
    rest = x * (127 / jnp.where(absmax == 0, 1, absmax))
    digits = []
    for _ in range(3):
        digits.append(jnp.round(rest))
        rest = (rest - digits[-1]) * 254
    stacked = jnp.concatenate(digits).astype(jnp.int8).reshape(3 * math.prod(kept), *depth)
    axes = tuple(range(1, 1 + len(depth)))
    flat = Dims(stacked.ndim, dims.rhs_ndim, axes, dims.rhs_contract)
    sums = integer_dot(stacked, codes, flat, lowering="rows").astype(jnp.float32)
    sums = sums.reshape(3, math.prod(kept), *sums.shape[1:])
    scale = (absmax * (1 / 127)).reshape(-1, *(1 for _ in sums.shape[2:]))
    return ((sums[0] + (sums[1] + sums[2] * (1 / 254)) * (1 / 254)) * scale).reshape(*kept, *sums.shape[2:])
