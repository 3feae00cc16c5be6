"""Lowerings of quantized dots: a registry in which each lowering reports whether it applies, or the reason it does not.

| `lowering=` | what runs |
|---|---|
| "auto" | the first of the others that applies and pays off, decided when the program is lowered for a platform |
| "plain" | XLA's dot, unchanged (`xla.py`; ragged dots: `lax.ragged_dot_general`) |
| "rows" | XLA's dot, in the form that is fast on CPUs (`xla.py`, `split_float.py`; ragged dots: loop over row blocks) |
| "kernel" | the native CPU kernels, for a few rows and a large matrix (`cpu_ffi.py`) |
| "scaled" | `lax.scaled_dot` of mxfp8, mxfp4 and nvfp4, which "auto" uses on NVIDIA GPUs (`block_scaled.py`) |
| "tokamax" | tokamax's ragged dot, on TPUs and GPUs (`tokamax.py`) |

All are bit-exact for integers. Forcing a lowering that does not apply raises, with the reason.
"""

import math

import jax
import jax.numpy as jnp

from octavo._names import unknown_name
from octavo._typing import Array
from octavo.numerics import BlockFormat
from octavo.ops.lowerings.block_scaled import BlockScaled
from octavo.ops.lowerings.cpu_ffi import FEWEST_WEIGHTS, CpuFfi
from octavo.ops.lowerings.split_float import SplitFloat
from octavo.ops.lowerings.xla import Xla
from octavo.ops.operands import ArrayOrQArray, Dims, DotProblem, MatmulOptions, at_least
from octavo.qarray import QArray

type Lowering = BlockScaled | CpuFfi | SplitFloat | Xla
"""A lowering of a quantized dot: it can `run` and `describe` a problem; some give a `reason` why they do not apply."""

KERNEL, SCALED, SPLIT_FLOAT = CpuFfi(), BlockScaled(), SplitFloat()
XLA = {name: Xla(name) for name in ("auto", "plain", "rows")}
NAMES = (*XLA, "kernel", "scaled", "tokamax")


def lowerings() -> tuple[str, ...]:
    """The names of the lowerings that a config can force."""
    return NAMES


def check_name(name: str) -> None:
    """Raise for an unknown lowering."""
    if name not in NAMES:
        raise ValueError(f"lowering is one of {NAMES}, got {name!r}: {unknown_name(name, NAMES)}")


def multiply(lhs: ArrayOrQArray, rhs: ArrayOrQArray, dims: Dims, options: MatmulOptions) -> Array:
    """The dot of two operands, each an array or a QArray, in `options.dtype`."""
    if 0 in (*lhs.shape, *rhs.shape):
        lhs, rhs = (x.dequantize(options.dtype) if isinstance(x, QArray) else x for x in (lhs, rhs))
    if not isinstance(lhs, QArray) and not isinstance(rhs, QArray):
        check_name(options.lowering)
        lhs, rhs = (_in_bytes(x) for x in (lhs, rhs))
        kinds = {"precision": options.precision, "preferred_element_type": options.dtype}
        return jax.lax.dot_general(lhs, rhs, dims.numbers, **kinds, out_sharding=options.out_sharding)
    problem = DotProblem(lhs, rhs, dims, options)
    return choose(problem).run(problem)


def _in_bytes(x: Array) -> Array:
    """int8 for narrower integers, of which XLA has no dot on CPUs and GPUs."""
    narrow = jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8
    return x.astype(jnp.int8) if narrow else x


def choose(p: DotProblem) -> Lowering:
    """Choose the lowering of a dot; raises with the reason if a forced one does not apply."""
    name = p.options.lowering
    if name in ("kernel", "scaled", "tokamax"):
        forced = SCALED if name == "scaled" else KERNEL
        reason = "it is for ragged dots" if name == "tokamax" else forced.reason(p)
        if reason is not None:
            raise ValueError(f"lowering={name!r}: {reason}; lowering='auto' takes another way where it must")
        return forced
    if name not in XLA:
        check_name(name)
    if name == "auto" and at_least(math.prod(p.rhs.shape), FEWEST_WEIGHTS) and KERNEL.reason(p) is None:
        return KERNEL
    if name == "auto" and isinstance(getattr(p.rhs, "qtype", None), BlockFormat) and SCALED.reason(p) is None:
        return SCALED
    if name != "plain" and not isinstance(p.lhs, QArray) and SPLIT_FLOAT.reason(p) is None:
        return SPLIT_FLOAT
    return XLA[name]


def describe(lhs: ArrayOrQArray, rhs: ArrayOrQArray, dims: Dims, lowering: str = "auto") -> str:
    """A short description of the lowering that `multiply` chooses."""
    problem = DotProblem(lhs, rhs, dims, MatmulOptions(None, lowering=lowering))
    return choose(problem).describe(problem)
