"""Lowerings of quantized dots: a registry in which each lowering reports whether it applies, or the reason it does not.

| `lowering=` | what runs |
|---|---|
| "auto" | the first of the others that applies and pays off, decided when the program is lowered for a platform |
| "plain" | XLA's dot, unchanged (`xla.py`; ragged dots: `lax.ragged_dot_general`) |
| "rows" | XLA's dot, in the form that is fast on CPUs (`xla.py`, `split_float.py`; ragged dots: loop over row blocks) |
| "kernel" | the native CPU kernels, for a few rows and a large matrix (`cpu_ffi.py`) |
| "tokamax" | tokamax's ragged dot, on TPUs and GPUs (`tokamax.py`) |

All are bit-exact for integers. Forcing a lowering that does not apply raises, with the reason.
"""

from typing import Any, Protocol, runtime_checkable

import jax

from octavo._names import unknown_name
from octavo._typing import Array
from octavo.ops.codes import ArrayOrQArray
from octavo.ops.dims import Dims
from octavo.ops.lowerings.cpu_ffi import CpuFfi
from octavo.ops.lowerings.problem import DotProblem
from octavo.ops.lowerings.split_float import SplitFloat
from octavo.ops.lowerings.xla import Xla
from octavo.qarray import QArray


@runtime_checkable
class Lowering(Protocol):
    """A lowering of a quantized dot."""

    name: str

    def reason(self, p: DotProblem) -> str | None:
        """The reason it does not apply; None if it does."""
        ...

    def is_default(self, p: DotProblem) -> bool:
        """Whether "auto" chooses it where it applies."""
        ...

    def run(self, p: DotProblem) -> Array: ...

    def describe(self, p: DotProblem) -> str:
        """A short description for the plan."""
        ...


LOWERINGS: dict[str, tuple[Lowering, ...]] = {
    "auto": (CpuFfi(), SplitFloat(), Xla("auto")),
    "plain": (Xla("plain"),),
    "rows": (SplitFloat(), Xla("rows")),
    "kernel": (CpuFfi(),),
}
NAMES = (*LOWERINGS, "tokamax")


def lowerings() -> tuple[str, ...]:
    """The names of the lowerings that a config can force."""
    return NAMES


def check_name(name: str) -> None:
    """Raise for an unknown lowering."""
    if name not in NAMES:
        raise ValueError(f"lowering is one of {NAMES}, got {name!r}: {unknown_name(name, NAMES)}")


def multiply(
    lhs: ArrayOrQArray,
    rhs: ArrayOrQArray,
    dims: Dims,
    *,
    dtype: Any,
    precision: Any = None,
    out_sharding: Any = None,
    lowering: str = "auto",
    accumulator: str | None = None,
) -> Array:
    """The dot of two operands, each an array or a QArray, in `dtype`."""
    if not isinstance(lhs, QArray) and not isinstance(rhs, QArray):
        check_name(lowering)
        return jax.lax.dot_general(
            lhs, rhs, dims.numbers, precision=precision, preferred_element_type=dtype, out_sharding=out_sharding
        )
    problem = DotProblem(lhs, rhs, dims, dtype, precision, out_sharding, accumulator)
    return choose(problem, lowering).run(problem)


def choose(problem: DotProblem, name: str) -> Lowering:
    """Choose the lowering of a dot; raises with the reason if a forced one does not apply."""
    check_name(name)
    reason = "it is for ragged dots"
    for lowering in LOWERINGS.get(name, ()):
        reason = lowering.reason(problem)
        if reason is None and (name == lowering.name or lowering.is_default(problem)):
            return lowering
    raise ValueError(f"lowering={name!r}: {reason}; lowering='auto' takes another way where it must")


def describe(lhs: ArrayOrQArray, rhs: ArrayOrQArray, dims: Dims, lowering: str = "auto") -> str:
    """A short description of the lowering that `multiply` chooses."""
    problem = DotProblem(lhs, rhs, dims, None)
    return choose(problem, lowering).describe(problem)
