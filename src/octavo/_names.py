"""Suggestions for misspelt names."""

import difflib
from collections.abc import Iterable
from typing import Any


def did_you_mean(name: Any, known: Iterable[str], *, most: int = 1, cutoff: float = 0.5) -> str:
    """A question that names the nearest known names, with a space behind it, or an empty string.

    >>> did_you_mean("dotgeneral", ["dot_general", "einsum"])
    "did you mean 'dot_general'? "
    >>> did_you_mean("conv", ["dot_general", "einsum"])
    ''
    """
    names = {other.lower(): other for other in known}
    near = difflib.get_close_matches(str(name).lower(), names, n=most, cutoff=cutoff)
    return f"did you mean {', '.join(repr(names[other]) for other in near)}? " if near else ""


def unknown_name(name: Any, known: Iterable[str]) -> str:
    """`did_you_mean` and the list of all known names, for the end of an error message.

    >>> unknown_name("int9", ["int8", "fp8"])
    "did you mean 'int8'? Known: fp8, int8"
    """
    known = list(known)
    return f"{did_you_mean(name, known, most=4, cutoff=0.4)}Known: {', '.join(sorted(known))}"
