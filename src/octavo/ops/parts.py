"""Rows of experts on a mesh of devices: each device has rows of its own, sorted for the experts that it has.

XLA cannot cut a product whose rows are sorted by group: it would give every device all rows, or all experts. Here rows
lie in parts, one after the other, one for each device; a part is sorted, and its last rows may belong to no expert of
its device. Products of codes run device by device, under `jax.shard_map`, and what devices know only together is
summed over them: integers as integers, so that they are the same on any mesh. All else, ranges and scales above all,
is computed on whole arrays, and so it is what one device would compute.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from octavo._typing import Array
from octavo.ops.factor import laid
from octavo.ops.scatter import LOST, Scatter

SHARE = "octavo.share."
"""The scope that tells which part of the rows is expected to have an expert on their device, as one in so many."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """How the rows [m, k] and the matrices [experts, k, n] of a product lie on a mesh.

    `rows` are the axes of the mesh along which rows are cut besides those of the `experts`; `inputs` and `outputs` are
    those that cut the matrices' own axes. The gradient of the matrices is scattered over some of the axes of `rows`
    along its axis `scattered[0]`, as the matrices are stored.
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
            raise ValueError(f"an axis of the mesh cuts one axis of a product, but one of {named} is there twice")
        if spare := [axis for axis in self.scattered[1] if axis not in self.rows]:
            raise ValueError(f"gradients are scattered over axes that cut rows, {self.rows}, and {spare[0]!r} is none")

    @property
    def every(self) -> tuple[str, ...]:
        """The axes along which rows are cut, from the slowest."""
        return (*self.rows, *self.experts)

    @property
    def count(self) -> int:
        """How many parts there are."""
        return self.ways(self.every)

    def ways(self, axes: tuple[str, ...]) -> int:
        """Into how many pieces these axes of the mesh cut."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def run(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """A function of a device's pieces as one of whole arrays."""
        names = {axis for axis in self.mesh.axis_names if axis not in self.mesh.manual_axes}

        def local(*args: Any) -> Any:
            with jax.named_scope(f"{SHARE}{self.ways(self.experts)}"):
                return fn(*args)

        return jax.shard_map(
            local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False
        )

    # The products.

    def by_groups(
        self, fn: Callable[..., Array], lhs: Any, rhs: Any, sizes: Array, *, contract: int, late: bool
    ) -> Array:
        """[m, k] x [experts, k, n], or with `contract` 2 of [experts, n, k]: by `fn(lhs, rhs, sizes, over)` of each.

        Devices that have parts of the contraction add up what `fn` gives; if `late`, `fn` does so itself, `over` these
        axes of the mesh.
        """
        over, kept = (self.inputs, self.outputs) if contract == 1 else (self.outputs, self.inputs)
        rows = PartitionSpec(self.every, _part(over))
        groups = PartitionSpec(_part(self.experts), _part(self.inputs), _part(self.outputs))
        lhs, left = laid(self.mesh, lhs, rows, 1 if over and late else None)
        rhs, right = laid(self.mesh, rhs, groups, contract if over and late else None)

        def local(lhs: Any, rhs: Any, sizes: Array) -> Array:
            out = fn(lhs, rhs, sizes[0], over if late else ())
            return jax.lax.psum(out, over) if over and not late else out

        run = self.run(local, (left, right, PartitionSpec(self.every)), PartitionSpec(self.every, _part(kept)))
        return run(lhs, rhs, sizes)

    def by_rows(self, fn: Callable[..., Array], lhs: Any, rhs: Any, sizes: Array, scales: tuple[Array, ...]) -> Array:
        """[m, k] x [m, n] -> [experts, k, n]: `fn(lhs, rhs, sizes, scales)` of each device, summed over rows."""
        axis, names = self.scattered

        def add(out: Array, _: None) -> tuple[Array, None]:
            if rest := tuple(a for a in self.rows if a not in names):
                out = jax.lax.psum(out, rest)
            return jax.lax.psum_scatter(out, names, scatter_dimension=axis, tiled=True) if names else out, None

        return self._summed(fn, add, (lhs, rhs, sizes, scales, None), self.scattered, PartitionSpec())[0]

    def by_rows_as(
        self, scatter: Scatter, fn: Callable[..., Array], lhs: Any, rhs: Any, sizes: Array, scales: Any, scaling: Any
    ) -> tuple[Array, dict[str, Any]]:
        """The same, summed as `scatter` says; and what `scaling` is to remember of it."""

        def add(out: Array, error: Any) -> tuple[Array, Any]:
            if rest := tuple(a for a in self.rows if a not in scatter.axes):
                out = jax.lax.psum(out, rest)
            out, lost = scatter.add(out, error[0] if scatter.feedback else None)
            return out, lost[None] if scatter.feedback else None

        error = scaling[LOST]["error"] if scatter.feedback else None
        lost = PartitionSpec(scatter.axes, *map(_part, (self.experts, self.inputs, self.outputs)))
        out, error = self._summed(fn, add, (lhs, rhs, sizes, scales, error), scatter.cut, lost)
        return out, {LOST: {"error": error}} if scatter.feedback else {}

    def _summed(
        self,
        fn: Callable[..., Array],
        add: Callable[[Array, Any], tuple[Array, Any]],
        args: tuple[Any, Any, Array, tuple[Array, ...], Any],
        scattered: tuple[int, tuple[str, ...]],
        lost: PartitionSpec,
    ) -> tuple[Array, Any]:
        """`add(fn(lhs, rhs, sizes, scales), error)` of each device, whose first result is scattered."""
        lhs, rhs, sizes, scales, error = args
        spec: list[Any] = [self.experts, self.inputs, self.outputs]
        whole, (axis, names) = PartitionSpec(*map(_part, spec)), scattered
        spec[axis] = (*spec[axis], *names)
        lhs, left = laid(self.mesh, lhs, PartitionSpec(self.every, _part(self.inputs)))
        rhs, right = laid(self.mesh, rhs, PartitionSpec(self.every, _part(self.outputs)))
        beside = tuple(_where_long(scale, whole) for scale in scales)
        run = self.run(
            lambda lhs, rhs, sizes, scales, error: add(fn(lhs, rhs, sizes[0], scales), error),
            (left, right, PartitionSpec(self.every), beside, lost),
            (PartitionSpec(*map(_part, spec)), lost),
        )
        return run(lhs, rhs, sizes, scales, error)

    # What goes with them.

    def pick(self, part: Array, sizes: Array, group: Callable[[Array], Array]) -> Array:
        """For each row what belongs to its expert: [experts, n] -> [m, n]; `group(sizes)` are the rows' experts."""
        run = self.run(
            lambda part, sizes: part[group(sizes[0])],
            (PartitionSpec(_part(self.experts)), PartitionSpec(self.every)),
            PartitionSpec(self.every),
        )
        return run(part, sizes)

    def largest(self, fn: Callable[[Array, Array], Array], x: Array, sizes: Array) -> Array:
        """`fn(x, sizes)` [experts, n] of each device's rows [m, n], the largest of all devices."""

        def local(x: Array, sizes: Array) -> Array:
            out = fn(x, sizes[0])
            return jax.lax.pmax(out, self.rows) if self.rows else out

        each = PartitionSpec(self.every)
        return self.run(local, (each, each), PartitionSpec(_part(self.experts)))(x, sizes)


def _where_long(x: Array, spec: PartitionSpec) -> PartitionSpec:
    """How an array is cut that has one entry for all along some of the axes."""
    return PartitionSpec(*(part if size > 1 else None for part, size in zip(spec, x.shape, strict=True)))


def _part(axes: tuple[str, ...]) -> Any:
    return axes or None
