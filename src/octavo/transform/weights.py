"""Tracking weights through a jaxpr: which parameter a value is, axis by axis, or which module computed it.

A value is a weight if it is computed from parameters and constants only: reshaped, transposed, cast, sliced,
normalized or masked weights are weights, and a row that is looked up by data is not. While a value is only rearranged,
each of its axes is known as factors of the parameter's axes, so that the scales of a matmul's operand can be mapped
to the parameter as it is stored (stacked layers, fused heads, tied embeddings).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from octavo.ops.product import REVERSE_ONLY
from octavo.qarray import Quantizer


class Factor(NamedTuple):
    """A factor of a parameter's axis: the digit of its index with this stride and size."""

    axis: int
    stride: int
    size: int


type Axes = tuple[tuple[Factor, ...], ...]


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of a value: the parameters or the module that it was computed from.

    Attributes:
        leaves: The names of the parameters that it was computed from, if it is a weight; else empty.
        axes: The factors of each axis, if it is one parameter rearranged.
        module: The path of the module that computed it, or that a parameter belongs to.
        constant: Whether it was computed from constants only.
    """

    leaves: tuple[str, ...] = ()
    axes: Axes | None = None
    module: str | None = None
    constant: bool = False

    @property
    def is_stored(self) -> bool:
        """Whether it is one parameter, only rearranged."""
        return len(self.leaves) == 1 and self.axes is not None


CONSTANT = Origin(constant=True)
ACTIVATION = Origin()


def parameter_origin(path: str, shape: Sequence[int]) -> Origin:
    """The origin of a parameter itself."""
    axes = tuple((Factor(axis, 1, size),) for axis, size in enumerate(shape))
    return Origin((path,), axes, path.rpartition("/")[0])


def common_module(origins: Sequence[Origin]) -> str | None:
    """The innermost module that contains the modules of all these values, as far as they are known."""
    modules = list(dict.fromkeys(o.module for o in origins if o.module is not None))
    if len(modules) < 2:
        return modules[0] if modules else None
    shared = []
    for parts in zip(*(module.split("/") for module in modules), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "/".join(shared)


def combine(origins: Sequence[Origin]) -> Origin:
    """The origin of a value that is computed from values of these origins."""
    known = [o for o in origins if not o.constant]
    activations = [o for o in known if not o.leaves]
    if activations:
        return activations[0] if len(activations) == 1 else Origin(module=common_module(activations))
    if not known:
        return CONSTANT
    return Origin(tuple(dict.fromkeys(leaf for o in known for leaf in o.leaves)), None, known[0].module)


def propagate(eqn: Any, origins: Sequence[Origin]) -> list[Origin]:
    """The origins of the results of an equation without a body."""
    name, first = eqn.primitive.name, origins[0] if origins else CONSTANT
    if name in _KEEP and first.leaves:
        axes = None if first.axes is None else _KEEP[name](first.axes, eqn)
        if name == "split" and isinstance(axes, list):
            return [dataclasses.replace(first, axes=a) for a in axes]
        return [dataclasses.replace(first, axes=axes) for _ in eqn.outvars]
    if name == "gather" and first.leaves:
        return [_gathered(first, origins[1], eqn)]
    if name == "select_n" and all(o.leaves for o in origins[1:]):
        # A choice among weights, as vmap makes of a cond whose predicate is batched.
        same = all(o == origins[1] for o in origins[1:])
        return [origins[1] if same else combine(origins[1:])]
    if name in ("optimization_barrier", REVERSE_ONLY):
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
    "stop_gradient": _same,
    "sharding_constraint": _same,
    "mesh_cast": _same,
    "reshard": _same,
    "layout_constraint": _same,
    "name": _same,
    "pvary": _same,
    "all_gather": lambda axes, eqn: None,
}


def _gathered(table: Origin, index: Origin, eqn: Any) -> Origin:
    """Matrices gathered from a stack are weights; rows looked up by data are activations."""
    kept = [size for size in eqn.params["slice_sizes"] if size > 1]
    if len(kept) >= 2 or index.constant or index.leaves:
        return dataclasses.replace(table, axes=None)
    return Origin(module=table.module)


def layer_origin(origin: Origin) -> Origin:
    """The origin of one layer of a stack, in the body of a scan."""
    return origin if origin.axes is None else dataclasses.replace(origin, axes=origin.axes[1:])


def stored_quantizer(quantizer: Quantizer, origin: Origin, shape: Sequence[int], leaf_ndim: int) -> Quantizer | None:
    """The quantizer of a stored parameter with the same codes as `quantizer` on an operand that rearranges it.

    None if there is none, for example where a reshape merged a contracted axis with another one.
    """
    if origin.axes is None:
        return None
    sizes = quantizer.tiles(tuple(shape)).sizes
    grouped: dict[int, list[tuple[Factor, bool]]] = {axis: [] for axis in range(leaf_ndim)}
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
                    grouped[part.axis].append((Factor(part.axis, part.stride, inner), False))
                grouped[part.axis].append((Factor(part.axis, part.stride * inner, -(-part.size // inner)), True))
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
    block = quantizer.qtype.tile
    if block is not None:  # an axis that is not longer than a block is one tile
        tiled |= {axis: block for axis in grouped if axis not in kept and axis not in tiled}
        if any(size != block for size in tiled.values()):
            return None
    return quantizer.replace(channelwise_axes=tuple(kept), tiled_axes=tiled or None)
