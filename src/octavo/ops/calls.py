"""Quantized products in a traced program, found again by the name of the scope that they stand in.

A product with a custom gradient is closed to a program that reads a jaxpr: neither its axes nor its config can be seen.
So each runs in a scope whose name is a digest of what is static about it, and this table says what that was. With it,
products that were written by hand can be planned, and served with weights that are QArrays, as any other.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import jax

from octavo._typing import Array
from octavo.ops.config import DotConfig

_PREFIX = "octavo.call."


@dataclasses.dataclass(frozen=True)
class KnownCall:
    """What is static about one quantized product."""

    op: str
    """The name that rules call it by."""
    primitive: str
    params: dict[str, Any]
    """The JAX primitive that it stands for, and the parameters that tell its axes."""
    config: DotConfig | None
    """None for one that is written in float, and left to rules."""
    tree: Any
    """The structure of its arguments: lhs, rhs and whatever follows."""
    shapes: tuple[tuple[int, ...], ...]
    run: Callable[..., Array]
    """The forward product of these arguments; operands may be QArrays already."""


_known: dict[str, KnownCall] = {}


@functools.lru_cache(maxsize=4096)
def _name(*static: Any) -> str:
    return _PREFIX + hashlib.sha1(repr(static).encode()).hexdigest()[:16]


def call_known(
    fn: Callable[..., Array],
    call: Any,
    args: tuple[Any, ...],
    *,
    op: str,
    primitive: str,
    params: dict[str, Any],
    config: DotConfig | None,
    run: Callable[..., Array],
) -> Array:
    """`fn(call, *args)` in a scope by which `known_call` finds it again."""
    leaves, tree = jax.tree.flatten(args)
    shapes = tuple(tuple(x.shape) for x in leaves)
    name = _name(op, call, str(tree), shapes)
    if name not in _known:
        _known[name] = KnownCall(op, primitive, params, config, tree, shapes, functools.partial(run, call))
    with jax.named_scope(name):
        return fn(call, *args)


def known_call(scope: str, shapes: tuple[tuple[int, ...], ...]) -> KnownCall | None:
    """The call whose scope this is, if its arguments have these shapes: under vmap they have others."""
    known = _known.get(scope.rpartition("/")[2])
    return known if known is not None and known.shapes == shapes else None


def is_known_call(scope: str) -> bool:
    """Whether a scope is that of a quantized product."""
    return scope.rpartition("/")[2].startswith(_PREFIX)
