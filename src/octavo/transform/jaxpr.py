"""Reading jaxprs: the one module that depends on the internal structure of jaxprs.

Everything that is particular to a release of JAX (names of primitives and of their parameters, how an equation is bound
again) is here; the rest of the transformation uses the functions of this file.
"""

import contextlib
import functools
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from octavo import kernels
from octavo.ops import marked_product

Jaxpr = core.Jaxpr
Equation = core.JaxprEqn
Literal = core.Literal

MATMULS = {
    "dot_general": "dot_general",
    "conv_general_dilated": "conv_general_dilated",
    "ragged_dot_general": "ragged_dot",
}
"""Matmul primitives, and their names in rules."""

CUSTOM = ("custom_jvp_call", "custom_vjp_call")
"""Calls with a custom derivative, whose bodies are opaque unless a rule has `inside_custom`."""
KERNELS = (kernels.MATVEC, "pallas_call", "ffi_call", "triton_call", "scaled_matmul", "scaled_matmul_wrapper")
"""Calls of kernels, which cannot be rewritten and whose FLOPs are unknown."""


def as_array_function(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], list[Any]]:
    """`fn(*args, **kwargs)` as a function of the arrays among its arguments, and these; the rest is passed on."""
    leaves, tree = jax.tree.flatten((args, dict(kwargs)))
    places = [i for i, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")]

    def flat(*arrays: Any) -> Any:
        given = dict(zip(places, arrays, strict=True))
        args, kwargs = jax.tree.unflatten(tree, [given.get(i, x) for i, x in enumerate(leaves)])
        return fn(*args, **kwargs)

    return flat, [leaves[i] for i in places]


def make_live_jaxpr(fn: Callable[..., Any], arrays: Sequence[Any]) -> Jaxpr:
    """The jaxpr of a function of arrays, without what no result depends on.

    A custom gradient computes every cotangent, also unused ones. They are removed here, as XLA does.
    """
    jaxpr = jax.make_jaxpr(fn)(*arrays)
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def current_platform() -> str:
    """The platform that functions are compiled for here, as JAX names it when it lowers them."""
    return {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())


def bind(eqn: Equation, values: Sequence[Any]) -> list[Any]:
    """Bind the primitive of an equation to these values, within `equation_context`."""
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


@contextlib.contextmanager
def equation_context(eqn: Equation) -> Iterator[None]:
    """The context (names, meshes, modes) in which an equation was traced."""
    names = scope(eqn)
    with jax.named_scope(names) if names else contextlib.nullcontext(), eqn.ctx.manager:
        yield


_text = functools.lru_cache(maxsize=4096)(str)


def scope(eqn: Equation) -> str:
    """The `jax.named_scope` names around an equation, joined by slashes."""
    return _text(eqn.source_info.name_stack)


def bodies(eqn: Equation) -> list[Jaxpr]:
    """The jaxprs that an equation runs."""
    found = []
    for value in eqn.params.values():
        found += [v for v in (value if isinstance(value, tuple | list) else (value,)) if isinstance(v, Jaxpr)]
    return found


class ScanParts(NamedTuple):
    body: Jaxpr
    consts: int
    carry: int
    length: int
    reverse: bool
    unroll: int


def scan_parts(eqn: Equation) -> ScanParts:
    consts, carry, _ = (len(part) for part in eqn.params["ft_in"].unpack())
    p = eqn.params
    return ScanParts(p["jaxpr"], consts, carry, p["length"], p["reverse"], p["unroll"])


class WhileParts(NamedTuple):
    cond: Jaxpr
    body: Jaxpr
    cond_consts: int
    body_consts: int


def while_parts(eqn: Equation) -> WhileParts:
    p = eqn.params
    return WhileParts(p["cond_jaxpr"], p["body_jaxpr"], p["cond_nconsts"], p["body_nconsts"])


def jit_options(eqn: Equation) -> dict[str, Any]:
    """The arguments of `jax.jit` that a nested jit was made with."""
    p = eqn.params

    def known(shardings):
        given = tuple(s if isinstance(s, jax.sharding.Sharding) else None for s in shardings)
        return given if any(s is not None for s in given) else None

    options = {
        "donate_argnums": tuple(i for i, donated in enumerate(p["donated_invars"]) if donated),
        "keep_unused": p["keep_unused"],
        "compiler_options": dict(p["compiler_options_kvs"]) or None,
    }
    if (shardings := known(p["in_shardings"])) is not None:
        options["in_shardings"] = shardings
    if (shardings := known(p["out_shardings"])) is not None:
        options["out_shardings"] = shardings
    return options


def custom_body(eqn: Equation) -> Jaxpr:
    return eqn.params["call_jaxpr"]


def library_function(eqn: Equation) -> str | None:
    """The name of the function of JAX that an equation calls; None for functions of others and for primitives."""
    name = eqn.params.get("name") if eqn.primitive.name == "jit" else None
    for body in bodies(eqn) if eqn.primitive.name in ("jit", *CUSTOM) else ():
        if body.debug_info.func_filename and body.debug_info.func_filename.startswith(_LIBRARY):
            return name or body.debug_info.func_name
    return None


_LIBRARY = os.path.dirname(jax.__file__)


# Weak references, since a jaxpr holds the tracers of its constants.
_has_matmul: weakref.WeakKeyDictionary[Jaxpr, dict[tuple[bool, bool], bool]] = weakref.WeakKeyDictionary()


def has_matmul(jaxpr: Jaxpr, opaque: bool, kernels: bool = False) -> bool:
    """Whether a jaxpr has a matmul, also in the bodies of loops and calls.

    Matmuls of `octavo.ops` with their own config count as well; with `opaque` those in functions with a custom
    derivative, and with `kernels` every kernel.
    """
    found = _has_matmul.setdefault(jaxpr, {})
    if (opaque, kernels) not in found:
        found[opaque, kernels] = any(_is_or_has_matmul(eqn, opaque, kernels) for eqn in jaxpr.eqns)
    return found[opaque, kernels]


def _is_or_has_matmul(eqn: Equation, opaque: bool, kernels: bool) -> bool:
    name = eqn.primitive.name
    if name in MATMULS or (name in CUSTOM and marked_product(custom_body(eqn))):
        return True
    if name in KERNELS:
        return kernels
    return (opaque or name not in CUSTOM) and any(has_matmul(body, opaque, kernels) for body in bodies(eqn))


def platform_branch(eqn: Equation, platform: str) -> Jaxpr | None:
    """The branch of a `jax.lax.platform_dependent` for a platform; None for any other equation."""
    choices = eqn.params.get("branches_platforms") or ()  # the default is last
    branches = zip(eqn.params.get("branches", ()), choices, strict=False)
    return next((branch for branch, on in branches if on is None or platform in on), None)


_WRAPPER = re.compile(r"^\w+\((.*)\)$")
BACKWARD = "transpose("


def scope_names(scope: str) -> list[str]:
    """The names of user-defined scopes, without those that transformations and libraries add."""
    return [n for n in _all_names(scope) if n and "->" not in n and "." not in n and n not in _NOISE]


def module_of(scope: str, modules: frozenset[str]) -> str:
    """The innermost of these modules that a scope is in; the paths above each of them have to be among them."""
    path = ""
    for name in _all_names(scope):
        longer = f"{path}/{name}" if path else name
        path = "" if name == FROM_ROOT else longer if longer in modules else path
    return path


def _all_names(scope: str) -> list[str]:
    names = []
    for name in _outer_split(scope):
        while match := _WRAPPER.match(name):
            name = match[1]
        names += name.split("/")
    return names


FROM_ROOT = "~"
"""The scope name after which paths restart at the root, as for a module that is called from another one."""
_NOISE = (FROM_ROOT, "rematted_computation", "checkpoint")


def _outer_split(scope: str) -> list[str]:
    """Split at the slashes that are not within parentheses."""
    parts, depth, current = [], 0, ""
    for char in scope:
        depth += (char == "(") - (char == ")")
        if char == "/" and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += char
    return [*parts, current]


def is_einsum(scope: str) -> bool:
    """Whether the innermost name is the formula that `jnp.einsum` runs under."""
    return "->" in _outer_split(scope)[-1]
