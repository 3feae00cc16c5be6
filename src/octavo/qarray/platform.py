"""How a program runs: the platform that it is lowered for, as a value of the program, and whether it runs eagerly."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import mlir

from octavo._typing import Array

_on_cpu = core.Primitive("octavo_on_cpu")
_on_cpu.def_impl(lambda: jnp.asarray(True))
_on_cpu.def_abstract_eval(lambda: jax.core.ShapedArray((), jnp.dtype(bool)))
mlir.register_lowering(_on_cpu, mlir.lower_fun(lambda: jnp.asarray(False), multiple_results=False))
mlir.register_lowering(_on_cpu, mlir.lower_fun(lambda: jnp.asarray(True), multiple_results=False), platform="cpu")


def on_cpu() -> Array:
    """Whether the program runs on a CPU: a constant after lowering, so that XLA removes what it disables.

    Outside of jit it is True everywhere.
    """
    return _on_cpu.bind()


def is_eager(*trees: Any) -> bool:
    """Whether all leaves are arrays with values, so that a function of them runs primitive by primitive.

    Quantizing is some thirty primitives, each a program of its own when called eagerly. Compiled as one program they
    take a third of the time or less at the first call and a tenth at later ones. Under a trace they are part of its
    program.
    """
    leaves = jax.tree.leaves(trees)
    return all(isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) for x in leaves)
