"""A product of two operands, as an einsum and as a dot_general."""

from typing import Any


def dimension_numbers(subscripts: str) -> Any:
    """The dimension numbers of an einsum of two operands in the order of a dot_general."""
    left, right = subscripts.split("->")[0].split(",")
    out = subscripts.split("->")[1]
    batch = [c for c in left if c in right and c in out]
    contract = [c for c in left if c in right and c not in out]
    place = lambda term, chars: tuple(term.index(c) for c in chars)  # noqa: E731
    return (place(left, contract), place(right, contract)), (place(left, batch), place(right, batch))


def subscripts(numbers: Any, lhs_ndim: int, rhs_ndim: int) -> str:
    """A dot_general written as an einsum."""
    (lc, rc), (lb, rb) = numbers
    letters = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    left = [next(letters) for _ in range(lhs_ndim)]
    right = [""] * rhs_ndim
    for a, b in (*zip(lb, rb, strict=True), *zip(lc, rc, strict=True)):
        right[b] = left[a]
    right = [c or next(letters) for c in right]
    rest_left = [c for a, c in enumerate(left) if a not in lc and a not in lb]
    rest_right = [c for a, c in enumerate(right) if a not in rc and a not in rb]
    out = [left[a] for a in lb] + rest_left + rest_right
    return f"{''.join(left)},{''.join(right)}->{''.join(out)}"
