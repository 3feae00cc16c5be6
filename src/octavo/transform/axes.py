"""The axes of a value that is only rearranged, as factors of the axes of the original."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class Factor(NamedTuple):
    """A factor of a parameter's axis: the digit of its index with this stride and size."""

    axis: int
    stride: int
    size: int


type Axes = tuple[tuple[Factor, ...], ...]


def axes_of(shape: Sequence[int]) -> Axes:
    """The axes of the original itself."""
    return tuple((Factor(axis, 1, size),) for axis, size in enumerate(shape))


def _same(axes: Axes, eqn: Any) -> Axes:
    return axes


def _transpose(axes: Axes, eqn: Any) -> Axes:
    return tuple(axes[a] for a in eqn.params["permutation"])


def _squeeze(axes: Axes, eqn: Any) -> Axes:
    gone = eqn.params["dimensions"]
    return tuple(a for i, a in enumerate(axes) if i not in gone)


def _broadcast(axes: Axes, eqn: Any) -> Axes | None:
    shape, places = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    if math.prod(shape) != math.prod(eqn.invars[0].aval.shape):
        return None
    return tuple(axes[places.index(i)] if i in places else () for i in range(len(shape)))


def _resized(sizes: Sequence[int], axes: Axes, old: Sequence[int]) -> Axes | None:
    """Axes sliced to other sizes: a single factor can be sliced, merged ones cannot."""
    out = []
    for parts, size, before in zip(axes, sizes, old, strict=True):
        if size == before:
            out.append(parts)
        elif len(parts) == 1:
            out.append((parts[0]._replace(size=size),))
        else:
            return None
    return tuple(out)


def _sliced(axes: Axes, eqn: Any) -> Axes | None:
    return _resized(eqn.outvars[0].aval.shape, axes, eqn.invars[0].aval.shape)


def _split(axes: Axes, eqn: Any) -> Any:
    return [_resized(out.aval.shape, axes, eqn.invars[0].aval.shape) for out in eqn.outvars]


def _reshape(axes: Axes, eqn: Any) -> Axes | None:
    """Factors regrouped into the new shape, and split where a new axis ends inside one."""
    if eqn.params.get("dimensions") is not None:
        return None
    parts = [p for axis in axes for p in axis if p.size != 1]
    out: list[tuple[Factor, ...]] = []
    for size in eqn.outvars[0].aval.shape:
        group: list[Factor] = []
        left = size
        while left > 1:
            if not parts:
                return None
            part = parts.pop(0)
            if left % part.size == 0:
                group.append(part)
                left //= part.size
            elif part.size % left == 0:
                inner = part.size // left
                group.append(Factor(part.axis, part.stride * inner, left))
                parts.insert(0, Factor(part.axis, part.stride, inner))
                left = 1
            else:
                return None
        out.append(tuple(group))
    return None if parts else tuple(out)


KEEP = {
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "expand_dims": _broadcast,
    "slice": _sliced,
    "dynamic_slice": _sliced,
    "split": _split,
    "convert_element_type": _same,
    "copy": _same,
    "copy_p": _same,
    "reduce_precision": _same,
    "stop_gradient": _same,
    "sharding_constraint": _same,
    "mesh_cast": _same,
    "reshard": _same,
    "layout_constraint": _same,
    "name": _same,
    "pvary": _same,
    "all_gather": lambda axes, eqn: None,
}
"""The primitives that rearrange their first operand: functions of its axes and the equation; None if they are lost."""
