"""All-gather of sharded weights as codes."""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from octavo import _sharding
from octavo.distributed.collectives import transfer
from octavo.ops.operands import ArrayOrQArray
from octavo.qarray import QArray


@dataclasses.dataclass(frozen=True)
class WeightGather:
    """The sharding in which the weight of a matmul is stored, and the one in which the matmul uses it.

    Left to itself, XLA may all-gather a weight before it is quantized, or after its codes are widened. With these
    sharding constraints it all-gathers codes and scales. The residual stays sharded, and is all-gathered again in the
    backward pass. `left`: the weight is the left operand.
    """

    stored: NamedSharding
    used: NamedSharding
    left: bool = False

    def shard_codes(self, x: ArrayOrQArray) -> ArrayOrQArray:
        """Constrain the codes of a weight to the sharding in which it is stored."""
        return self._constrain(x, self.stored)

    def all_gather(self, x: ArrayOrQArray) -> ArrayOrQArray:
        """All-gather the codes of a weight to the sharding in which the matmul uses them."""
        return self._constrain(self._constrain(x, self.stored), self.used)

    def _constrain(self, x: ArrayOrQArray, sharding: NamedSharding) -> ArrayOrQArray:
        return x._map(lambda part: _constrain(part, sharding)) if isinstance(x, QArray) else x


def weight_gather(stored: NamedSharding, axes: tuple[str, ...], *, left: bool) -> WeightGather | None:
    """The all-gather of a weight over mesh axes.

    Args:
      stored: the sharding of the weight.
      axes: the mesh axes to all-gather over.
      left: whether the weight is the left operand.

    Returns:
      The all-gather, or None if the weight is not sharded along any of the axes.
    """
    kept = []
    for part in stored.spec:
        rest = tuple(axis for axis in _sharding.names(part) if axis not in axes)
        kept.append(None if not rest else rest[0] if len(rest) == 1 else rest)
    used = NamedSharding(stored.mesh, PartitionSpec(*kept))
    return None if tuple(used.spec) == tuple(stored.spec) else WeightGather(stored, used, left)


def _constrain(x: Any, sharding: NamedSharding) -> Any:
    """Constrain an array to a sharding, except along axes whose size it does not divide, such as those of scales."""
    mesh = sharding.mesh
    parts = (*sharding.spec, *(None,) * x.ndim)[: x.ndim]
    devices = [math.prod(mesh.shape[axis] for axis in _sharding.names(part)) for part in parts]
    spec = PartitionSpec(
        *(part if size % count == 0 else None for part, size, count in zip(parts, x.shape, devices, strict=True))
    )
    # Use the current mesh inside a shard_map over other axes, and where explicit axes temporarily are auto axes.
    current = jax.sharding.get_abstract_mesh()
    changed = not current.empty and (current.manual_axes or current.axis_types != mesh.axis_types)
    wanted = NamedSharding(current if changed else mesh, spec)
    if (typed := _sharding.explicit(x)) is not None:
        return transfer(x, lambda y: _sharding.reshard_if_explicit(y, NamedSharding(typed.mesh, spec)))
    return transfer(x, lambda y: jax.lax.with_sharding_constraint(y, wanted))
