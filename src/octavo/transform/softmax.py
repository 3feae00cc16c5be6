"""Recognizing attention in a jaxpr: the softmax of a matmul of two activations.

    S = Q K^T,   E = exp(S - max S),   P = E / sum E,   O = P V   or   O = (E V) / sum E

Steps are followed in both directions: from the scores S to the softmax, to prove that what is added to a row of scores
does not change the result, and from the softmax to its matmul with V, to know the range of its operand.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from octavo._typing import Array
from octavo.transform.axes import KEEP, Axes, axes_of
from octavo.transform.jaxpr import CUSTOM, Equation, Jaxpr, Literal, bodies

MAX, SHIFTED, EXP, NORMALIZED = "max", "shifted", "exp", "normalized"
"""Steps of a softmax: max S; S - max S; its exponential, in [0, 1]; the exponential divided, masked or scaled."""


def softmax_steps(eqn: Equation, steps: Sequence[str]) -> list[str]:
    """The steps of a softmax that the results of an equation are, by those of its operands; empty for others."""
    body = called_body(eqn)
    if body is None:
        return [_step(eqn.primitive.name, steps)] * len(eqn.outvars)
    known = dict(zip(body.invars, steps, strict=True))
    read = lambda atom: "" if isinstance(atom, Literal) else known.get(atom, "")  # noqa: E731
    for each in body.eqns:
        known.update(zip(each.outvars, softmax_steps(each, [read(atom) for atom in each.invars]), strict=True))
    return [read(atom) for atom in body.outvars]


def called_body(eqn: Equation) -> Jaxpr | None:
    """The body of a call, such as that of `jnp.where`."""
    inner = bodies(eqn) if eqn.primitive.name in ("jit", *CUSTOM) else []
    return inner[0] if len(inner) == 1 and len(inner[0].invars) == len(eqn.invars) else None


def _step(name: str, steps: Sequence[str]) -> str:
    first, second = (*steps, "", "")[:2]
    if name in KEEP:
        return first
    if name == "reduce_max" or (name == "max" and MAX in (first, second)):
        return MAX
    if name == "sub":
        return SHIFTED if second == MAX else ""
    if name == "exp":
        return EXP if first == SHIFTED else ""
    if (name == "div" and first in (EXP, NORMALIZED)) or (name == "mul" and {EXP, NORMALIZED} & {first, second}):
        return NORMALIZED
    if name == "select_n":  # masked: the other case is a constant
        chosen = {step for step in steps[1:] if step}
        return chosen.pop() if len(chosen) == 1 else ""
    return ""


def find_keys(jaxpr: Jaxpr) -> dict[int, int]:
    """The equations that compute scores whose only use is a softmax, and the operand with the keys: 0 or 1.

    Scores may be scaled, masked and added to. With a cap, or with sinks in the softmax, they are not found.
    """
    found = {n: _Scores(jaxpr, n).keys for n, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "dot_general"}
    return {n: keys for n, keys in found.items() if keys is not None}


def center(keys: Array, kept: Sequence[int]) -> Array:
    """Keys minus their mean over tokens, all axes but those kept.

    It adds one number to each row of scores. The softmax does not depend on it, and so the mean has no gradient.
    """
    axes = tuple(axis for axis in range(keys.ndim) if axis not in kept)
    mean = jnp.mean(keys, axis=axes, keepdims=True, dtype=jnp.float32)
    return keys - jax.lax.stop_gradient(mean.astype(keys.dtype))


class _Scores:
    """Follows the result of a matmul to a softmax."""

    def __init__(self, jaxpr: Jaxpr, n: int):
        out: Any = jaxpr.eqns[n].outvars[0]
        self.axes: dict[Any, Axes] = {out: axes_of(out.aval.shape)}
        """Scores, each axis as factors of the matmul's."""
        self.tops: set[Any] = set()
        """Largest scores of rows."""
        self.reduced: set[int] = set()
        """The axes of the matmul over which the largest were taken."""
        done = self.follow(jaxpr.eqns[n + 1 :]) and self.is_softmax
        used = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
        done = done and not used & (self.axes.keys() | self.tops)
        self.keys = self._side(jaxpr.eqns[n]) if done else None

    is_softmax = False

    def _side(self, eqn: Any) -> int | None:
        (contract, _), (batch, _) = eqn.params["dimension_numbers"]
        first, shape = len(eqn.invars[0].aval.shape) - len(contract), eqn.outvars[0].aval.shape
        sides = set(range(len(batch), first)), set(range(first, len(shape)))
        return next((n for n in (1, 0) if self.reduced and self.reduced <= sides[n]), None)

    def follow(self, eqns: Iterable[Any]) -> bool:
        """Whether all uses of scores and of their largest values belong to a softmax."""
        for eqn in eqns:
            read = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
            if not any(atom in self.axes or atom in self.tops for atom in read):
                continue
            body = called_body(eqn)
            if not (self._use(eqn) if body is None else self._call(eqn, body)):
                return False
        return True

    def _call(self, eqn: Any, body: Jaxpr) -> bool:
        pairs = [pair for pair in zip(eqn.invars, body.invars, strict=True) if not isinstance(pair[0], Literal)]
        self.axes |= {inner: self.axes[outer] for outer, inner in pairs if outer in self.axes}
        self.tops |= {inner for outer, inner in pairs if outer in self.tops}
        if not self.follow(body.eqns):
            return False
        results = [pair for pair in zip(body.outvars, eqn.outvars, strict=True) if not isinstance(pair[0], Literal)]
        self.axes |= {outer: self.axes[inner] for inner, outer in results if inner in self.axes}
        self.tops |= {outer for inner, outer in results if inner in self.tops}
        return True

    def _use(self, eqn: Any) -> bool:
        name, out, first = eqn.primitive.name, eqn.outvars[0], eqn.invars[0]
        scores = [atom for atom in eqn.invars if not isinstance(atom, Literal) and atom in self.axes]
        tops = [atom for atom in eqn.invars if not isinstance(atom, Literal) and atom in self.tops]
        if name == "sub" and len(scores) == len(tops) == 1 and first is scores[0]:
            self.is_softmax = True
            return True
        if tops:
            others = [atom for atom in eqn.invars if atom is not tops[0]]
            self.tops.add(out)
            return not scores and (name in KEEP or (name == "max" and isinstance(others[0], Literal)))
        if len(scores) > 1 or len(eqn.outvars) > 1:
            return False
        axes, shape = self.axes[scores[0]], scores[0].aval.shape
        if name == "reduce_max":
            self.tops.add(out)
            self.reduced |= {factor.axis for axis in eqn.params["axes"] for factor in axes[axis]}
            return True
        others = [atom for atom in eqn.invars if atom is not scores[0]]
        scaled = name == "mul" or (name == "div" and first is scores[0])
        if scaled and max(others[0].aval.shape, default=1) > 1:
            return False
        if name in KEEP:
            axes = KEEP[name](axes, eqn)
        elif not (scaled or name == "add" or (name == "select_n" and first is not scores[0])):
            return False
        if axes is None or (name not in KEEP and out.aval.shape != shape):
            return False
        self.axes[out] = axes
        return True


def softmax_operand(origins: Sequence[Any]) -> tuple[str, bool] | None:
    """Of a matmul with the result of a softmax: whether it is "exp" or "normalized", and the right operand."""
    found = ((origin.softmax, right) for origin, right in zip(origins, (False, True), strict=True))
    return next((each for each in found if each[0] in (EXP, NORMALIZED)), None)
