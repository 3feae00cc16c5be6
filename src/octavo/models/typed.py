"""Operations that must be told where their result lies, on a mesh whose axes are explicit: it is part of its type."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from octavo import _sharding
from octavo._typing import Array, Float, Shaped


def product_sharding(x: Array, matrix: Array, columns: int = -1) -> NamedSharding | None:
    """Where the product of rows with a matrix is to lie: as the rows, and as the `columns` of the matrix, as far as the
    rows leave them devices. None where the compiler chooses."""
    mesh = _mesh(x, matrix)
    if mesh is None:
        return None
    rows = _parts(x)[:-1]
    taken = {name for part in rows for name in _sharding.names(part)}
    kept = tuple(name for name in _sharding.names(_parts(matrix)[columns]) if name not in taken)
    return NamedSharding(mesh, PartitionSpec(*rows, kept or None))


def look_up(table: Float[Array, "count size"], tokens: Shaped[Array, "*batch"]) -> Float[Array, "*batch size"]:
    """Rows of a table, which lie where the tokens do.

    One beyond the table is NaN, which is noticed; the nearest row would not be.
    """
    mesh = _mesh(table, tokens)
    if mesh is None:
        return jnp.take(table, tokens, axis=0, mode="fill")
    where = NamedSharding(mesh, PartitionSpec(*_parts(tokens), None))
    return table.at[tokens].get(mode="fill", out_sharding=where)


def by_the_compiler(module: nnx.Module, x: Array) -> tuple[Array, Array]:
    """A module's result for `x`, which lies as `x` does, and a number; in between, the compiler chooses."""
    where = _sharding.explicit(x)
    if where is None:
        return module(x)  # pyrefly: ignore
    graph, params = nnx.split(module)
    run: Any = jax.sharding.auto_axes(
        lambda params, x: nnx.merge(graph, params)(x), out_sharding=(where.spec, PartitionSpec())
    )
    return run(params, x)


def _mesh(*arrays: Array) -> Any:
    """The mesh of arrays of which one at least has its sharding in its type."""
    return next((where.mesh for x in arrays if (where := _sharding.explicit(x)) is not None), None)


def _parts(x: Array) -> tuple[Any, ...]:
    where = _sharding.explicit(x)
    return (None,) * x.ndim if where is None else _sharding.partitions(where, x.ndim)
