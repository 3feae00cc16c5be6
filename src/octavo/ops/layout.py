"""Memory layouts and shardings for lowerings."""

import math
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from octavo import _sharding
from octavo._typing import Array
from octavo.ops.dims import Dims

# A smaller matrix fits in the cache, and its matmul takes less time than starting a custom call.
FEWEST_WEIGHTS = 1 << 15


def is_partitioned() -> bool:
    """Whether the traced program will be partitioned over devices, judging by the current mesh."""
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
    """Whether a matrix is large enough for a custom call to pay off."""
    return math.prod(shape) >= FEWEST_WEIGHTS


def materialize[T](tree: T) -> T:
    """Materialize arrays in row-major order on CPUs, as a fusion barrier; a no-op on other platforms."""
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(leaves) if x.size > 1 and not is_explicit(x)]
    if places:
        written = jax.lax.platform_dependent(
            *(leaves[i] for i in places), cpu=lambda *xs: tuple(map(by_rows, xs)), default=lambda *xs: xs
        )
        for i, x in zip(places, written, strict=True):
            leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


def by_rows(x: Array) -> Array:
    """Constrain an array to row-major memory layout."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def is_explicit(x: Array) -> bool:
    """Whether the array's sharding is part of its type, which restricts how it may be reshaped."""
    return _sharding.explicit(x) is not None


def explicit_shardings(*operands: Array) -> tuple[Any, ...]:
    """The explicit shardings of the operands, which their gradients need as `out_sharding`.

    All are None outside of explicit meshes. An operand on no mesh is replicated on the mesh of the others.
    """
    mesh = next((jax.typeof(x).sharding.mesh for x in operands if is_explicit(x)), None)
    if mesh is None:
        return (None,) * len(operands)
    everywhere = lambda x: NamedSharding(mesh, PartitionSpec(*(None,) * x.ndim))  # noqa: E731
    return tuple(jax.typeof(x).sharding if is_explicit(x) else everywhere(x) for x in operands)
