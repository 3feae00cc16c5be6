"""A stored parameter as the matrices of its matmul: [matrices, inputs, outputs]."""

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp

from octavo._typing import Array, Float, Shaped
from octavo.transform import Site
from octavo.transform.site import operand_axes
from octavo.transform.weights import Factor


@dataclasses.dataclass(frozen=True)
class MatrixView:
    """How the axes of a parameter make up a stack of matrices, whose rows are the inputs of a matmul.

    Attributes:
        digits: The axes of the parameter, split where the matmul takes them apart.
        order: The split axes in the order stack, inputs, outputs.
        stack: The number of layers of each loop that the parameter is stacked for.
        shape: (matrices, inputs, outputs).
    """

    digits: tuple[int, ...]
    order: tuple[int, ...]
    stack: tuple[int, ...]
    shape: tuple[int, int, int]

    def matrices(self, x: Shaped[Array, "..."]) -> Shaped[Array, "s k n"]:
        """An array of the parameter's shape as matrices."""
        return x.reshape(self.digits).transpose(self.order).reshape(self.shape)

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raise unless a parameter of this shape has these matrices."""
        if math.prod(shape) != math.prod(self.shape):
            raise ValueError(
                f"the statistics of {name!r} are for {self.shape} weights, but its shape is {tuple(shape)}"
            )

    def restore(self, x: Shaped[Array, "s k n"], shape: Sequence[int]) -> Shaped[Array, "..."]:
        """The inverse of `matrices`."""
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return x.reshape([self.digits[i] for i in self.order]).transpose(inverse).reshape(tuple(shape))

    def by_input(self, x: Float[Array, "s k"], shape: Sequence[int]) -> Float[Array, "..."]:
        """A number for each input of each matrix, in the shape of the parameter."""
        return self.restore(jnp.broadcast_to(x[..., None], self.shape), shape)


def matrix_view(site: Site, shape: Sequence[int]) -> MatrixView | str:
    """The parameter of this shape as matrices of a matmul, or the reason why it is none."""
    right = site.weights[1]
    origin = site.origins[right]
    if site.op == "conv_general_dilated":
        return "a convolution is not calibrated"
    if not origin.is_stored or origin.axes is None:
        return "the weight is computed from several parameters, or by more than a rearrangement"
    roles = operand_axes(site.params, site.lhs[0], site.rhs[0])[right]
    # The experts of a ragged dot are matrices of their own, as the indices of a batch axis are.
    ragged = site.params.get("ragged_dot_dimension_numbers")
    batch = (*roles["batch"], *(() if ragged is None else ragged.rhs_group_dimensions))
    used = (*batch, *roles["contracting"])
    free = [a for a in range(len(origin.axes)) if a not in used]
    parts = [[f for a in axes for f in origin.axes[a]] for axes in (batch, roles["contracting"], free)]
    known = [f for part in parts for f in part]
    stack = [Factor(a, 1, n) for a, n in enumerate(shape) if all(f.axis != a for f in known)]
    factors = [*stack, *known]
    digits = sorted(factors, key=lambda f: (f.axis, -f.stride))
    for axis, size in enumerate(shape):
        own = [f for f in digits if f.axis == axis]
        if math.prod(f.size for f in own) != size or any(f.stride != _below(own, f) for f in own):
            return "the matmul takes a slice of the parameter"
    sizes = [math.prod(f.size for f in part) for part in parts]
    return MatrixView(
        digits=tuple(f.size for f in digits),
        order=tuple(digits.index(f) for f in factors),
        stack=tuple(f.size for f in stack if f.size > 1),
        shape=(math.prod(f.size for f in stack) * sizes[0], sizes[1], sizes[2]),
    )


def _below(factors: Sequence[Factor], factor: Factor) -> int:
    return math.prod(f.size for f in factors if f.stride < factor.stride)
