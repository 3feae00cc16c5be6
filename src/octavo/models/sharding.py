"""Shardings of activations on a mesh, by the logical names of their axes.

`ModelConfig.placement` maps logical names to mesh axes. On a mesh with automatic axes they are constraints for the
compiler; on one with explicit axes the sharding is part of an array's type, and operations need `out_sharding`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from octavo import _sharding
from octavo._typing import Array, Float, Shaped

type Placement = tuple[tuple[str, tuple[str, ...]], ...]

TOKEN_AXES = ("activation_batch", "activation_length")
"""The logical names of the two leading axes of activations."""


def shard_activation[T](placement: Placement, x: T, *names: str | None) -> T:
    """`x` sharded along the mesh axes that `placement` has for its logical axes; unchanged without a placement.

    >>> with jax.set_mesh(jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))):
    ...     shard_activation((("activation_batch", ("fsdp",)),), jnp.ones((4, 2)), "activation_batch", None).shape
    (4, 2)
    """
    if not placement:
        return x
    # Inside a shard_map, its axes are manual: arrays are local shards already.
    manual = set(jax.sharding.get_abstract_mesh().manual_axes)
    rules: dict[Any, tuple[str, ...]] = {name: tuple(a for a in axes if a not in manual) for name, axes in placement}
    spec = PartitionSpec(*(rules.get(name) or None for name in names))
    is_explicit = _sharding.explicit(x) is not None
    return _sharding.reshard_if_explicit(x, spec) if is_explicit else jax.lax.with_sharding_constraint(x, spec)


def mesh_axes(placement: Placement, *names: str | None) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that shard each logical axis of an array: a mesh axis goes to the first one that names it.

    >>> mesh_axes((("exp", ("expert",)), ("mlp_moe", ("expert", "tensor"))), "exp", "mlp_moe")
    (('expert',), ('tensor',))
    """
    rules: dict[Any, tuple[str, ...]] = dict(placement)
    taken = set(jax.sharding.get_abstract_mesh().manual_axes)
    found = []
    for name in names:
        found.append(tuple(axis for axis in rules.get(name, ()) if axis not in taken))
        taken.update(found[-1])
    return tuple(found)


def matmul_sharding(x: Array, matrix: Array, columns: int = -1) -> NamedSharding | None:
    """The output sharding of `x @ matrix` on explicit axes; None where the compiler chooses.

    Rows are sharded as those of `x`, columns as the axis `columns` of the matrix by the mesh axes that remain.
    """
    mesh = _explicit_mesh(x, matrix)
    if mesh is None:
        return None
    rows = _partitions(x)[:-1]
    taken = {name for axes in rows for name in _sharding.names(axes)}
    remaining = tuple(name for name in _sharding.names(_partitions(matrix)[columns]) if name not in taken)
    return NamedSharding(mesh, PartitionSpec(*rows, remaining or None))


def gather_rows(table: Float[Array, "count size"], tokens: Shaped[Array, "*batch"]) -> Float[Array, "*batch size"]:
    """The rows of a table, sharded as the tokens are. An index beyond the table gives NaN, not the nearest row."""
    mesh = _explicit_mesh(table, tokens)
    if mesh is None:
        return jnp.take(table, tokens, axis=0, mode="fill")
    sharding = NamedSharding(mesh, PartitionSpec(*_partitions(tokens), None))
    return table.at[tokens].get(mode="fill", out_sharding=sharding)


def call_auto_sharded(module: nnx.Module, x: Array) -> tuple[Array, Array]:
    """`module(x)`, an array that is sharded as `x` and a scalar, with automatic axes inside."""
    sharding = _sharding.explicit(x)
    if sharding is None:
        return module(x)  # pyrefly: ignore
    graph, params = nnx.split(module)
    run: Any = jax.sharding.auto_axes(
        lambda params, x: nnx.merge(graph, params)(x), out_sharding=(sharding.spec, PartitionSpec())
    )
    return run(params, x)


def _explicit_mesh(*arrays: Array) -> Any:
    """The mesh of the first array whose sharding is part of its type."""
    return next((sharding.mesh for x in arrays if (sharding := _sharding.explicit(x)) is not None), None)


def _partitions(x: Array) -> tuple[Any, ...]:
    sharding = _sharding.explicit(x)
    return (None,) * x.ndim if sharding is None else _sharding.partitions(sharding, x.ndim)
