"""Recognizing a causal mask among values that depend on constants only."""

from typing import Any, NamedTuple

from octavo.transform.axes import KEEP, Axes, Factor
from octavo.transform.jaxpr import Equation

REARRANGED = {name: axes for name, axes in KEEP.items() if "slice" not in name and name != "split"}
"""The primitives that keep all values; of a slice, `KEEP` does not know where it starts."""


class Mask(NamedTuple):
    """A value of constants: a "number", "positions" along axis 0, or a "triangle": row (0) >= column (1)."""

    kind: str
    axes: Axes = ()
    number: float = 0.0


def mask_of(eqn: Equation, found: list[Any]) -> Mask | None:
    """What an equation without scores computes from constants; None if it is something else."""
    name = eqn.primitive.name
    out: Any = eqn.outvars[0].aval
    if name == "iota":
        places = (Factor(0, 1, out.shape[eqn.params["dimension"]]),)
        return Mask("positions", tuple(places if a == eqn.params["dimension"] else () for a in range(out.ndim)))
    if not found or not all(isinstance(x, Mask) for x in found):
        return None
    first: Mask = found[0]
    second: Mask = found[1] if len(found) > 1 else first
    numbers = [x.number for x in found if x.kind == "number"]
    if name == "broadcast_in_dim":
        places = eqn.params["broadcast_dimensions"]
        axes = tuple(first.axes[places.index(a)] if a in places and first.axes else () for a in range(out.ndim))
        return first._replace(axes=axes) if first.kind != "number" else first
    if name in REARRANGED:
        axes = REARRANGED[name](first.axes, eqn) if first.axes else ()
        return None if axes is None else first._replace(axes=axes)
    if name == "add" and first.kind == "positions" and numbers:
        return first._replace(number=first.number + numbers[0])
    if name in ("ge", "le") and first.kind == second.kind == "positions" and first.number == second.number:
        row, column = (first, second) if name == "ge" else (second, first)
        axes = tuple(r or tuple(f._replace(axis=1) for f in c) for r, c in zip(row.axes, column.axes, strict=True))
        return Mask("triangle", axes) if sum(map(bool, axes)) == 2 else None
    if name == "and" and len(numbers) == 1 and numbers[0]:
        return first if second.kind == "number" else second
    if name == "and" and len(numbers) == 2:
        return Mask("number", (), float(all(numbers)))
    if name == "select_n" and first.kind == "triangle" and numbers == [0.0, 1.0]:
        return first
    return None
