"""Block-scaled dots of GPUs: `lax.scaled_dot` of mxfp8, mxfp4 and nvfp4 codes with their scales.

The device multiplies codes and scales of blocks along the contraction in one instruction (Blackwell), where other
platforms dequantize. Codes times scales are exact in bfloat16, so both compute the same sums of the same products.
"""

import math

import jax
import jax.numpy as jnp

from octavo import _sharding
from octavo._typing import Array
from octavo.numerics import BlockFormat
from octavo.ops.lowerings.cpu_ffi import is_partitioned
from octavo.ops.lowerings.xla import Xla
from octavo.ops.operands import Axes, DotProblem, element
from octavo.qarray import QArray

_ELEMENTS = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")
_SCALES = {("float8_e8m0fnu", 32), ("float8_e4m3fn", 16)}


class BlockScaled:
    """Dots of two operands in block formats. "auto" is `lax.scaled_dot` on NVIDIA GPUs only, "scaled" everywhere."""

    def reason(self, p: DotProblem) -> str | None:
        """Why it does not apply; None if it does."""
        if not hasattr(jax.lax, "scaled_dot"):
            return "this version of JAX has no lax.scaled_dot"
        for x, contract in zip(p.operands, (p.dims.lhs_contract, p.dims.rhs_contract), strict=True):
            if not isinstance(x, QArray) or not isinstance(x.qtype, BlockFormat):
                return "it multiplies two operands in block formats: mxfp8, mxfp4 or nvfp4"
            fmt = x.qtype
            if element(x).storage.name not in _ELEMENTS or (x.scale.dtype.name, fmt.tile) not in _SCALES:
                return f"the hardware has no block-scaled dot of {fmt.name} with scales in {x.scale.dtype.name}"
            if not contract or x.tile_shape[contract[-1]] != fmt.tile or x.shape[contract[-1]] % fmt.tile:
                return f"blocks of {fmt.tile} do not lie along the last contracted axis"
            if any(x.tile_shape[a] != 1 for a in contract[:-1]):
                return "only the last contracted axis may have blocks"
            if x.outer_scale is not None and x.outer_scale.size != 1:
                return "the outer scale is one for the tensor"
        lhs, rhs = (x for x in p.operands if isinstance(x, QArray))
        if (lhs.qtype.bits, lhs.qtype.tile, lhs.scale.dtype) != (rhs.qtype.bits, rhs.qtype.tile, rhs.scale.dtype):
            return "both operands have elements of the same width, the same blocks and the same dtype of scales"
        if (
            is_partitioned()
            or p.options.out_sharding is not None
            or any(map(_sharding.explicit, (lhs.qvalue, rhs.qvalue)))
        ):
            return "XLA partitions no block-scaled dot: use jax.shard_map, or one device"
        return None

    def run(self, p: DotProblem) -> Array:
        leaves, tree = jax.tree.flatten((p.lhs, p.rhs))

        def problem(*leaves: Array) -> DotProblem:
            lhs, rhs = jax.tree.unflatten(tree, leaves)
            return DotProblem(lhs, rhs, p.dims, p.options)

        scaled = lambda *leaves: scaled_dot(problem(*leaves))  # noqa: E731
        if p.options.lowering == "scaled":
            return scaled(*leaves)
        return jax.lax.platform_dependent(
            *leaves, cuda=scaled, default=lambda *leaves: Xla("auto").run(problem(*leaves))
        )

    def describe(self, p: DotProblem) -> str:
        return "block-scaled" if p.options.lowering == "scaled" else "dequantized; block-scaled on NVIDIA GPUs"


def scaled_dot(p: DotProblem) -> Array:
    """`lax.scaled_dot` of both operands as [batch, rows, contracted]."""
    (lhs, rhs), dims = p.operands, p.dims
    assert isinstance(lhs, QArray)
    assert isinstance(rhs, QArray)
    left, left_scale = _arrange(lhs, batch=dims.lhs_batch, remaining=dims.lhs_remaining, contract=dims.lhs_contract)
    right, right_scale = _arrange(rhs, batch=dims.rhs_batch, remaining=dims.rhs_remaining, contract=dims.rhs_contract)
    numbers = (((2,), (2,)), ((0,), (0,)))
    out = jax.lax.scaled_dot(
        left,
        right,
        lhs_scale=left_scale,
        rhs_scale=right_scale,
        dimension_numbers=numbers,
        preferred_element_type=jnp.float32,
    )
    for x in (lhs, rhs):
        out = out if x.outer_scale is None else out * x.outer_scale.astype(jnp.float32).reshape(())
    sizes = [lhs.shape[a] for a in (*dims.lhs_batch, *dims.lhs_remaining)] + [rhs.shape[a] for a in dims.rhs_remaining]
    return out.reshape(sizes).astype(p.options.dtype)


def _arrange(x: QArray, *, batch: Axes, remaining: Axes, contract: Axes) -> tuple[Array, Array]:
    """Codes and scales as [batch, remaining, contracted]; blocks that span other axes have their scale repeated."""
    order, scale = (*batch, *remaining, *contract), x.scale
    for axis in (*batch, *remaining):
        scale = _sharding.repeat(scale, x.shape[axis] // scale.shape[axis], axis)
    lead = [math.prod(x.shape[a] for a in axes) for axes in (batch, remaining)]
    codes, scale = (jnp.transpose(part, order).reshape(*lead, -1) for part in (x.qvalue, scale))
    return codes, scale
