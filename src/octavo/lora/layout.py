"""The shapes of adapters, and what they add to a matmul and to its weight.

The shapes are Qwix's. Of a `dot_general`, a is [batch..., contracted, rank] and b is [batch..., rank, rest], with
several contracted or remaining axes flattened. Of an `einsum`, a has the batch and contracted axes of the weight in
their order and b the others. Of a convolution, b is [rank, features]. Of a grouped matmul, a and b have one
matrix per group.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from octavo._typing import Array
from octavo.transform import Site
from octavo.transform.site import operand_axes
from octavo.transform.weights import Factor


@dataclasses.dataclass(frozen=True)
class Layout:
    """The adapter of a site.

    Attributes:
        op: The operation.
        shape: The shape of the weight as an operand.
        batch: The batch axes of the weight.
        contracting: The contracted axes of the weight.
    """

    op: str
    shape: tuple[int, ...]
    batch: tuple[int, ...]
    contracting: tuple[int, ...]

    @classmethod
    def of(cls, site: Site) -> "Layout":
        """The layout of the adapter of a site."""
        side = weight_side(site)
        shape = (site.lhs, site.rhs)[side][0]
        if site.op == "conv_general_dilated":
            return cls(site.op, shape, (), tuple(range(len(shape) - 1)))
        if site.op in ("ragged_dot", "gmm"):
            return cls(site.op, shape, (0,), (1,))
        axes = operand_axes(site.params, site.lhs[0], site.rhs[0])[side]
        return cls(site.op, shape, axes["batch"], axes["contracting"])

    @property
    def rest(self) -> tuple[int, ...]:
        """The axes that are neither batch nor contracted."""
        return tuple(i for i in range(len(self.shape)) if i not in (*self.batch, *self.contracting))

    def sizes(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.shape[i] for i in axes)

    @property
    def keeps_axes(self) -> bool:
        """Whether a has the axes of the weight in their order, and b has no batch axes."""
        return self.op in ("einsum", "conv_general_dilated")

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of a and b."""
        if self.keeps_axes:
            kept = tuple(i for i in range(len(self.shape)) if i not in self.rest)
            return (*self.sizes(kept), rank), (rank, *self.sizes(self.rest))
        batch = self.sizes(self.batch)
        contracted, rest = (math.prod(self.sizes(axes)) for axes in (self.contracting, self.rest))
        return (*batch, contracted, rank), (*batch, rank, rest)

    @property
    def max_rank(self) -> int:
        """The rank of the matrix."""
        contracted, rest = (math.prod(self.sizes(axes)) for axes in (self.contracting, self.rest))
        return min(contracted, rest)

    def canonical(self, a: Array, b: Array) -> tuple[Array, Array]:
        """a as [batch..., contracted..., rank] and b as [batch..., rank, rest...], or without batch axes."""
        rank = a.shape[-1]
        if self.keeps_axes:
            kept = [i for i in range(len(self.shape)) if i not in self.rest]
            order = [kept.index(i) for i in (*self.batch, *self.contracting)]
            return a.transpose(*order, len(kept)), b
        batch = self.sizes(self.batch)
        return a.reshape(*batch, *self.sizes(self.contracting), rank), b.reshape(*batch, rank, *self.sizes(self.rest))

    def delta(self, a: Array, b: Array) -> Array:
        """a times b, in the shape of the weight as an operand."""
        a, b = self.canonical(a, b)
        n = len(self.batch) if not self.keeps_axes else 0
        batch = tuple(range(n))
        out = jax.lax.dot_general(
            a, b, (((a.ndim - 1,), (n,)), (batch, batch)), precision="highest", preferred_element_type=jnp.float32
        )
        order = (*self.batch, *self.contracting, *self.rest)
        return out.transpose(*(order.index(i) for i in range(len(order))))


def weight_side(site: Site) -> int:
    """Which operand of a site is its weight: 0 or 1."""
    return 1 if site.weights[1] else 0


def adapter_names(site: Site) -> tuple[str, str, str]:
    """The path of a site's module, and the names of its a and b there."""
    assert site.leaf is not None
    path, _, name = site.leaf.rpartition("/")
    return path, f"{name}_lora_a", f"{name}_lora_b"


def to_stored(delta: Array, axes: tuple[tuple[Factor, ...], ...], shape: tuple[int, ...]) -> Array:
    """An array in the layout of an operand as one in the layout of its parameter.

    Args:
      delta: The array.
      axes: The factors of each axis of the operand.
      shape: The shape of the parameter, without the axis of stacked layers.

    >>> axes = ((Factor(1, 1, 3),), (Factor(0, 1, 2),))
    >>> to_stored(jnp.zeros((3, 2)), axes, (2, 3)).shape
    (2, 3)
    """
    factors = [factor for axis in axes for factor in axis]
    split = delta.reshape([factor.size for factor in factors])
    return split.transpose(_stored_order(factors)).reshape(shape)


def from_stored(x: Array, axes: tuple[tuple[Factor, ...], ...], shape: tuple[int, ...]) -> Array:
    """The inverse of `to_stored`: `shape` is that of the operand."""
    factors = [factor for axis in axes for factor in axis]
    order = _stored_order(factors)
    return (
        x.reshape([factors[i].size for i in order])
        .transpose([order.index(i) for i in range(len(order))])
        .reshape(shape)
    )


def _stored_order(factors: list[Factor]) -> list[int]:
    return sorted(range(len(factors)), key=lambda i: (factors[i].axis, -factors[i].stride))


def stored_shape(axes: tuple[tuple[Factor, ...], ...]) -> tuple[int, ...]:
    """The shape of the parameter of an operand, without the axis of stacked layers."""
    sizes: dict[int, int] = {}
    for factor in (f for axis in axes for f in axis):
        sizes[factor.axis] = sizes.get(factor.axis, 1) * factor.size
    return tuple(sizes[axis] for axis in sorted(sizes))
