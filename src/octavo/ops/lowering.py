"""How a low-precision dot runs on a backend.

* "plain" hands `lax.dot_general` to XLA as it is.
* "rows" brings an integer dot into the one form that XLA's CPU backend runs fast (jax 0.12): the left operand contracts
  its last axis, both lie in memory row by row, and there are at least eight rows. Other forms are several times slower:
  `benchmarks/matmul.py` shows it in the `drhs` of libraries that do not do this. A layout constraint keeps XLA from
  folding the transposition back into the dot.
* "kernel" is a native kernel (`octavo.kernels`), for a few rows and a large matrix; forced, it says what it lacks.
* "auto" is "kernel" on CPUs where it can be, or "rows", and "plain" elsewhere, decided when the program is lowered for
  a platform.

All give the same bits for integers.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from octavo import _sharding, kernels
from octavo._typing import Array
from octavo.numerics import nearest_names
from octavo.ops.dims import Dims

LOWERINGS = ("auto", "plain", "rows", "kernel")


# More rows are worth XLA's own product; for one of floats with codes, a matrix that is dequantized for it.
MOST_ROWS, MOST_FLOAT_ROWS = 16, 64
# A smaller matrix is in the cache, and its product done before a custom call begins.
FEWEST_WEIGHTS = 1 << 15


def lowerings() -> tuple[str, ...]:
    """The names by which a lowering can be forced."""
    return LOWERINGS


def check_lowering(name: str, *, kernel: bool = True) -> None:
    """Refuse an unknown lowering, and "kernel" for an operation without one."""
    if name not in LOWERINGS:
        raise ValueError(f"lowering is one of {LOWERINGS}, got {name!r}: {nearest_names(name, LOWERINGS)}")
    if name == "kernel" and not kernel:
        raise ValueError("lowering='kernel': ragged products have no kernel; lowering='auto' takes another way")


def layout_refusal(shape: tuple[int, ...], dims: Dims, *, most: int = MOST_ROWS) -> str | None:
    """Why a native kernel cannot run a product with these axes and a left operand of this shape; None if it can."""
    if not kernels.available():
        return kernels.status()
    if _is_cut():
        return "XLA cannot cut the kernel over the devices of the mesh: use jax.shard_map"
    rows = math.prod(shape[a] for a in dims.lhs_remaining)
    if dims.lhs_batch:
        return "the kernel has no batch axes"
    if not 0 < rows <= most or math.prod(shape) == 0:
        return f"the kernel is for 1 to {most} rows, got an operand of shape {shape} with {rows}"
    if is_transposed(dims) is None:
        return "the kernel contracts the first axes of a matrix or its last ones, in order"
    return None


def _is_cut() -> bool:
    """Whether what is traced here will be cut over the devices of the current mesh. Without a mesh nobody knows."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(
        size > 1 and kind != AxisType.Manual for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    )


def is_transposed(dims: Dims) -> bool | None:
    """False for a matrix [K, N], True for [N, K], None for any other order of axes."""
    every = tuple(range(dims.rhs_ndim))
    if dims.rhs_contract + dims.rhs_remaining == every:
        return False
    return True if dims.rhs_remaining + dims.rhs_contract == every else None


def is_large(shape: tuple[int, ...]) -> bool:
    """Whether a matrix is worth a custom call."""
    return math.prod(shape) >= FEWEST_WEIGHTS


def materialize[T](tree: T) -> T:
    """The arrays, written to memory in their own order where the backend is a CPU: nothing is fused across this."""
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(leaves) if x.size > 1 and not is_explicit(x)]
    if places:
        written = jax.lax.platform_dependent(
            *(leaves[i] for i in places), cpu=lambda *xs: tuple(map(_by_rows, xs)), default=lambda *xs: xs
        )
        for i, x in zip(places, written, strict=True):
            leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


def _by_rows(x: Array) -> Array:
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def integer_dot(lhs: Array, rhs: Array, dims: Dims, *, lowering: str = "auto", out_sharding: Any = None) -> Array:
    """An int8 x int8 -> int32 dot."""
    plain = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=dims.numbers,
        preferred_element_type=jnp.int32,
        out_sharding=out_sharding,
    )
    is_placed = out_sharding is not None or is_explicit(lhs) or is_explicit(rhs)
    refusal = "the kernel knows no shardings" if is_placed else layout_refusal(lhs.shape, dims)
    if lowering == "kernel" and refusal is not None:
        raise ValueError(f"lowering='kernel': {refusal}; lowering='auto' takes another way where it must")
    if lowering == "plain" or is_placed:
        return plain(lhs, rhs)
    rows = functools.partial(_rows_dot, dims=dims)
    kernel = functools.partial(_kernel_dot, dims=dims)
    if lowering == "kernel" or (lowering == "auto" and refusal is None and is_large(rhs.shape)):
        return jax.lax.platform_dependent(lhs, rhs, cpu=kernel, default=plain)
    if lowering == "rows":
        return rows(lhs, rhs)
    return jax.lax.platform_dependent(lhs, rhs, cpu=rows, default=plain)


def _kernel_dot(lhs: Array, rhs: Array, *, dims: Dims) -> Array:
    left = [lhs.shape[a] for a in dims.lhs_remaining]
    right = [rhs.shape[a] for a in dims.rhs_remaining]
    transposed = bool(is_transposed(dims))
    lhs = jnp.transpose(lhs, (*dims.lhs_remaining, *dims.lhs_contract)).reshape(math.prod(left), -1)
    rhs = rhs.reshape((math.prod(right), -1) if transposed else (-1, math.prod(right)))
    return kernels.int_matvec(lhs, rhs, transposed=transposed).reshape(*left, *right)


def _rows_dot(lhs: Array, rhs: Array, *, dims: Dims) -> Array:
    batch = [lhs.shape[a] for a in dims.lhs_batch]
    left = [lhs.shape[a] for a in dims.lhs_remaining]
    right = [rhs.shape[a] for a in dims.rhs_remaining]
    depth = math.prod(lhs.shape[a] for a in dims.lhs_contract)
    lhs = _arrange(lhs, (*dims.lhs_batch, *dims.lhs_remaining, *dims.lhs_contract))
    lhs = lhs.reshape(math.prod(batch), math.prod(left), depth)
    # The right operand may have its contracted axes first or last; it is moved only if it has neither.
    last = (*dims.rhs_batch, *dims.rhs_remaining, *dims.rhs_contract)
    first = (*dims.rhs_batch, *dims.rhs_contract, *dims.rhs_remaining)
    is_last = last == tuple(range(rhs.ndim))
    rhs = rhs if is_last else _arrange(rhs, first)
    columns = math.prod(right)
    rhs = rhs.reshape(math.prod(batch), columns, depth) if is_last else rhs.reshape(math.prod(batch), depth, columns)
    rows = lhs.shape[1]
    swapped = rows < 8 and is_last and math.prod(batch) == 1
    if rows < 8:
        # Few rows fall off the fast path to a tenth of float32's speed; empty ones cost less.
        lhs = jnp.pad(lhs, ((0, 0), (0, (4 if swapped and rows <= 4 else 8) - rows), (0, 0)))
    if swapped:
        # A matrix that lies by rows need not be packed when it is the left operand.
        numbers = (((1,), (1,)), ((), ()))
        out = jax.lax.dot_general(rhs[0], lhs[0], numbers, preferred_element_type=jnp.int32).T[None]
    elif math.prod(batch) == 1:
        numbers = (((1,), (1 if is_last else 0,)), ((), ()))
        out = jax.lax.dot_general(lhs[0], rhs[0], numbers, preferred_element_type=jnp.int32)[None]
    else:
        numbers = (((2,), (2 if is_last else 1,)), ((0,), (0,)))
        out = jax.lax.dot_general(lhs, rhs, numbers, preferred_element_type=jnp.int32)
    return out[:, :rows].reshape(*batch, *left, *right)


def _arrange(x: Array, order: tuple[int, ...]) -> Array:
    return x if order == tuple(range(x.ndim)) else _by_rows(jnp.transpose(x, order))


def float_dot(
    lhs: Array, rhs: Array, dims: Dims, *, precision: Any = None, out_sharding: Any = None, accumulator: Any = None
) -> Array:
    """A dot of low-precision floats, or of the floats that stand for them, accumulated in float32 unless told.

    CPUs multiply float32 fastest and emulate the rest, so there the operands are widened first: the products are exact
    either way.
    """
    dot = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=dims.numbers,
        precision=precision,
        preferred_element_type=jnp.dtype(accumulator or jnp.float32),
        out_sharding=out_sharding,
    )
    if lhs.dtype == rhs.dtype == jnp.float32:
        return dot(lhs, rhs)

    def widened(lhs: Array, rhs: Array) -> Array:
        return dot(lhs.astype(jnp.float32), rhs.astype(jnp.float32))

    return jax.lax.platform_dependent(lhs, rhs, cpu=widened, default=dot)


def is_explicit(x: Array) -> bool:
    """Whether the array's sharding is part of its type, in which case reshapes are not ours to choose."""
    return _sharding.explicit(x) is not None


def explicit_shardings(*operands: Array) -> tuple[Any, ...]:
    """The shardings that are part of the operands' types: their gradients have them too, and must be told.

    None for all of them outside of explicit meshes. An operand that is on no mesh is replicated on that of the others.
    """
    mesh = next((jax.typeof(x).sharding.mesh for x in operands if is_explicit(x)), None)
    if mesh is None:
        return (None,) * len(operands)
    everywhere = lambda x: NamedSharding(mesh, PartitionSpec(*(None,) * x.ndim))  # noqa: E731
    return tuple(jax.typeof(x).sharding if is_explicit(x) else everywhere(x) for x in operands)
