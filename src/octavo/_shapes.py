"""Sizes of axes, which are symbolic while a program is exported for any batch size (`jax.export.symbolic_shape`)."""

from typing import Any

type Shape = tuple[Any, ...]
"""The shape of an array: integers, or symbolic sizes."""


def at_least(size: Any, bound: int) -> bool:
    """Whether a size is at least `bound`; a symbolic one, which is not known, counts as large.

    >>> at_least(3, 2), at_least(1, 2)
    (True, False)
    """
    return not isinstance(size, int) or size >= bound
