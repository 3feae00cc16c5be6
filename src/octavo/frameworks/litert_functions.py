"""Finding calls of JAX's functions in a jaxpr, where `jax.jit` has inlined them.

A candidate is traced for the same input and compared equation by equation, so that nothing here depends on how a
release of JAX computes a function.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from octavo.transform.jaxpr import Equation, Jaxpr, Literal


class Call(NamedTuple):
    """A call of a function of one array: its name, its equations, its input and its result."""

    name: str
    length: int
    input: Any
    output: Any


def find_call(eqns: Sequence[Equation], start: int) -> Call | None:
    """The call whose first equation is at `start`, if there is one."""
    first = eqns[start]
    if first.primitive.name not in _first_primitives():
        return None
    atoms: list[Any] = list(first.invars)
    for atom in atoms:
        if isinstance(atom, Literal) or not jnp.issubdtype(atom.aval.dtype, jnp.floating):
            continue
        for name, template in _templates(first, atom.aval):
            eqn = template.eqns[0]
            if eqn.primitive is first.primitive and (output := _match(template, eqns, start, atom)) is not None:
                return Call(name, len(template.eqns), atom, output)
    if first.primitive.name == "reduce_window_sum" and start + 1 < len(eqns):
        after = eqns[start + 1]
        if after.primitive.name == "div" and after.invars[0] is first.outvars[0]:
            return Call("avg_pool", 2, first.invars[0], after.outvars[0])
    return None


def _gelu(eqn: Equation) -> Iterator[functools.partial[Any]]:
    for approximate in (True, False):
        yield functools.partial(jax.nn.gelu, approximate=approximate)


def _softmax(eqn: Equation) -> Iterator[functools.partial[Any]]:
    if "axes" in eqn.params:
        yield functools.partial(jax.nn.softmax, axis=tuple(eqn.params["axes"]))


def _mean(eqn: Equation) -> Iterator[functools.partial[Any]]:
    if "axes" in eqn.params:
        for keepdims in (False, True):
            yield functools.partial(jnp.mean, axis=tuple(eqn.params["axes"]), keepdims=keepdims)


_FUNCTIONS = {"gelu": _gelu, "softmax": _softmax, "mean": _mean}


def _templates(eqn: Equation, aval: Any) -> Iterator[tuple[str, Jaxpr]]:
    for name, variants in _FUNCTIONS.items():
        for fn in variants(eqn):
            yield name, _trace(fn.func, tuple(fn.keywords.items()), aval.shape, aval.dtype, aval.weak_type)


@functools.lru_cache(maxsize=512)
def _trace(fn: Any, options: tuple[tuple[str, Any], ...], shape: Any, dtype: Any, weak_type: bool) -> Jaxpr:
    x = jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)
    return jax.make_jaxpr(functools.partial(fn, **dict(options)))(x)


@functools.cache
def _first_primitives() -> frozenset[str]:
    """The primitives that calls may begin with."""
    x = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    functions = (jax.nn.gelu, functools.partial(jax.nn.gelu, approximate=False), jax.nn.softmax, jnp.mean)
    return frozenset({jax.make_jaxpr(fn)(x).eqns[0].primitive.name for fn in functions} | {"reduce_window_sum"})


def _match(template: Jaxpr, eqns: Sequence[Equation], start: int, atom: Any) -> Any:
    """The variable that is the result of the template, if the equations from `start` on are those of the template."""
    if start + len(template.eqns) > len(eqns):
        return None
    known: dict[Any, Any] = {template.invars[0]: atom}
    for wanted, eqn in zip(template.eqns, eqns[start:], strict=False):
        if wanted.primitive is not eqn.primitive or len(wanted.invars) != len(eqn.invars):
            return None
        for a, b in zip(wanted.invars, eqn.invars, strict=True):
            if isinstance(a, Literal) or isinstance(b, Literal):
                if not (isinstance(a, Literal) and isinstance(b, Literal) and a.val == b.val):
                    return None
            elif known.get(a) is not b:
                return None
        if not _same_params(wanted.params, eqn.params):
            return None
        known.update(zip(wanted.outvars, eqn.outvars, strict=True))
    return known.get(template.outvars[0])


def _same_params(a: dict[str, Any], b: dict[str, Any]) -> bool:
    plain = (int, float, str, bool, tuple, type(None))
    return all(not isinstance(value, plain) or b.get(name) == value for name, value in a.items())
