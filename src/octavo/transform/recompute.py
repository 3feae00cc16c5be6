"""Which values a backward pass reads from memory, and which it computes again from them."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from octavo.transform.axes import KEEP
from octavo.transform.cut import minimum_cut
from octavo.transform.jaxpr import Equation, Jaxpr, Literal
from octavo.transform.softmax import EXP, softmax_steps

_CHEAP = {
    *KEEP, "abs", "add", "add_any", "and", "asinh", "atan", "atan2", "cbrt", "clamp", "concatenate", "cosh",
    "div", "erf", "erfc", "exp", "exp2", "expm1", "integer_pow", "iota", "log", "log1p", "log2", "logistic", "max",
    "min", "mul", "neg", "not", "one_minus_square", "or", "pad", "pow", "rev", "rsqrt", "select_n", "sinh",
    "sqrt", "square", "sub", "tanh", "xor",
} - {"dynamic_slice", "all_gather"}  # fmt: skip
"""Primitives whose results are computed again.

Comparisons, rounding, sums and random numbers are not, nor the sine of what may be many rounded periods.
"""
_SINGULAR = {"div": 1, "log": 0, "log2": 0, "sqrt": 0, "rsqrt": 0, "cbrt": 0, "pow": 0, "integer_pow": 0}
"""Primitives that are not finite, or have no finite gradient, where this operand is zero."""
_POSITIVE = ("exp", "exp2", "logistic", "cosh")
LARGE_FILL = 1e4
"""A constant at least this large masks values, and would take the whole range of their block."""


class Recomputation(NamedTuple):
    """How the outputs of a jaxpr are computed from some of its values."""

    saved: dict[Any, bool]
    """The values that are stored, and whether as they are."""
    free: tuple[Any, ...]
    """The inputs that are read as they are."""
    equations: tuple[Equation, ...]
    """The equations that compute the outputs from these."""


def recomputation(
    jaxpr: Jaxpr, outputs: Sequence[Any], free: Collection[Any], nbytes: Callable[[Any, bool], float]
) -> Recomputation:
    """What to store of a jaxpr without nested jits, so that these of its values can be computed again.

    Args:
        jaxpr: The jaxpr.
        outputs: The values that are wanted.
        free: The inputs that need not be stored, such as parameters.
        nbytes: The bytes of a stored value, and whether it must be stored as it is.
    """
    flow = _Flow(jaxpr, free)
    wanted = {var for var in outputs if var in flow.varying}
    edges, inputs, stack, seen = [], set(), list(wanted), set(wanted)
    while stack:
        var = stack.pop()
        if flow.is_source(var):
            inputs.add(var)
            continue
        for operand in flow.operands(var):
            edges.append((operand, var))
            if operand not in seen:
                seen.add(operand)
                stack.append(operand)
    order = {var: n for n, var in enumerate([*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)])}
    exact = flow.exact()
    costs = {var: nbytes(var, var in exact) for var in sorted(seen, key=order.__getitem__)}
    saved = minimum_cut(costs, edges, inputs, wanted)
    known, needed, equations = set(saved), {v for v in outputs if not isinstance(v, Literal)}, []
    for eqn in reversed(jaxpr.eqns):
        if any(var in needed and var not in known for var in eqn.outvars):
            equations.append(eqn)
            needed.update(atom for atom in eqn.invars if not isinstance(atom, Literal))
    constant = {*jaxpr.invars, *jaxpr.constvars} - known
    return Recomputation(
        {v: v in exact for v in saved}, tuple(v for v in order if v in needed & constant), tuple(equations[::-1])
    )


class _Flow:
    """The data flow of a jaxpr."""

    def __init__(self, jaxpr: Jaxpr, free: Collection[Any]):
        self.jaxpr = jaxpr
        self.made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.varying = {var for var in jaxpr.invars if var not in free}
        """The values that depend on others than free ones."""
        self._exponentials: set[Any] = set()
        self._filled: set[Any] = set()
        steps: dict[Any, str] = {}
        for eqn in jaxpr.eqns:
            if self.operands(eqn.outvars[0]):
                self.varying.update(eqn.outvars)
            read = ["" if isinstance(atom, Literal) else steps.get(atom, "") for atom in eqn.invars]
            steps.update(zip(eqn.outvars, softmax_steps(eqn, read), strict=True))
            if eqn.primitive.name == "exp" and steps[eqn.outvars[0]] == EXP:
                self._exponentials.add(eqn.outvars[0])

    def operands(self, var: Any) -> list[Any]:
        """The operands of a value that vary."""
        atoms = self.made[var].invars
        return [atom for atom in atoms if not isinstance(atom, Literal) and atom in self.varying]

    def is_source(self, var: Any) -> bool:
        """Whether a value that varies is not computed again."""
        eqn = self.made.get(var)
        return eqn is None or eqn.primitive.name not in _CHEAP or var in self._exponentials

    def exact(self) -> set[Any]:
        """The values that must not be rounded: divisors and the like, and what is masked by a large constant."""
        exact: set[Any] = set()
        for eqn in self.jaxpr.eqns:
            name = eqn.primitive.name
            if name in _SINGULAR and not (name == "integer_pow" and eqn.params["y"] >= 0):
                self._mark_divisor(eqn.invars[_SINGULAR[name]], exact)
            filled = name == "select_n" and any(map(self._is_fill, eqn.invars[1:]))
            spread = name in KEEP or name in ("add", "sub", "concatenate", "pad", "select_n")
            if filled or (spread and any(a in self._filled for a in eqn.invars if not isinstance(a, Literal))):
                self._filled.update(eqn.outvars)
        return exact | self._filled

    def _mark_divisor(self, atom: Any, exact: set[Any]) -> None:
        """Add a divisor, and the values of which it is zero or nearly so where they are, to those that are exact."""
        stack = [atom]
        while stack:
            var = stack.pop()
            if isinstance(var, Literal) or var not in self.varying or var in exact:
                continue
            exact.add(var)
            eqn = self.made.get(var)
            # A positive constant plus a rounded value, such as 1 + exp(-x), is not zero where the exact sum is not.
            shifted = eqn is not None and eqn.primitive.name == "add" and any(map(self._constant, eqn.invars))
            if not self.is_source(var) and eqn is not None and not shifted and eqn.primitive.name not in _POSITIVE:
                stack += eqn.invars

    def _constant(self, atom: Any) -> float:
        """The number that a value is filled with; 0.0 if it is none."""
        while not isinstance(atom, Literal):
            eqn = self.made.get(atom)
            if eqn is None or eqn.primitive.name not in KEEP:
                return 0.0
            atom = eqn.invars[0]
        value: Any = atom.val
        return float(value) if jnp.size(value) == 1 and jnp.issubdtype(jnp.result_type(value), jnp.number) else 0.0

    def _is_fill(self, atom: Any) -> bool:
        return not abs(self._constant(atom)) < LARGE_FILL
