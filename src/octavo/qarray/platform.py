"""The platform that a program is lowered for, as a value of the program."""

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
