"""Ragged dots whose rows and experts are sharded: each device has sorted rows for its own experts.

XLA cannot partition a ragged dot over sorted rows: every device would get all rows, or all experts. Here rows are
sharded over devices; each shard is sorted, and its last rows may belong to no expert of its device. Dots of codes run
per device under `jax.shard_map` and are reduced over devices: integers as integers, so that they are bit-exact on any
mesh. Everything else, ranges and scales in particular, is computed on global arrays, as on one device.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from octavo._typing import Array
from octavo.distributed.grad_reduce import GradReduce, shard_map_operand

SHARE = "octavo.share."
"""The named scope with n, where 1/n of the rows is expected to have an expert on their device."""


@dataclasses.dataclass(frozen=True)
class ExpertSharding:
    """The sharding of the rows [m, k] and the matrices [experts, k, n] of a ragged dot.

    Attributes:
      mesh: the (abstract) mesh.
      rows: the mesh axes along which rows are sharded, in addition to those of the experts.
      experts: the mesh axes along which experts are sharded; rows are sharded along them as well.
      inputs: the mesh axes along which axis k of the matrices is sharded.
      outputs: the mesh axes along which axis n of the matrices is sharded.
      scattered: the axis of the matrices along which their gradient is reduce-scattered, and over which of `rows`.
    """

    mesh: Any
    rows: tuple[str, ...]
    experts: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    scattered: tuple[int, tuple[str, ...]] = (1, ())

    def __post_init__(self):
        named = (*self.rows, *self.experts, *self.inputs, *self.outputs)
        if unknown := [axis for axis in named if axis not in self.mesh.axis_names]:
            raise ValueError(f"the mesh has the axes {self.mesh.axis_names}, and not {unknown[0]!r}")
        if len(set(named)) < len(named):
            raise ValueError(f"a mesh axis shards one axis of a matmul, but one of {named} is given twice")
        if spare := [axis for axis in self.scattered[1] if axis not in self.rows]:
            raise ValueError(f"gradients are scattered over mesh axes of rows, {self.rows}, and {spare[0]!r} is none")

    @property
    def row_axes(self) -> tuple[str, ...]:
        """All mesh axes along which rows are sharded, major to minor."""
        return (*self.rows, *self.experts)

    @property
    def num_shards(self) -> int:
        """The number of shards of the rows."""
        return self.num_devices(self.row_axes)

    def num_devices(self, axes: tuple[str, ...]) -> int:
        """The number of devices along these mesh axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def shard_map(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`jax.shard_map` of a function of shards, over this mesh."""
        names = {axis for axis in self.mesh.axis_names if axis not in self.mesh.manual_axes}

        def local(*args: Any) -> Any:
            with jax.named_scope(f"{SHARE}{self.num_devices(self.experts)}"):
                return fn(*args)

        return jax.shard_map(
            local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False
        )

    def by_groups(
        self, fn: Callable[..., Array], lhs: Any, rhs: Any, sizes: Array, *, contract: int, late: bool
    ) -> Array:
        """[m, k] x [experts, k, n], or with `contract` 2 of [experts, n, k]: `fn(lhs, rhs, sizes, over)` per device.

        If the contraction is sharded, the results of `fn` are psummed; if `late`, `fn` itself does the psum, `over`
        these mesh axes.
        """
        over, kept = (self.inputs, self.outputs) if contract == 1 else (self.outputs, self.inputs)
        rows = PartitionSpec(self.row_axes, _part(over))
        groups = PartitionSpec(_part(self.experts), _part(self.inputs), _part(self.outputs))
        lhs, left = shard_map_operand(self.mesh, lhs, rows, 1 if over and late else None)
        rhs, right = shard_map_operand(self.mesh, rhs, groups, contract if over and late else None)

        def local(lhs: Any, rhs: Any, sizes: Array) -> Array:
            out = fn(lhs, rhs, sizes[0], over if late else ())
            return jax.lax.psum(out, over) if over and not late else out

        specs = (left, right, PartitionSpec(self.row_axes))
        return self.shard_map(local, specs, PartitionSpec(self.row_axes, _part(kept)))(lhs, rhs, sizes)

    def by_rows(
        self,
        fn: Callable[..., Array],
        lhs: Any,
        rhs: Any,
        sizes: Array,
        scales: tuple[Array, ...] = (),
        reduction: GradReduce | None = None,
        scaling: Any = None,
    ) -> tuple[Array, dict[str, Any]]:
        """[m, k] x [m, n] -> [experts, k, n]: `fn(lhs, rhs, sizes, scales)` per device, summed over rows.

        With a `reduction`, in low precision; the second result are updates of `scaling`.
        """
        axis, names = self.scattered if reduction is None else reduction.scatter
        rest = tuple(a for a in self.rows if a not in (names if reduction is None else reduction.axes))

        def local(lhs: Any, rhs: Any, sizes: Array, scales: tuple[Array, ...], state: Any) -> tuple[Array, Any]:
            out = fn(lhs, rhs, sizes[0], scales)
            out = jax.lax.psum(out, rest) if rest else out
            if reduction is not None:
                return reduction.reduce(out, state)
            return jax.lax.psum_scatter(out, names, scatter_dimension=axis, tiled=True) if names else out, state

        spec: list[Any] = [self.experts, self.inputs, self.outputs]
        whole = PartitionSpec(*map(_part, spec))
        state_spec = PartitionSpec() if reduction is None else PartitionSpec(reduction.axes, *whole)
        spec[axis] = (*spec[axis], *names)
        lhs, left = shard_map_operand(self.mesh, lhs, PartitionSpec(self.row_axes, _part(self.inputs)))
        rhs, right = shard_map_operand(self.mesh, rhs, PartitionSpec(self.row_axes, _part(self.outputs)))
        # A scale is replicated along axes where it has one entry.
        scale_specs = tuple(
            PartitionSpec(*(part if size > 1 else None for part, size in zip(whole, scale.shape, strict=True)))
            for scale in scales
        )
        run = self.shard_map(
            local,
            (left, right, PartitionSpec(self.row_axes), scale_specs, state_spec),
            (PartitionSpec(*map(_part, spec)), state_spec),
        )
        return run(lhs, rhs, sizes, scales, {} if reduction is None else reduction.error_of(scaling))

    def pick(self, part: Array, sizes: Array, group: Callable[[Array], Array]) -> Array:
        """Gather the entry of each row's expert: [experts, n] -> [m, n]; `group(sizes)` are the rows' experts."""
        run = self.shard_map(
            lambda part, sizes: part[group(sizes[0])],
            (PartitionSpec(_part(self.experts)), PartitionSpec(self.row_axes)),
            PartitionSpec(self.row_axes),
        )
        return run(part, sizes)

    def absmax(self, fn: Callable[[Array, Array], Array], x: Array, sizes: Array) -> Array:
        """Per-expert absmax [experts, n]: `fn(x, sizes)` per device, pmax over devices."""

        def local(x: Array, sizes: Array) -> Array:
            out = fn(x, sizes[0])
            return jax.lax.pmax(out, self.rows) if self.rows else out

        each = PartitionSpec(self.row_axes)
        return self.shard_map(local, (each, each), PartitionSpec(_part(self.experts)))(x, sizes)


def _part(axes: tuple[str, ...]) -> Any:
    return axes or None
