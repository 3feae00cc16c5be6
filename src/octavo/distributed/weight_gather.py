"""Sharded weights, all-gathered as codes."""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from octavo import _sharding
from octavo.distributed.collectives import transfer
from octavo.ops.codes import ArrayOrQArray
from octavo.qarray import QArray


@dataclasses.dataclass(frozen=True)
class WeightGather:
    """The sharding in which the weight of a product is stored, and the one in which the product uses it.

    Left to itself, XLA all-gathers a weight wherever that suits it: also as the wide floats that codes are made of or
    are widened to. With these constraints it gathers codes and scales. The residual stays sharded, and is gathered once
    more. `left`: the weight is the left operand.
    """

    stored: NamedSharding
    used: NamedSharding
    left: bool = False

    def shard_codes(self, x: ArrayOrQArray) -> ArrayOrQArray:
        """The codes of a weight, sharded as the weight is stored."""
        return self._constrain(x, self.stored)

    def all_gather(self, x: ArrayOrQArray) -> ArrayOrQArray:
        """The codes of a weight, sharded as the product uses them."""
        return self._constrain(self._constrain(x, self.stored), self.used)

    def _constrain(self, x: ArrayOrQArray, sharding: NamedSharding) -> ArrayOrQArray:
        return x._map(lambda part: _constrain(part, sharding)) if isinstance(x, QArray) else x


def weight_gather(stored: NamedSharding, axes: tuple[str, ...], *, left: bool) -> WeightGather | None:
    """The all-gather of a weight over some axes of its mesh; None if it is not sharded along any of them."""
    kept = []
    for part in stored.spec:
        rest = tuple(axis for axis in _sharding.names(part) if axis not in axes)
        kept.append(None if not rest else rest[0] if len(rest) == 1 else rest)
    used = NamedSharding(stored.mesh, PartitionSpec(*kept))
    return None if tuple(used.spec) == tuple(stored.spec) else WeightGather(stored, used, left)


def _constrain(x: Any, sharding: NamedSharding) -> Any:
    """An array with this sharding, as far as its axes divide: a scale has shorter axes than its weight."""
    mesh = sharding.mesh
    parts = (*sharding.spec, *(None,) * x.ndim)[: x.ndim]
    devices = [math.prod(mesh.shape[axis] for axis in _sharding.names(part)) for part in parts]
    spec = PartitionSpec(
        *(part if size % count == 0 else None for part, size, count in zip(parts, x.shape, devices, strict=True))
    )
    # The mesh is the current one in a shard_map over some other axes, and where explicit axes are left to XLA for once.
    current = jax.sharding.get_abstract_mesh()
    changed = not current.empty and (current.manual_axes or current.axis_types != mesh.axis_types)
    wanted = NamedSharding(current if changed else mesh, spec)
    if (typed := _sharding.explicit(x)) is not None:
        return transfer(x, lambda y: _sharding.reshard_if_explicit(y, NamedSharding(typed.mesh, spec)))
    return transfer(x, lambda y: jax.lax.with_sharding_constraint(y, wanted))
