"""Shardings that are part of an array's type: meshes with explicit axes, and `reduced` operands.

An array that is `reduced` over a mesh axis is replicated along it, and its gradient is `unreduced`: each device holds a
partial sum. So a gradient is reduced over devices once, where the program says so. Inside a `shard_map` an array is
reduced over manual axes, elsewhere over explicit ones.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

type Spec = NamedSharding | PartitionSpec


def is_typed(*trees: Any) -> bool:
    """Whether the type of any array has a mesh: one with explicit axes, or that of a shard_map."""
    return any(not jax.typeof(x).sharding.mesh.empty for x in jax.tree.leaves(trees))


def explicit(x: Any) -> NamedSharding | None:
    """The sharding that is part of an array's type; None if the compiler chooses it."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    typed = mesh is not None and any(kind == AxisType.Explicit for kind in getattr(mesh, "axis_types", ()))
    return sharding if typed else None


def explicit_shardings(*arrays: Any) -> tuple[Any, ...]:
    """The explicit shardings of arrays, which their gradients need as `out_sharding`; all None without explicit axes.

    An array on no mesh is replicated on the mesh of the others.
    """
    found = [explicit(x) for x in arrays]
    mesh = next((sharding.mesh for sharding in found if sharding is not None), None)
    if mesh is None:
        return tuple(found)
    replicated = [NamedSharding(mesh, PartitionSpec(*(None,) * x.ndim)) for x in arrays]
    return tuple(own or other for own, other in zip(found, replicated, strict=True))


def spec_of(sharding: Spec) -> PartitionSpec:
    """The partition spec of a sharding; a partition spec itself."""
    return sharding.spec if isinstance(sharding, NamedSharding) else sharding


def with_spec(sharding: Spec, spec: PartitionSpec) -> Spec:
    """A sharding (or partition spec) of the same type and mesh with another partition spec."""
    return NamedSharding(sharding.mesh, spec) if isinstance(sharding, NamedSharding) else spec


def partitions(sharding: Spec, ndim: int) -> tuple[Any, ...]:
    """The mesh axes of each axis of an array, ignoring reduced and unreduced axes."""
    return (*spec_of(sharding).partitions, *(None,) * ndim)[:ndim]


def names(part: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a partition spec.

    >>> names(None), names("data"), names(("data", "fsdp"))
    ((), ('data',), ('data', 'fsdp'))
    """
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def plain(sharding: Any) -> Any:
    """The same sharding, neither reduced nor unreduced."""
    if sharding is None:
        return sharding
    return with_spec(sharding, PartitionSpec(*spec_of(sharding).partitions))


def gradient_sharding(sharding: Any) -> Any:
    """The sharding of an array's gradient: reduced and unreduced axes are swapped."""
    if sharding is None:
        return sharding
    spec = spec_of(sharding)
    return with_spec(sharding, PartitionSpec(*spec.partitions, unreduced=spec.reduced, reduced=spec.unreduced))


def is_unreduced(sharding: Spec | None) -> bool:
    """Whether a sharding is unreduced over a mesh axis."""
    return sharding is not None and bool(spec_of(sharding).unreduced)


def manual_axes(x: Any, kind: str) -> frozenset[str]:
    """The axes of a shard_map over which an array is "varying", "reduced" or "unreduced"."""
    return frozenset(getattr(getattr(jax.typeof(x), "mat", None), kind, ()))


def check_not_unreduced(x: jax.Array) -> None:
    """Raise for an unreduced array: partial sums cannot be quantized."""
    typed = explicit(x)
    pending = manual_axes(x, "unreduced") | (frozenset() if typed is None else typed.spec.unreduced)
    if pending:
        raise ValueError(
            f"an array that is unreduced over {', '.join(map(repr, sorted(pending)))} holds partial sums, which cannot "
            "be quantized: reduce it first, by jax.sharding.reshard, or by jax.lax.psum in a shard_map"
        )


def without_reduced[T](tree: T) -> T:
    """Arrays that are `reduced` over no mesh axis, with the same values on every device: codes are computed from them.

    The gradient still is typed unreduced, but is reduced on the way; only a custom_vjp avoids that reduction. Raises
    for an unreduced array.
    """
    return jax.tree.map(_without_reduced, tree) if is_typed(tree) else tree


def _without_reduced(x: jax.Array) -> jax.Array:
    typed, inside = explicit(x), manual_axes(x, "reduced")
    if typed is not None or manual_axes(x, "unreduced"):
        check_not_unreduced(x)
    if typed is not None and typed.spec.reduced:
        x = jax.sharding.reshard(x, plain(typed))
    return jax.lax.pcast(x, tuple(sorted(inside)), to="varying") if inside else x


def vary_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Make arrays varying over the same axes of a shard_map, as its type system requires of a custom_vjp.

    For an array that is replicated while another is not, the transpose of this cast is a psum over devices; for one
    that is `reduced`, the gradient is unreduced instead.
    """
    varying = [manual_axes(x, "varying") for x in arrays]
    every = frozenset().union(*varying, *(manual_axes(x, "reduced") for x in arrays))
    if not every:
        return arrays
    for x in arrays:
        check_not_unreduced(x)
    return tuple(
        jax.lax.pcast(x, tuple(sorted(every - own)), to="varying") if every - own else x
        for x, own in zip(arrays, varying, strict=True)
    )


def reshard_for_broadcast(part: jax.Array, x: jax.Array) -> jax.Array:
    """Reshard a scale, or any array to be broadcast against `x`, like `x` along axes of equal size."""
    typed = explicit(x)
    if typed is None:
        return part
    parts = [p if n == m else None for p, n, m in zip(partitions(typed, x.ndim), part.shape, x.shape, strict=True)]
    spec = PartitionSpec(*parts, reduced={*typed.spec.reduced, *typed.spec.unreduced})
    return jax.sharding.reshard(part, NamedSharding(typed.mesh, spec))


def reshard_if_explicit(x: Any, sharding: Any) -> Any:
    """Reshard an array on a mesh with explicit axes; a no-op elsewhere."""
    typed = explicit(x)
    if sharding is None or typed is None or spec_of(sharding) == typed.spec:
        return x
    return jax.sharding.reshard(x, sharding)


def restore_reduced(x: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """Reshard an array computed from `without_reduced(y)` to be reduced like `y`, which has this sharding."""
    return reshard_if_explicit(x, sharding) if sharding is not None and sharding.spec.reduced else x


def replicate_axes(x: jax.Array, axes: Sequence[int] | None = None) -> jax.Array:
    """Replicate an array along some of its axes, by default all."""
    typed = explicit(x)
    if typed is None:
        return x
    gone = range(x.ndim) if axes is None else axes
    parts = (None if axis in gone else part for axis, part in enumerate(partitions(typed, x.ndim)))
    return reshard_if_explicit(x, with_spec(typed, PartitionSpec(*parts, reduced=typed.spec.reduced)))


def repeat(x: jax.Array, times: Any, axis: int) -> jax.Array:
    """`jnp.repeat` for explicit shardings, whose result sharding it cannot infer."""
    if explicit(x) is None:
        return jnp.repeat(x, times, axis=axis)
    wide = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), (*x.shape[: axis + 1], times, *x.shape[axis + 1 :]))
    return wide.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def split(x: jax.Array, splits: Sequence[Sequence[Any]]) -> jax.Array:
    """Split each axis into several; the first of them keeps the axis's mesh axes, if they divide it.

    >>> split(jnp.ones((4, 6)), [(4,), (2, 3)]).shape
    (4, 2, 3)
    """
    shape, typed = [n for new in splits for n in new], explicit(x)
    if typed is None or len(shape) == x.ndim:
        return x.reshape(shape)
    sizes, parts = typed.mesh.shape, list(partitions(typed, x.ndim))
    for axis, new in enumerate(splits):
        if len(new) > 1 and new[0] % math.prod(sizes[name] for name in names(parts[axis])):
            parts[axis] = None
    x = reshard_if_explicit(x, with_spec(typed, PartitionSpec(*parts, reduced=typed.spec.reduced)))
    spread = [p for new, part in zip(splits, parts, strict=True) for p in (part, *(None,) * (len(new) - 1))]
    spec = PartitionSpec(*spread, reduced=typed.spec.reduced)
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(typed.mesh, spec))


def merge(x: jax.Array, widths: Sequence[int]) -> jax.Array:
    """The inverse of `split`: merge each run of `widths[i]` axes into one."""
    starts = [sum(widths[:i]) for i in range(len(widths))]
    shape = [math.prod(x.shape[start : start + width]) for start, width in zip(starts, widths, strict=True)]
    typed = explicit(x)
    if typed is None or len(shape) == x.ndim:
        return x.reshape(shape)
    parts = partitions(typed, x.ndim)
    spec = PartitionSpec(
        *(parts[start] for start in starts), unreduced=typed.spec.unreduced, reduced=typed.spec.reduced
    )
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(typed.mesh, spec))


def drop_axes_used_by(sharding: Spec, parts: Sequence[Any], first: Sequence[int]) -> Spec:
    """A sharding with partitions `parts`, in which mesh axes of the array axes `first` are dropped elsewhere."""
    taken = {name for axis in first for name in names(parts[axis])}

    def rest(axis: int, part: Any) -> Any:
        return part if axis in first else tuple(name for name in names(part) if name not in taken) or None

    spec = spec_of(sharding)
    kept = (rest(axis, part) for axis, part in enumerate(parts))
    return with_spec(sharding, PartitionSpec(*kept, unreduced=spec.unreduced - taken, reduced=spec.reduced - taken))
