"""Weight gradients, reduced over devices in low precision.

XLA would place the reduction of the partial gradients itself, and reduce in float32. Here each device multiplies its
own rows under `jax.shard_map`, and the result is reduce-scattered in low precision to the sharding of the weight.
Ranges and scales of the operands are those of global arrays, as elsewhere.
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
from octavo.distributed.collectives import quantized_psum, quantized_psum_scatter
from octavo.numerics import FormatLike
from octavo.ops.codes import ArrayOrQArray, shard_map_operand
from octavo.ops.dims import Dims
from octavo.ops.vjp import ERROR_FEEDBACK


def is_error_feedback(path: Sequence[Any]) -> bool:
    """Whether a leaf of the quantization state, given its key path, is error feedback of a reduced gradient."""
    return any(getattr(entry, "key", None) == ERROR_FEEDBACK for entry in path)


@dataclasses.dataclass(frozen=True)
class GradReduce:
    """The reduction of a weight's gradient: in `qtype`, over the mesh axes along which rows are sharded.

    It is a reduce-scatter along mesh axes that also shard the weight, and an all-reduce along the others.

    Attributes:
      stored: the sharding of the weight.
      rows: the mesh axes of each sharded row axis, major to minor.
      qtype: the format of the transferred codes.
      feedback: whether a device's rounding error is added to its next gradient (error feedback).
      left: whether the weight is the left operand.
    """

    stored: NamedSharding
    rows: tuple[tuple[str, ...], ...]
    qtype: FormatLike
    feedback: bool = False
    left: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes that are reduced over."""
        return tuple(axis for names in self.rows for axis in names)

    @property
    def num_devices(self) -> int:
        """The number of devices that are reduced over."""
        return math.prod(self.stored.mesh.shape[axis] for axis in self.axes)

    @property
    def scatter(self) -> tuple[int, tuple[str, ...]]:
        """The axis of the weight that is reduce-scattered (the one over most devices), and its mesh axes."""
        found = [tuple(a for a in _sharding.names(part) if a in self.axes) for part in self.stored.spec] or [()]
        devices = [math.prod(self.stored.mesh.shape[a] for a in names) for names in found]
        axis = devices.index(max(devices))
        return axis, found[axis]

    def init_error(self, shape: Sequence[int]) -> dict[str, dict[str, Array]]:
        """The initial error feedback of a weight of this shape, as an entry of its scaling."""
        zeros = jnp.zeros((self.num_devices, *shape), jnp.float32)
        return {ERROR_FEEDBACK: {"error": zeros}} if self.feedback else {}

    @property
    def error_spec(self) -> PartitionSpec:
        """The partition spec of the error feedback: one per device, otherwise sharded like the weight."""
        return PartitionSpec(self.axes, *(names or None for names in self._others(len(self.stored.spec))))

    def _others(self, ndim: int) -> list[tuple[str, ...]]:
        """The mesh axes of each axis of the weight, without those of rows."""
        parts = _sharding.partitions(self.stored, ndim)
        return [tuple(a for a in _sharding.names(part) if a not in self.axes) for part in parts]

    def reduce(self, x: Array, error: Array | None) -> tuple[Array, Array]:
        """Inside a shard_map over `axes`: this device's shard of the sum of `x`, and its rounding error."""
        axis, names = self.scatter
        rest = tuple(a for a in self.axes if a not in names)
        if not names:
            return quantized_psum(x, rest, self.qtype, error=error)
        shard, error = quantized_psum_scatter(x, names, self.qtype, scatter_dimension=axis, error=error)
        if rest:
            shard, more = quantized_psum(shard, rest, self.qtype)
            # This is the rounding error of the shard that this device stores: add it at the shard's position.
            start = jax.lax.axis_index(names) * shard.shape[axis]
            own = jax.lax.dynamic_slice_in_dim(error, start, shard.shape[axis], axis) + more
            error = jax.lax.dynamic_update_slice_in_dim(error, own, start, axis)
        return shard, error

    def sum(
        self,
        product: Callable[[ArrayOrQArray, ArrayOrQArray], Array],
        lhs: ArrayOrQArray,
        rhs: ArrayOrQArray,
        dims: Dims,
        transpose: Any,
        scaling: dict[str, Any],
    ) -> tuple[Array, dict[str, Any]]:
        """The gradient of the weight, and updates of `scaling`.

        The gradient is `product(lhs, rhs)` with these `dims`, transposed by `transpose.arrange_out` (a `DotTranspose`).
        """
        others = self._others(len(transpose.order))
        for axis, names in self._row_axes(dims.lhs_contract).items():
            devices = math.prod(self.stored.mesh.shape[name] for name in names)
            if lhs.shape[axis] % devices:
                raise ValueError(
                    f"{lhs.shape[axis]} rows do not divide among the {devices} devices along {names}, over which the "
                    f"gradient of a weight is reduced in {self.qtype}: leave axes out of reduce_axes, or change the "
                    "batch"
                )
        inside = jax.sharding.get_abstract_mesh()
        mesh = self.stored.mesh if inside.empty else inside
        left, right = self._operand_specs(dims, [others[transpose.order.index(a)] for a in range(len(others))])
        (lhs, left), (rhs, right) = shard_map_operand(mesh, lhs, left), shard_map_operand(mesh, rhs, right)
        axis, names = self.scatter
        error, out = self.error_spec, [(*other, *(names if a == axis else ())) for a, other in enumerate(others)]

        def local(lhs: ArrayOrQArray, rhs: ArrayOrQArray, error: Any) -> tuple[Array, Any]:
            out, error = self.reduce(transpose.arrange_out(product(lhs, rhs)), error[0] if self.feedback else None)
            return out, error[None] if self.feedback else None

        run = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(left, right, error),
            out_specs=(_spec(out), error),
            axis_names={*self.axes, *(name for other in others for name in other)},
            check_vma=False,
        )
        grad, error = run(lhs, rhs, scaling[ERROR_FEEDBACK]["error"] if self.feedback else None)
        return grad, {ERROR_FEEDBACK: {"error": error}} if self.feedback else {}

    def _operand_specs(self, dims: Dims, kept: list[tuple[str, ...]]) -> tuple[PartitionSpec, PartitionSpec]:
        """Partition specs of both operands, for a dot whose result, before `arrange_out`, is sharded along `kept`."""
        left: list[tuple[str, ...]] = [()] * dims.lhs_ndim
        right: list[tuple[str, ...]] = [()] * dims.rhs_ndim
        first, last = len(dims.lhs_batch), len(kept) - len(dims.rhs_remaining)
        for axis, names in zip((*dims.lhs_batch, *dims.lhs_remaining), kept, strict=False):
            left[axis] = names
        for axis, names in zip((*dims.rhs_batch, *dims.rhs_remaining), (*kept[:first], *kept[last:]), strict=True):
            right[axis] = names
        for operand, contract in ((left, dims.lhs_contract), (right, dims.rhs_contract)):
            for axis, names in self._row_axes(contract).items():
                operand[axis] = names
        return _spec(left), _spec(right)

    def _row_axes(self, contract: tuple[int, ...]) -> dict[int, tuple[str, ...]]:
        """The mesh axes of each sharded contracted axis; a fused axis is sharded along all of them."""
        if len(contract) < len(self.rows):
            return {contract[0]: self.axes}
        return dict(zip(contract, self.rows, strict=False))


def _spec(parts: Sequence[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(names or None for names in parts))
