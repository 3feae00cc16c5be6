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


def explicit(x: Any) -> NamedSharding | None:
    """The sharding that is part of an array's type; None if the compiler chooses it."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    typed = mesh is not None and any(kind == AxisType.Explicit for kind in getattr(mesh, "axis_types", ()))
    return sharding if typed else None


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
            f"an array that is unreduced over {', '.join(map(repr, sorted(pending)))} is a sum that was not taken, and "
            "its parts cannot be rounded: sum it first, by jax.sharding.reshard, or by jax.lax.psum in a shard_map"
        )


def without_reduced(x: jax.Array) -> jax.Array:
    """An array that is `reduced` over no mesh axis, with the same values on every device: codes are computed from it.

    The gradient still is typed unreduced, but is reduced on the way; only a custom_vjp avoids that reduction. Raises
    for an unreduced array.
    """
    check_not_unreduced(x)
    typed, inside = explicit(x), manual_axes(x, "reduced")
    if typed is not None and typed.spec.reduced:
        x = jax.sharding.reshard(x, plain(typed))
    return jax.lax.pcast(x, tuple(sorted(inside)), to="varying") if inside else x


def reshard_for_broadcast(part: jax.Array, x: jax.Array) -> jax.Array:
    """Reshard a scale, or any array to be broadcast against `x`, like `x` along axes of equal size."""
    where = explicit(x)
    if where is None:
        return part
    cut = [p if n == m else None for p, n, m in zip(partitions(where, x.ndim), part.shape, x.shape, strict=True)]
    spec = PartitionSpec(*cut, reduced={*where.spec.reduced, *where.spec.unreduced})
    return jax.sharding.reshard(part, NamedSharding(where.mesh, spec))


def reshard_if_explicit(x: Any, sharding: Any) -> Any:
    """Reshard an array on a mesh with explicit axes; a no-op elsewhere."""
    where = explicit(x)
    if sharding is None or where is None or spec_of(sharding) == where.spec:
        return x
    return jax.sharding.reshard(x, sharding)


def restore_reduced(x: jax.Array, where: NamedSharding | None) -> jax.Array:
    """Reshard an array computed from `without_reduced(x)` to be reduced like `x`, whose sharding is `where`."""
    return reshard_if_explicit(x, where) if where is not None and where.spec.reduced else x


def replicate_axes(x: jax.Array, axes: Sequence[int] | None = None) -> jax.Array:
    """Replicate an array along some of its axes, by default all."""
    where = explicit(x)
    if where is None:
        return x
    gone = range(x.ndim) if axes is None else axes
    parts = (None if axis in gone else part for axis, part in enumerate(partitions(where, x.ndim)))
    return reshard_if_explicit(x, with_spec(where, PartitionSpec(*parts, reduced=where.spec.reduced)))


def repeat(x: jax.Array, times: int, axis: int) -> jax.Array:
    """`jnp.repeat` for explicit shardings, whose result sharding it cannot infer."""
    if explicit(x) is None:
        return jnp.repeat(x, times, axis=axis)
    wide = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), (*x.shape[: axis + 1], times, *x.shape[axis + 1 :]))
    return wide.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def split(x: jax.Array, cuts: Sequence[Sequence[int]]) -> jax.Array:
    """Split each axis into several; the first of them keeps the axis's mesh axes, if they divide it.

    >>> split(jnp.ones((4, 6)), [(4,), (2, 3)]).shape
    (4, 2, 3)
    """
    shape, where = [n for cut in cuts for n in cut], explicit(x)
    if where is None or len(shape) == x.ndim:
        return x.reshape(shape)
    sizes, parts = where.mesh.shape, list(partitions(where, x.ndim))
    for axis, cut in enumerate(cuts):
        if len(cut) > 1 and cut[0] % math.prod(sizes[name] for name in names(parts[axis])):
            parts[axis] = None
    x = reshard_if_explicit(x, with_spec(where, PartitionSpec(*parts, reduced=where.spec.reduced)))
    spread = [p for cut, part in zip(cuts, parts, strict=True) for p in (part, *(None,) * (len(cut) - 1))]
    spec = PartitionSpec(*spread, reduced=where.spec.reduced)
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(where.mesh, spec))


def merge(x: jax.Array, widths: Sequence[int]) -> jax.Array:
    """The inverse of `split`: merge each run of `widths[i]` axes into one."""
    starts = [sum(widths[:i]) for i in range(len(widths))]
    shape = [math.prod(x.shape[start : start + width]) for start, width in zip(starts, widths, strict=True)]
    where = explicit(x)
    if where is None or len(shape) == x.ndim:
        return x.reshape(shape)
    parts = partitions(where, x.ndim)
    spec = PartitionSpec(
        *(parts[start] for start in starts), unreduced=where.spec.unreduced, reduced=where.spec.reduced
    )
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(where.mesh, spec))


def drop_axes_used_by(sharding: Spec, parts: Sequence[Any], first: Sequence[int]) -> Spec:
    """A sharding with partitions `parts`, in which mesh axes of the array axes `first` are dropped elsewhere."""
    taken = {name for axis in first for name in names(parts[axis])}

    def rest(axis: int, part: Any) -> Any:
        return part if axis in first else tuple(name for name in names(part) if name not in taken) or None

    spec = spec_of(sharding)
    kept = (rest(axis, part) for axis, part in enumerate(parts))
    return with_spec(sharding, PartitionSpec(*kept, unreduced=spec.unreduced - taken, reduced=spec.reduced - taken))
