"""Bilinear maps and their static description.

A `Product` is a bilinear map `out = f(lhs, rhs)`. Its two transposes are bilinear maps of the cotangent and a residual:
`dlhs = f_lhs(g, rhs)` and `drhs = f_rhs(g, lhs)`. A `Product` implements the axes and the operation itself;
quantization, residuals, masks and moving scales between operands are implemented once, in `octavo.ops.vjp`, for
`dot_general`, convolutions and ragged dots (`octavo.ops.products`).
"""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from octavo._typing import Array, Shape
from octavo.ops.config import DotConfig, Matmul
from octavo.ops.operands import ArrayOrQArray, Dims, MatmulOptions
from octavo.qarray import QArray

type Scaling = dict[str, dict[str, Array]]
"""External ranges: per operand ("lhs", "rhs", "dlhs", "drhs") bounds, or the state of its tracker."""


class Product:
    """A bilinear map: the axes of its operands, its computation, and its transposes.

    Subclasses are frozen dataclasses, so that a product is hashable and compares by value. Operands that are not
    differentiated (`extra`: the group sizes of a ragged dot) follow the other two.
    """

    op: ClassVar[str]
    """The name of the operation in rules."""
    primitive: ClassVar[str]
    """The JAX primitive of this operation."""
    has_placement: ClassVar[bool] = True
    """Whether the weight can be all-gathered, and its gradient reduced, in low precision."""
    has_explicit_shardings: ClassVar[bool] = True
    """Whether gradients are resharded on meshes with explicit axes."""
    residual_dtype: ClassVar[Any] = jnp.float32
    """The dtype of a dequantized residual; None for the operand's dtype."""

    if TYPE_CHECKING:

        @property
        def dims(self) -> Dims:
            """The axes of both operands, for quantizing them."""

    @property
    def params(self) -> dict[str, Any]:
        """The equivalent parameters of the JAX primitive."""
        raise NotImplementedError

    def check(self, config: DotConfig) -> None:
        """Raise if this operation does not support the config."""

    def out_shape(self, lhs: Shape, rhs: Shape) -> Shape:
        raise NotImplementedError

    def transpose(self, of_lhs: bool) -> "Transpose":
        """The map from (cotangent, residual) to the gradient of an operand."""
        raise NotImplementedError

    def multiply(self, lhs: ArrayOrQArray, rhs: ArrayOrQArray, *extra: Array, options: MatmulOptions) -> Array:
        raise NotImplementedError


class Transpose(Product):
    """A transposed product: its operands are the cotangent and a residual."""

    def arrange_residual(self, residual: ArrayOrQArray) -> ArrayOrQArray:
        """The residual in the layout in which it is quantized and multiplied."""
        return residual

    def fold(self, g: Array, residual: QArray, *extra: Array, quantized: bool) -> Any:
        """(cotangent, residual) with a scale along the contraction moved into the cotangent; None if impossible.

        `quantized`: whether the cotangent is quantized, so that both operands are codes.
        """
        raise NotImplementedError

    def quantize_by_group(
        self, matmul: Matmul, g: Any, residual: Any, *extra: Array, keys: Any, scaling: Scaling, name: str
    ) -> tuple[Matmul, Any, Any, dict[str, Any], tuple[Array, ...]]:
        """Quantize operands with scales per group, if there are groups.

        Returns:
          What remains to be quantized, both operands, their telemetry, and scales of the result.
        """
        del extra, keys, scaling, name
        return matmul, g, residual, {}, ()

    def gradient_dtype(self, out: Any, operand: Any, accumulator: str | None) -> Any:
        """The dtype in which a gradient is computed before it is cast to its operand's dtype."""
        del out, operand, accumulator
        return jnp.float32

    def reduce(
        self,
        reduction: Any,
        lhs: ArrayOrQArray,
        rhs: ArrayOrQArray,
        *extra: Array,
        options: MatmulOptions,
        scaling: Scaling,
        scales: tuple[Array, ...],
    ) -> tuple[Array, dict[str, Any]] | None:
        """The gradient reduced over devices in low precision, and updates of `scaling`; None if nothing is reduced."""
        raise NotImplementedError


class Placement(NamedTuple):
    """The low-precision collectives of a weight, from `octavo.distributed`.

    `gather` (a `WeightGather`) all-gathers its codes; `reduction` (a `GradReduce`) reduces its gradient over devices in
    low precision.
    """

    gather: Any = None
    reduction: Any = None


UNPLACED = Placement()
"""The placement of a weight whose collectives, if any, are left to XLA."""


# A custom_vjp function is an opaque call in a jaxpr: neither its axes nor its config are visible. The body of each
# product ends with an identity primitive whose parameters hold the static arguments of the call. With them,
# hand-written calls of Octavo's operations are planned, and served with QArray weights, like any other matmul.
_marker = core.Primitive("octavo_product")
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
    shapes: tuple[Shape, ...]


def mark(out: Array, call: Any, args: tuple[Any, ...]) -> Array:
    """`out`, marked as the result of `call.run(*args)`."""
    leaves, tree = jax.tree.flatten(args)
    return _marker.bind(out, product=ProductCall(call, tree, tuple(tuple(x.shape) for x in leaves)))


def marked_product(body: Any) -> ProductCall | None:
    """The `ProductCall` that the body of a custom_vjp function computes; None if there is none."""
    last = body.eqns[-1] if body.eqns else None
    return last.params["product"] if last is not None and last.primitive is _marker else None


# JAX raises for the forward-mode derivative of a custom_vjp function, under jit when the program is lowered, by an
# error that names neither the matmul nor an alternative. The tangents of operands pass through a primitive of its own
# first. Reverse mode transposes it; only forward mode executes, batches or lowers it.
REVERSE_ONLY = "octavo_reverse_only"
"""The name of the identity that raises in forward-mode differentiation."""


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


_identity, _tangent = core.Primitive(REVERSE_ONLY), core.Primitive(f"{REVERSE_ONLY}_tangent")
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
