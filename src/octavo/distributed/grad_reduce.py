"""Gradients, reduced over devices in low precision.

XLA would place the reduction of the partial gradients itself, and reduce in float32. Here each device computes the
gradient of its own rows under `jax.shard_map`, and `GradReduce.reduce` reduces it to the sharding of the parameter. It
does so for the weight of one matmul (`sum`), where ranges and scales of the operands are those of global arrays, and
for all gradients of data-parallel replicas (`reduce_replicas`), which compute with ranges of their own.
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
from octavo.ops.operands import ArrayOrQArray, Dims
from octavo.ops.vjp import ERROR_FEEDBACK
from octavo.qarray import QArray, shardings

type State = dict[str, dict[str, Array]]
"""The error feedback of a gradient, one for each device; empty without error feedback."""


def is_error_feedback(path: Sequence[Any]) -> bool:
    """Whether a leaf of the quantization state, given its key path, is error feedback of a reduced gradient."""
    return any(getattr(entry, "key", None) == ERROR_FEEDBACK for entry in path)


@dataclasses.dataclass(frozen=True)
class GradReduce:
    """The reduction of a parameter's gradient: in `qtype`, over the mesh axes along which rows are sharded.

    It is a reduce-scatter along mesh axes that also shard the parameter, and an all-reduce along the others.

    Attributes:
      stored: the sharding of the parameter.
      rows: the mesh axes of each sharded row axis, major to minor.
      qtype: the format of the transferred codes.
      feedback: whether a device's rounding error is added to its next gradient (error feedback).
      left: whether the parameter is the left operand of its matmul.
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
        """The axis of the parameter that is reduce-scattered (the one over most devices), and its mesh axes."""
        found = [tuple(a for a in _sharding.names(part) if a in self.axes) for part in self.stored.spec] or [()]
        devices = [math.prod(self.stored.mesh.shape[a] for a in names) for names in found]
        axis = devices.index(max(devices))
        return axis, found[axis]

    def init_error(self, shape: Sequence[int]) -> State:
        """The initial error feedback of a gradient of this shape, as an entry of a matmul's scaling."""
        zeros = jnp.zeros((self.num_devices, *shape), jnp.float32)
        return {ERROR_FEEDBACK: {"error": zeros}} if self.feedback else {}

    def error_of(self, scaling: dict[str, Any]) -> State:
        """The error feedback among the entries of a matmul's scaling."""
        return {ERROR_FEEDBACK: scaling[ERROR_FEEDBACK]} if self.feedback else {}

    @property
    def error_spec(self) -> PartitionSpec:
        """The partition spec of the error feedback: one per device, otherwise sharded like the parameter."""
        return PartitionSpec(self.axes, *_spec(self._others(len(self.stored.spec))))

    def _others(self, ndim: int) -> list[tuple[str, ...]]:
        """The mesh axes of each axis of the parameter, without those of rows."""
        parts = _sharding.partitions(self.stored, ndim)
        return [tuple(a for a in _sharding.names(part) if a not in self.axes) for part in parts]

    def reduce(self, x: Array, state: State) -> tuple[Array, State]:
        """Inside a shard_map over all axes: this device's shard of the sum of `x`, and its new error feedback."""
        error = state[ERROR_FEEDBACK]["error"][0] if self.feedback else None
        axis, names = self.scatter
        rest = tuple(a for a in self.axes if a not in names)
        if not names:
            total, error = quantized_psum(x, rest, self.qtype, error=error)
        else:
            total, error = quantized_psum_scatter(x, names, self.qtype, scatter_dimension=axis, error=error)
        if names and rest:
            total, more = quantized_psum(total, rest, self.qtype)
            # This is the rounding error of the shard that this device stores: add it at the shard's position.
            start = jax.lax.axis_index(names) * total.shape[axis]
            own = jax.lax.dynamic_slice_in_dim(error, start, total.shape[axis], axis) + more
            error = jax.lax.dynamic_update_slice_in_dim(error, own, start, axis)
        return total, {ERROR_FEEDBACK: {"error": error[None]}} if self.feedback else {}

    def reduce_replicas(self, x: Array, state: State) -> tuple[Array, State]:
        """`reduce` inside a shard_map over `axes`, to whose mesh axes this adds those that shard the parameter."""
        others = self._others(x.ndim)
        if not any(others):
            return self.reduce(x, state)
        specs = _spec(others), PartitionSpec(None, *_spec(others))
        names = {name for other in others for name in other}
        return jax.shard_map(self.reduce, in_specs=specs, out_specs=specs, axis_names=names, check_vma=False)(x, state)

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
        out = [(*other, *(names if a == axis else ())) for a, other in enumerate(others)]
        run = jax.shard_map(
            lambda lhs, rhs, state: self.reduce(transpose.arrange_out(product(lhs, rhs)), state),
            mesh=mesh,
            in_specs=(left, right, self.error_spec),
            out_specs=(_spec(out), self.error_spec),
            axis_names={*self.axes, *(name for other in others for name in other)},
            check_vma=False,
        )
        return run(lhs, rhs, self.error_of(scaling))

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
    fits = jax.tree.leaves(specs) == [y.spec for y in jax.tree.leaves(shardings(x, NamedSharding(mesh, spec)))]
    scales = [part for part in (x.scale, x.zero_point, x.outer_scale) if part is not None]
    alike = reduced is None or all(part.shape[reduced] == 1 for part in scales)
    return (x, specs) if fits and alike and not x.padding else (x.dequantize(), spec)
