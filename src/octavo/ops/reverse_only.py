"""An identity that raises in forward-mode differentiation.

JAX raises for the forward-mode derivative of a custom_vjp function, under jit when the program is lowered, by an error
that names neither the matmul nor an alternative. The tangents of this identity pass through a primitive of its own
first. Reverse mode transposes it; only forward mode executes, batches or lowers it.
"""

from typing import Any, NoReturn

from jax.extend import core
from jax.interpreters import ad, batching, mlir

from octavo._typing import Array

NAME = "octavo_reverse_only"


def reverse_only(x: Array) -> Array:
    """`x`, which has a gradient but no forward-mode derivative."""
    return _identity.bind(x)


def _raise(*args: Any, **params: Any) -> NoReturn:
    raise NotImplementedError(
        "a quantized matmul has a backward pass of its own, and so no forward-mode derivative (jax.jvp, "
        "jax.linearize, jax.jacfwd, jax.hessian): use jax.vjp, jax.grad or jax.jacrev, or octavo.fake_quant on a float "
        "matmul"
    )


def _jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    return x, t if isinstance(t, ad.Zero) else _tangent.bind(t)


_identity, _tangent = core.Primitive(NAME), core.Primitive(f"{NAME}_tangent")
for _primitive in (_identity, _tangent):
    _primitive.def_abstract_eval(lambda x: x)
batching.defvectorized(_identity)
batching.primitive_batchers[_tangent] = _raise
_identity.def_impl(lambda x: x)
_tangent.def_impl(_raise)
mlir.register_lowering(_identity, lambda ctx, x: [x])
mlir.register_lowering(_tangent, _raise)
ad.primitive_jvps[_identity] = _jvp
ad.deflinear(_tangent, lambda g: [g])
