"""An identity primitive whose parameters hold the description of a product, so that it is recognised in a jaxpr.

A custom_vjp function is opaque to a program that reads jaxprs: neither its axes nor its config can be seen. The body of
each product of ours ends with this primitive, and the object in its parameters says what is static about the product.
With it, products that were written by hand are planned, and served with weights that are QArrays, as any other.
"""

import dataclasses
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from octavo._typing import Array

NAME = "octavo_product"
_marker = core.Primitive(NAME)
_marker.def_impl(lambda x, **_: x)
_marker.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_marker, lambda ctx, x, **_: [x])
ad.deflinear(_marker, lambda g, **_: [g])
batching.primitive_batchers[_marker] = lambda args, dims, **params: (_marker.bind(*args, **params), dims[0])


@dataclasses.dataclass(frozen=True)
class ProductCall:
    """What is static about one call of a product of ours."""

    call: Any
    """Has `op`, `primitive` and `params`, `config` (None: written in float, and left to rules), and `run(*args)`."""
    tree: Any
    """The structure of its arguments: lhs, rhs and whatever follows."""
    shapes: tuple[tuple[int, ...], ...]


def mark(out: Array, call: Any, args: tuple[Any, ...]) -> Array:
    """`out`, which `call.run(*args)` computed, marked as such."""
    leaves, tree = jax.tree.flatten(args)
    return _marker.bind(out, product=ProductCall(call, tree, tuple(tuple(x.shape) for x in leaves)))


def marked_product(body: Any) -> ProductCall | None:
    """The product of ours that the body of a custom_vjp function computes; None if it does not."""
    last = body.eqns[-1] if body.eqns else None
    return last.params["product"] if last is not None and last.primitive is _marker else None
