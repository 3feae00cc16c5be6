"""Tracking weights through a jaxpr: which parameter a value is, axis by axis, or which module computed it.

A value is a weight if it is computed from parameters and constants only: reshaped, transposed, cast, sliced,
normalized or masked weights are weights, and a row that is looked up by data is not. While a value is only rearranged,
each of its axes is known as factors of the parameter's axes, so that the scales of a matmul's operand can be mapped
to the parameter as it is stored (stacked layers, fused heads, tied embeddings).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from octavo.ops.product import REVERSE_ONLY
from octavo.qarray import Quantizer
from octavo.transform.axes import KEEP, Axes, Factor
from octavo.transform.softmax import softmax_steps


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of a value: the parameters or the module that it was computed from.

    Attributes:
        leaves: The names of the parameters that it was computed from, if it is a weight; else empty.
        axes: The factors of each axis, if it is one parameter rearranged.
        module: The path of the module that computed it, or that a parameter belongs to.
        constant: Whether it was computed from constants only.
        softmax: The step of a softmax that it is, of those in `octavo.transform.softmax`; else empty.
    """

    leaves: tuple[str, ...] = ()
    axes: Axes | None = None
    module: str | None = None
    constant: bool = False
    softmax: str = ""

    @property
    def is_stored(self) -> bool:
        """Whether it is one parameter, only rearranged."""
        return len(self.leaves) == 1 and self.axes is not None


CONSTANT = Origin(constant=True)
ACTIVATION = Origin()


def parameter_origin(path: str, shape: Sequence[int]) -> Origin:
    """The origin of a parameter itself."""
    return Origin((path,), tuple((Factor(axis, 1, n),) for axis, n in enumerate(shape)), path.rpartition("/")[0])


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
    results, steps = _propagate(eqn, origins), softmax_steps(eqn, [o.softmax for o in origins])
    return [o if o.softmax == s else dataclasses.replace(o, softmax=s) for o, s in zip(results, steps, strict=True)]


def _propagate(eqn: Any, origins: Sequence[Origin]) -> list[Origin]:
    name, first = eqn.primitive.name, origins[0] if origins else CONSTANT
    if name in KEEP and first.leaves:
        axes = None if first.axes is None else KEEP[name](first.axes, eqn)
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
