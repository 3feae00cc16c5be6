"""Weights that lie in parts on several devices, brought together in low precision."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from octavo import _sharding
from octavo.ops.factor import Factor
from octavo.qarray import QArray


@dataclasses.dataclass(frozen=True)
class Gather:
    """Where the weight of a product lies, and where the product wants it.

    Left to itself, XLA gathers a weight wherever that suits it: as the wide floats that the codes are made of or are
    widened to, as well. Told so, it sends codes and scales. What is saved for the gradient stays in parts, and is
    gathered once more. `left`: the weight is the left operand.
    """

    stored: NamedSharding
    used: NamedSharding
    left: bool = False

    def keep(self, x: Factor) -> Factor:
        """The codes of a weight, in parts."""
        return self._placed(x, self.stored)

    def bring(self, x: Factor) -> Factor:
        """The codes of a weight, brought together."""
        return self._placed(self._placed(x, self.stored), self.used)

    def _placed(self, x: Factor, where: NamedSharding) -> Factor:
        if not isinstance(x, QArray):
            return x
        return x._map(lambda part: _constrained(part, where))


def kept(gather: Gather | None, left: Factor, right: Factor) -> tuple[Factor, Factor]:
    """Both operands, the weight in parts."""
    if gather is None:
        return left, right
    return (gather.keep(left), right) if gather.left else (left, gather.keep(right))


def brought(gather: Gather | None, left: Factor, right: Factor) -> tuple[Factor, Factor]:
    """Both operands, the weight brought together."""
    if gather is None:
        return left, right
    return (gather.bring(left), right) if gather.left else (left, gather.bring(right))


def _constrained(x: Any, where: NamedSharding) -> Any:
    """An array where a sharding says; of axes that are shorter than the weight's, as a scale's, those that divide."""
    parts = (*where.spec, *(None,) * x.ndim)[: x.ndim]
    fitting = [part if size % _ways(where.mesh, part) == 0 else None for part, size in zip(parts, x.shape, strict=True)]
    # The mesh is the current one in a shard_map over some other axes, and where explicit axes are left to XLA for once.
    mesh = jax.sharding.get_abstract_mesh()
    changed = not mesh.empty and (mesh.manual_axes or mesh.axis_types != where.mesh.axis_types)
    sharding = NamedSharding(mesh if changed else where.mesh, PartitionSpec(*fitting))
    if (typed := _sharding.explicit(x)) is not None:
        return sent_as_it_is(x, lambda y: _sharding.placed(y, NamedSharding(typed.mesh, sharding.spec)))
    return sent_as_it_is(x, lambda y: jax.lax.with_sharding_constraint(y, sharding))


def sent_as_it_is(x: Any, send: Callable[[Any], Any]) -> Any:
    """What arrives of an array; float8 goes as bytes, which XLA must not see through.

    Where it has no float8, it would send the wider floats that it computes with.
    """
    if not (jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1):
        return send(x)
    bits = jnp.uint4 if jnp.finfo(x.dtype).bits == 4 else jnp.uint8
    codes = jax.lax.bitcast_convert_type(x, bits).astype(jnp.uint8)
    sent = jax.lax.optimization_barrier(send(jax.lax.optimization_barrier(codes)))
    return jax.lax.bitcast_convert_type(sent.astype(bits), x.dtype)


def _ways(mesh: Any, part: Any) -> int:
    return math.prod(mesh.shape[axis] for axis in _sharding.names(part))


def gather_of(stored: NamedSharding, over: tuple[str, ...], *, left: bool) -> Gather | None:
    """How a weight that lies so is gathered over some axes of the mesh; None if it is not cut along any of them."""
    kept = []
    for part in stored.spec:
        rest = tuple(axis for axis in _sharding.names(part) if axis not in over)
        kept.append(None if not rest else rest[0] if len(rest) == 1 else rest)
    used = NamedSharding(stored.mesh, PartitionSpec(*kept))
    return None if tuple(used.spec) == tuple(stored.spec) else Gather(stored, used, left)
