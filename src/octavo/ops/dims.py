"""The contracted, batch and remaining axes of a matmul."""

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Dims:
    """`lax.dot_general`'s dimension numbers, with the operands' ranks."""

    lhs_ndim: int
    rhs_ndim: int
    lhs_contract: tuple[int, ...]
    rhs_contract: tuple[int, ...]
    lhs_batch: tuple[int, ...] = ()
    rhs_batch: tuple[int, ...] = ()

    @staticmethod
    def of(dimension_numbers: Any, lhs_ndim: int, rhs_ndim: int) -> "Dims":
        """From the dimension numbers of `lax.dot_general`; axes may be negative."""
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
        """The same dot with its operands swapped, which swaps the remaining axes of the result as well."""
        return Dims(self.rhs_ndim, self.lhs_ndim, self.rhs_contract, self.lhs_contract, self.rhs_batch, self.lhs_batch)
