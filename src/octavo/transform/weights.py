"""Where a value comes from: which weight it is, axis by axis, or which module computed it.

A value is a weight as long as nothing but parameters and constants went into it: reshaped, transposed, cast, sliced,
normalized or masked weights are weights, and a row looked up by data is not. While it is only rearranged, each of its
axes is known as factors of the parameter's own axes, so that scales chosen for the product can be laid out for the
parameter as it is stored (stacked layers, fused heads, tied tables).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from octavo.qarray import Quantizer


class Part(NamedTuple):
    """A part of a parameter's axis: of its index, the digit with this stride and size."""

    axis: int
    stride: int
    size: int


type Axes = tuple[tuple[Part, ...], ...]


@dataclasses.dataclass(frozen=True)
class Origin:
    """What is known, before anything runs, about where a value comes from."""

    leaves: tuple[str, ...] = ()
    axes: Axes | None = None
    module: str | None = None
    constant: bool = False

    @property
    def is_weight(self) -> bool:
        return bool(self.leaves)

    @property
    def is_stored(self) -> bool:
        """Whether it is one parameter, rearranged and nothing else."""
        return len(self.leaves) == 1 and self.axes is not None


CONSTANT = Origin(constant=True)
ACTIVATION = Origin()


def of_leaf(path: str, shape: Sequence[int], module: str | None = None) -> Origin:
    """The origin of a parameter itself."""
    axes = tuple((Part(axis, 1, size),) for axis, size in enumerate(shape))
    return Origin((path,), axes, path.rpartition("/")[0] if module is None else module)


def common_module(origins: Sequence[Origin]) -> str | None:
    """The innermost module that all these values belong to, of those that say."""
    paths = [o.module.split("/") for o in origins if o.module is not None]
    if not paths:
        return None
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "/".join(shared)


def combine(origins: Sequence[Origin]) -> Origin:
    """The origin of something computed from values of these origins."""
    if all(o.constant for o in origins):
        return CONSTANT
    known = [o for o in origins if not o.constant]
    if all(o.is_weight for o in known):
        leaves = tuple(dict.fromkeys(leaf for o in known for leaf in o.leaves))
        return Origin(leaves, None, known[0].module)
    return Origin(module=common_module([o for o in known if not o.is_weight]))


def flow(eqn: Any, origins: Sequence[Origin]) -> list[Origin]:
    """The origins of an equation's results; `eqn` has no body that is looked into."""
    name, first = eqn.primitive.name, origins[0] if origins else CONSTANT
    if name in _KEEP and first.is_weight:
        axes = None if first.axes is None else _KEEP[name](first.axes, eqn)
        if name == "split" and isinstance(axes, list):
            return [dataclasses.replace(first, axes=a) for a in axes]
        return [dataclasses.replace(first, axes=axes) for _ in eqn.outvars]
    if name == "gather" and first.is_weight:
        return [_gathered(first, origins[1], eqn)]
    if name == "optimization_barrier":
        return list(origins)
    out = combine(origins)
    return [out] * len(eqn.outvars)


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
    """Axes cut to other lengths: one part can be cut, several merged ones cannot."""
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
    """Factors regrouped into the new shape, split where a new axis ends inside one."""
    if eqn.params.get("dimensions") is not None:
        return None
    parts = [p for axis in axes for p in axis if p.size != 1]
    out: list[tuple[Part, ...]] = []
    for size in eqn.outvars[0].aval.shape:
        group: list[Part] = []
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
                group.append(Part(part.axis, part.stride * inner, left))
                parts.insert(0, Part(part.axis, part.stride, inner))
                left = 1
            else:
                return None
        out.append(tuple(group))
    return None if parts else tuple(out)


_KEEP = {
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
    "sharding_constraint": _same,
    "mesh_cast": _same,
    "reshard": _same,
    "layout_constraint": _same,
    "name": _same,
    "pvary": _same,
    "all_gather": lambda axes, eqn: None,
}


def _gathered(table: Origin, index: Origin, eqn: Any) -> Origin:
    """Matrices picked from a stack are weights still; rows looked up by data are activations."""
    kept = [size for size in eqn.params["slice_sizes"] if size > 1]
    if len(kept) >= 2 or index.constant or index.is_weight:
        return dataclasses.replace(table, axes=None)
    return Origin(module=table.module)


def scanned(origin: Origin) -> Origin:
    """One layer of a stack, as the body of a loop sees it."""
    return origin if origin.axes is None else dataclasses.replace(origin, axes=origin.axes[1:])


def stored_quantizer(how: Quantizer, origin: Origin, shape: Sequence[int], leaf_ndim: int) -> Quantizer | None:
    """A quantizer of a product's operand, laid out for the parameter that the operand was rearranged from.

    None if no layout of the parameter gives the same groups, for example where a reshape put a kept axis inside a
    contracted one.
    """
    if origin.axes is None:
        return None
    sizes = how.tiles(tuple(shape)).sizes
    grouped: dict[int, list[tuple[Part, bool]]] = {axis: [] for axis in range(leaf_ndim)}
    for axis, parts in enumerate(origin.axes):
        inner = sizes[axis]
        for part in reversed(parts):
            if part.size <= inner:
                if inner % part.size:
                    return None
                grouped[part.axis].append((part, False))
                inner //= part.size
            elif part.size % inner and part.stride > 1:
                return None
            else:
                if inner > 1:
                    grouped[part.axis].append((Part(part.axis, part.stride, inner), False))
                grouped[part.axis].append((Part(part.axis, part.stride * inner, -(-part.size // inner)), True))
                inner = 1
    kept, tiled = [], {}
    for axis, parts in grouped.items():
        parts = sorted(parts, key=lambda p: p[0].stride)
        roles = [own for _, own in parts]
        if roles != sorted(roles):
            return None
        shared = [part for part, own in parts if not own]
        if not shared:
            kept.append(axis)
        elif True in roles:
            tiled[axis] = math.prod(part.size for part in shared)
    return how.replace(channelwise_axes=tuple(kept), tiled_axes=tiled or None)
