"""The codes, scales and zero points of a matmul operand, in the form that lowerings use."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from octavo import _sharding
from octavo._typing import Array
from octavo.numerics import BlockFormat, FloatFormat, Format, IntFormat
from octavo.qarray import QArray, shardings

type ArrayOrQArray = Array | QArray


def unpack(x: ArrayOrQArray) -> ArrayOrQArray:
    """Unpack an operand, remove its padding, and make it `reduced` over no mesh axis."""
    if not isinstance(x, QArray):
        return _sharding.without_reduced(x)
    x = x._map(_sharding.without_reduced).unpack()
    for axis, _ in x.padding:
        # Slicing to the unpadded length expands the scale of a padded axis to one per value.
        index = [slice(None)] * x.ndim
        index[axis] = slice(0, x.shape[axis])
        x = x[tuple(index)]
    return x


def accumulation_kind(lhs: ArrayOrQArray, rhs: ArrayOrQArray) -> Any:
    """ "int" for an integer dot, "native" for float8, or the dtype that holds all values exactly; None if none does."""
    if isinstance(lhs, QArray) and isinstance(rhs, QArray):
        if is_integer(lhs) and is_integer(rhs):
            return "int"
        if _native_float8(lhs) and _native_float8(rhs):
            return "native"
    carriers = [_carrier(x) for x in (lhs, rhs)]
    return None if carriers[0] is None or carriers[1] is None else wider(carriers[0], carriers[1])


def is_weight_only(lhs: ArrayOrQArray, rhs: ArrayOrQArray) -> bool:
    """Whether `lhs` is a float array (activation) and `rhs` symmetric integer codes (weight)."""
    return not isinstance(lhs, QArray) and isinstance(rhs, QArray) and is_integer(rhs) and rhs.zero_point is None


def wider(a: np.dtype, b: np.dtype) -> np.dtype:
    """The float dtype that holds the values of both, independent of JAX's promotion mode."""
    if a == b:
        return a
    return np.dtype(np.float64 if np.float64 in (a, b) else np.float32)


def dequantize(lhs: ArrayOrQArray, rhs: ArrayOrQArray) -> tuple[Array, Array]:
    """Both operands as floats of one dtype."""
    wide = [x.dequantize() if isinstance(x, QArray) else x for x in (lhs, rhs)]
    common = wider(wide[0].dtype, wide[1].dtype)
    return wide[0].astype(common), wide[1].astype(common)


def shard_map_operand(
    mesh: Any, x: ArrayOrQArray, spec: PartitionSpec, reduced: int | None = None
) -> tuple[ArrayOrQArray, Any]:
    """An operand to pass to a `shard_map`, and the partition specs of its arrays.

    Codes are dequantized first if sharding would split their tiles, or if scales differ between devices along the axis
    `reduced`, over which results are summed before they are scaled.
    """
    if not isinstance(x, QArray):
        return x, spec
    specs = shardings(x, spec)
    there = [where.spec for where in jax.tree.leaves(shardings(x, NamedSharding(mesh, spec)))]
    fits = jax.tree.leaves(specs) == there
    scales = [part for part in (x.scale, x.zero_point, x.outer_scale) if part is not None]
    alike = reduced is None or all(part.shape[reduced] == 1 for part in scales)
    return (x, specs) if fits and alike and not x.padding else (x.dequantize(), spec)


def element(q: QArray) -> Format:
    """The format of single codes; the element format of a block format."""
    return q.qtype.element if isinstance(q.qtype, BlockFormat) else q.qtype


def stored_shape(q: QArray) -> tuple[int, ...]:
    """The shape with padding."""
    shape = list(q.shape)
    for axis, count in q.padding:
        shape[axis] += count
    return tuple(shape)


def integers(q: QArray) -> Array:
    """Codes as int8, without subtracting the zero point."""
    fmt, codes = element(q), q.qvalue
    if not fmt.signed and fmt.bits == 8:
        codes = (codes ^ jnp.uint8(128)).astype(jnp.int8)  # shifted by -128, as are the zero points below
    codes = codes.astype(jnp.int8)
    return codes if fmt.has_zero else 2 * codes + jnp.int8(1)


def zero_point(x: ArrayOrQArray) -> Array | None:
    """The zero point of `integers`, as int32."""
    if not isinstance(x, QArray) or x.zero_point is None:
        return None
    fmt = element(x)
    return x.zero_point.astype(jnp.int32) - (128 if not fmt.signed and fmt.bits == 8 else 0)


def values(x: ArrayOrQArray, kind: Any) -> Array:
    """Codes decoded to floats, exactly and without scales."""
    if not isinstance(x, QArray):
        return x.astype(kind)
    if kind == "native":
        return x.qvalue
    exact = x.qtype.decode(x.qvalue)
    if x.zero_point is not None:
        ones = QArray(x.qvalue, jnp.ones_like(x.scale, jnp.float32), x.zero_point, x.qtype)
        exact = ones.dequantize(jnp.float32)
    return exact.astype(kind)


def scale(x: ArrayOrQArray, *, codes: bool) -> Array | None:
    """The scale in float32: of the integer codes if `codes`, else of their decoded values."""
    if not isinstance(x, QArray):
        return None
    scale = x.scale.astype(jnp.float32)
    if x.outer_scale is not None:
        scale = scale * x.outer_scale.astype(jnp.float32)
    fmt = element(x)
    if codes and isinstance(fmt, IntFormat):
        scale = scale * (fmt.unit * (1.0 if fmt.has_zero else 0.5))
    return scale


def is_integer(q: QArray) -> bool:
    """Whether the codes are integers that fit in eight bits."""
    fmt = element(q)
    return isinstance(fmt, IntFormat) and fmt.bits <= (8 if fmt.has_zero else 7)


def _native_float8(q: QArray) -> bool:
    fmt = element(q)
    return isinstance(fmt, FloatFormat) and fmt.dtype is not None and fmt.bits == 8


def _carrier(x: ArrayOrQArray) -> np.dtype | None:
    if not isinstance(x, QArray):
        return jnp.dtype(x.dtype) if x.dtype in (jnp.bfloat16, jnp.float16, jnp.float32) else None
    if x.zero_point is not None:
        return jnp.dtype(jnp.bfloat16) if x.qtype.bits <= 8 else jnp.dtype(jnp.float32)
    carrier = x.qtype.carrier
    return jnp.dtype(jnp.bfloat16) if carrier == np.int8 else carrier
