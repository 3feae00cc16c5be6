"""The gradient of a weight, added up in low precision by the devices that have rows of their own.

XLA sums the products of a device's rows wherever that suits it, and in float32. Here each device multiplies its own
rows under `jax.shard_map`, and sends to every other one, in low precision, the part of the gradient that is stored
there. Ranges and scales of the operands are those of whole arrays, as anywhere else.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from octavo import _sharding
from octavo._typing import Array
from octavo.numerics import FormatLike
from octavo.ops.dims import Dims, Gradient
from octavo.ops.factor import Factor, laid
from octavo.ops.reduce import quantized_psum, quantized_psum_scatter

LOST = "lost"
"""The name in a scaling of what rounding has lost of a gradient, on each device."""


def is_lost(path: Sequence[Any]) -> bool:
    """Whether a leaf of a tree of state, by its path there, is what gradients lost."""
    return any(getattr(entry, "key", None) == LOST for entry in path)


@dataclasses.dataclass(frozen=True)
class Scatter:
    """How the gradient of a weight is added up: in `qtype`, over the axes of a mesh along which rows are cut.

    `rows` has, for each of the rows' axes that is cut, these axes from the slowest. `where` is how the weight lies.
    Along those of its axes that cut the weight, devices get their parts alone; over the rest the sum is sent to all.
    With `feedback`, what a device loses by rounding is added to what it sends the next time. `left`: the weight is the
    left operand.
    """

    where: NamedSharding
    rows: tuple[tuple[str, ...], ...]
    qtype: FormatLike
    feedback: bool = False
    left: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes of the mesh over which is summed."""
        return tuple(axis for names in self.rows for axis in names)

    @property
    def ways(self) -> int:
        """How many devices have rows of their own."""
        return math.prod(self.where.mesh.shape[axis] for axis in self.axes)

    @property
    def cut(self) -> tuple[int, tuple[str, ...]]:
        """The axis of the weight that most devices share along `axes`, and the axes of the mesh that cut it."""
        found = [tuple(a for a in _sharding.names(part) if a in self.axes) for part in self.where.spec] or [()]
        ways = [math.prod(self.where.mesh.shape[a] for a in names) for names in found]
        axis = ways.index(max(ways))
        return axis, found[axis]

    def losses(self, shape: Sequence[int]) -> dict[str, dict[str, Array]]:
        """Nothing lost yet of the gradient of a weight of this shape: what its scaling begins with."""
        return {LOST: {"error": jnp.zeros((self.ways, *shape), jnp.float32)}} if self.feedback else {}

    @property
    def losses_spec(self) -> PartitionSpec:
        """How that lies: each device has its own, cut like the weight along axes other than those of rows."""
        return PartitionSpec(self.axes, *(names or None for names in self._others(len(self.where.spec))))

    def _others(self, ndim: int) -> list[tuple[str, ...]]:
        """For each axis of the weight the axes of the mesh that cut it, besides those of rows."""
        parts = _sharding.partitions(self.where, ndim)
        return [tuple(a for a in _sharding.names(part) if a not in self.axes) for part in parts]

    def add(self, x: Array, error: Array | None) -> tuple[Array, Array]:
        """In a shard_map over `axes`: this device's part of the sum of `x`, and what was lost of `x`."""
        axis, names = self.cut
        rest = tuple(a for a in self.axes if a not in names)
        if not names:
            return quantized_psum(x, rest, self.qtype, error=error)
        part, lost = quantized_psum_scatter(x, names, self.qtype, scatter_dimension=axis, error=error)
        if rest:
            part, more = quantized_psum(part, rest, self.qtype)
            # Lost of the part that this device stores: it will send that to itself.
            start = jax.lax.axis_index(names) * part.shape[axis]
            own = jax.lax.dynamic_slice_in_dim(lost, start, part.shape[axis], axis) + more
            lost = jax.lax.dynamic_update_slice_in_dim(lost, own, start, axis)
        return part, lost

    def sum(
        self,
        product: Callable[[Factor, Factor], Array],
        lhs: Factor,
        rhs: Factor,
        dims: Dims,
        gradient: Gradient,
        scaling: dict[str, Any],
    ) -> tuple[Array, dict[str, Any]]:
        """The gradient of the weight, which is `product(lhs, rhs)` of these `dims` and arranged by `gradient`; and what
        `scaling` is to remember."""
        others = self._others(len(gradient.order))
        for axis, names in self._cuts(dims.lhs_contract).items():
            ways = math.prod(self.where.mesh.shape[name] for name in names)
            if lhs.shape[axis] % ways:
                raise ValueError(
                    f"{lhs.shape[axis]} rows do not divide among the {ways} devices along {names}, over which the "
                    f"gradient of a weight is added up in {self.qtype}: leave axes out of reduce_axes, or change the "
                    "batch"
                )
        inside = jax.sharding.get_abstract_mesh()
        mesh = self.where.mesh if inside.empty else inside
        left, right = self._operand_specs(dims, [others[gradient.order.index(a)] for a in range(len(others))])
        (lhs, left), (rhs, right) = laid(mesh, lhs, left), laid(mesh, rhs, right)
        axis, names = self.cut
        error, out = self.losses_spec, [(*other, *(names if a == axis else ())) for a, other in enumerate(others)]

        def local(lhs: Factor, rhs: Factor, error: Any) -> tuple[Array, Any]:
            out, lost = self.add(gradient.arrange(product(lhs, rhs)), error[0] if self.feedback else None)
            return out, lost[None] if self.feedback else None

        run = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(left, right, error),
            out_specs=(_spec(out), error),
            axis_names={*self.axes, *(name for other in others for name in other)},
            check_vma=False,
        )
        grad, lost = run(lhs, rhs, scaling[LOST]["error"] if self.feedback else None)
        return grad, {LOST: {"error": lost}} if self.feedback else {}

    def _operand_specs(self, dims: Dims, kept: list[tuple[str, ...]]) -> tuple[PartitionSpec, PartitionSpec]:
        """How both operands are cut, for a product whose axes, before it is arranged, are cut as `kept` says."""
        left: list[tuple[str, ...]] = [()] * dims.lhs_ndim
        right: list[tuple[str, ...]] = [()] * dims.rhs_ndim
        first, last = len(dims.lhs_batch), len(kept) - len(dims.rhs_remaining)
        for axis, names in zip((*dims.lhs_batch, *dims.lhs_remaining), kept, strict=False):
            left[axis] = names
        for axis, names in zip((*dims.rhs_batch, *dims.rhs_remaining), (*kept[:first], *kept[last:]), strict=True):
            right[axis] = names
        for operand, contract in ((left, dims.lhs_contract), (right, dims.rhs_contract)):
            for axis, names in self._cuts(contract).items():
                operand[axis] = names
        return _spec(left), _spec(right)

    def _cuts(self, contract: tuple[int, ...]) -> dict[int, tuple[str, ...]]:
        """The contracted axes of an operand that are cut: the first ones, or one that is all of them in one."""
        if len(contract) < len(self.rows):
            return {contract[0]: self.axes}
        return dict(zip(contract, self.rows, strict=False))


def _spec(parts: Sequence[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(names or None for names in parts))
