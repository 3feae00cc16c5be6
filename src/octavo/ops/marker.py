"""An identity primitive whose parameters describe a `Product` call, so that it can be recognised in a jaxpr.

A custom_vjp function is an opaque call in a jaxpr: neither its axes nor its config are visible. The body of each
`Product` ends with this primitive, whose parameters hold the static arguments of the call. With them, hand-written
calls of Octavo's operations are planned, and served with QArray weights, like any other matmul.
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
    """The static description of one call of a `Product`."""

    call: Any
    """Has `op`, `primitive`, `params`, `config` (None: a float call, to which rules apply) and `run(*args)`."""
    tree: Any
    """The tree structure of its arguments: lhs, rhs and any others."""
    shapes: tuple[tuple[int, ...], ...]


def mark(out: Array, call: Any, args: tuple[Any, ...]) -> Array:
    """`out`, marked as the result of `call.run(*args)`."""
    leaves, tree = jax.tree.flatten(args)
    return _marker.bind(out, product=ProductCall(call, tree, tuple(tuple(x.shape) for x in leaves)))


def marked_product(body: Any) -> ProductCall | None:
    """The `ProductCall` that the body of a custom_vjp function computes; None if there is none."""
    last = body.eqns[-1] if body.eqns else None
    return last.params["product"] if last is not None and last.primitive is _marker else None
