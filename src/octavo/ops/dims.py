"""Which axes a matmul contracts, batches and keeps, and those of its gradients."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from octavo import _sharding


@dataclasses.dataclass(frozen=True)
class Dims:
    """`lax.dot_general`'s dimension numbers, with the ranks."""

    lhs_ndim: int
    rhs_ndim: int
    lhs_contract: tuple[int, ...]
    rhs_contract: tuple[int, ...]
    lhs_batch: tuple[int, ...] = ()
    rhs_batch: tuple[int, ...] = ()

    @staticmethod
    def of(dimension_numbers: Any, lhs_ndim: int, rhs_ndim: int) -> "Dims":
        """From what `lax.dot_general` takes, negative axes included."""
        (lc, rc), (lb, rb) = dimension_numbers
        norm = lambda axes, ndim: tuple(int(a) % ndim for a in axes)  # noqa: E731
        return Dims(lhs_ndim, rhs_ndim, norm(lc, lhs_ndim), norm(rc, rhs_ndim), norm(lb, lhs_ndim), norm(rb, rhs_ndim))

    @property
    def numbers(self) -> tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]:
        return ((self.lhs_contract, self.rhs_contract), (self.lhs_batch, self.rhs_batch))

    @property
    def lhs_remaining(self) -> tuple[int, ...]:
        return tuple(a for a in range(self.lhs_ndim) if a not in self.lhs_contract and a not in self.lhs_batch)

    @property
    def rhs_remaining(self) -> tuple[int, ...]:
        return tuple(a for a in range(self.rhs_ndim) if a not in self.rhs_contract and a not in self.rhs_batch)

    @property
    def out_ndim(self) -> int:
        return len(self.lhs_batch) + len(self.lhs_remaining) + len(self.rhs_remaining)

    def swap(self) -> "Dims":
        """The same product with its operands exchanged; the kept axes of the result are exchanged with them."""
        return Dims(self.rhs_ndim, self.lhs_ndim, self.rhs_contract, self.lhs_contract, self.rhs_batch, self.lhs_batch)

    def gradient(self, of_lhs: bool) -> "Gradient":
        """The matmul of the output's gradient with the other operand, whose result is an operand's gradient."""
        nb, nl = len(self.lhs_batch), len(self.lhs_remaining)
        g_batch = tuple(range(nb))
        if of_lhs:
            g_contract = tuple(range(nb + nl, self.out_ndim))
            dims = Dims(self.out_ndim, self.rhs_ndim, g_contract, self.rhs_remaining, g_batch, self.rhs_batch)
            contracted = [self.lhs_contract[i] for i in np.argsort(np.asarray(self.rhs_contract, int))]
            axes = [*self.lhs_batch, *self.lhs_remaining, *contracted]
        else:
            g_contract = tuple(range(nb, nb + nl))
            dims = Dims(self.out_ndim, self.lhs_ndim, g_contract, self.lhs_remaining, g_batch, self.lhs_batch)
            contracted = [self.rhs_contract[i] for i in np.argsort(np.asarray(self.lhs_contract, int))]
            axes = [*self.rhs_batch, *contracted, *self.rhs_remaining]
        return Gradient(dims, tuple(int(a) for a in np.argsort(axes)), swapped=not of_lhs)


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient's matmul (the incoming gradient is its lhs) and what brings its result into the operand's layout.

    When `swapped`, the product is taken with its operands exchanged: for a plain matmul, `drhs = lhs.T @ g` then comes
    out as it is wanted, and of the two operands it is the residual that is transposed.
    """

    dims: Dims
    order: tuple[int, ...]
    swapped: bool

    def arrange(self, out: jax.Array) -> jax.Array:
        return out if self.order == tuple(range(len(self.order))) else jax.lax.transpose(out, self.order)

    def sharding(self, wanted: NamedSharding | None) -> NamedSharding | None:
        """The sharding of the product before it is arranged, so that the gradient has the one that is wanted."""
        if wanted is None:
            return None
        parts, spec = _sharding.partitions(wanted, len(self.order)), wanted.spec
        turned = (parts[self.order.index(a)] for a in range(len(self.order)))
        return NamedSharding(wanted.mesh, PartitionSpec(*turned, unreduced=spec.unreduced, reduced=spec.reduced))
