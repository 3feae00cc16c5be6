"""Residuals in few bits: what the gradients of operations other than quantized matmuls read.

The forward pass is exact. Of a function f of x, JAX's gradient reads residuals r(x). Some values v that f computes,
such as the input of an activation function or the result of a softmax, suffice to compute all of them, r = R(v). The v
of the fewest bytes are stored as codes, and the backward pass reads R(dequantize(quantize(v))).

* Sums, maxima, random numbers and the like are not computed again. Small results, such as the norm of a row, are stored
  as they are, and so are values by which others are divided, which must not be rounded to zero.
* Nothing is computed again from the operand of a softmax's exponential, since an error there multiplies the result.
* Comparisons and masks are stored exactly, in one bit.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from octavo import _sharding
from octavo._typing import Array
from octavo.numerics import Format, IntFormat, pack_bits, unpack_bits
from octavo.ops import RESIDUAL
from octavo.ops.lowerings.quantize import quantize_array
from octavo.ops.operands import at_least
from octavo.ops.vjp import tangent_probe
from octavo.qarray import QArray, Quantizer
from octavo.transform.jaxpr import Jaxpr, Literal, bind, bodies, equation_context, scope
from octavo.transform.recompute import Recomputation, recomputation

SMALL = 1024
"""Arrays with fewer values are stored as they are."""
RELATIVELY_SMALL = 16
"""So are those with this times fewer values than the largest residual."""
INLINED = ("jit", "remat2", "checkpoint")
"""Calls without matmuls of which only the bodies matter."""
SYMBOLIC = 4096
"""The length that a symbolic axis is taken for."""

type Choose = Callable[[str], Format | None]
"""The format for residuals of operations under a name stack."""


@dataclasses.dataclass(frozen=True)
class Residuals:
    """What the operations between two matmuls, or a matmul in float, store for their gradients.

    Attributes:
        path: The path of the module that reads the largest value.
        values: The types and shapes of the values.
        bytes_before: The bytes of JAX's residuals, of all executions.
        bytes_after: The bytes of the values, of all executions.
        times: The number of executions.
    """

    path: str
    values: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    times: int = 1


def compressed(
    fn: Callable[..., list[Array]], free: Sequence[bool], choose: Choose, record: Callable[[Residuals], None]
) -> Callable[..., list[Array]]:
    """A function of arrays with its residuals in low precision.

    Args:
        fn: The function.
        free: Which of its arguments live as long as the gradient needs them, such as parameters.
        choose: The format of residuals.
        record: Is called with what is stored, where `path` is a name stack, when the function is differentiated.
    """

    @jax.custom_vjp
    def run(*arrays: Array) -> list[Array]:
        return fn(*arrays)

    def forward(*primals: Any) -> tuple[list[Array], Any]:
        arrays = [primal.value for primal in primals]
        active = [n for n, p in enumerate(primals) if p.perturbed and jnp.issubdtype(p.value.dtype, jnp.inexact)]
        return _forward(fn, arrays, active, free, choose, record)

    def backward(pullback: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        return pullback([_instantiate(g) for g in cotangents])

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


class _Linearized(NamedTuple):
    """A function and its residuals as a jaxpr, and how its gradient is computed from what is stored."""

    jaxpr: Jaxpr
    leaves: tuple[Any, ...]
    """The residuals."""
    tree: Any
    """The structure of JAX's pullback, whose leaves they are."""
    floats: tuple[int, ...]
    """The results that have cotangents."""
    active: tuple[int, ...]
    arguments: int
    recomputed: Recomputation

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def _forward(
    fn: Callable[..., list[Array]],
    arrays: list[Array],
    active: list[int],
    free: Sequence[bool],
    choose: Choose,
    record: Callable[[Residuals], None],
) -> tuple[list[Array], Any]:
    tree: Any = None
    floats: list[int] = []

    def primal(*arrays: Array) -> tuple[list[Array], list[Array]]:
        nonlocal tree, floats

        def part(*given: Array) -> tuple[list[Array], list[Array]]:
            nonlocal floats
            full = list(arrays)
            for n, x in zip(active, given, strict=True):
                full[n] = x
            outs = fn(*full)
            floats = [n for n, x in enumerate(outs) if jnp.issubdtype(x.dtype, jnp.inexact)]
            return [outs[n] for n in floats], outs

        _, pullback, outs = jax.vjp(part, *(arrays[n] for n in active), has_aux=True)
        leaves, tree = jax.tree.flatten(pullback)
        return outs, leaves

    jaxpr = jax.make_jaxpr(primal)(*arrays)
    while any(eqn.primitive.name in INLINED for eqn in jaxpr.eqns):
        jaxpr = jax.make_jaxpr(functools.partial(evaluate_inline, jaxpr))(*arrays)
    count = len(jaxpr.outvars) - tree.num_leaves
    leaves = tuple(jaxpr.outvars[count:])
    storage = _Storage(jaxpr, leaves, choose)
    kept = {var for var, is_free in zip(jaxpr.invars, free, strict=True) if is_free}
    recomputed = recomputation(jaxpr, leaves, kept, storage.nbytes)
    env = _evaluate(jaxpr.eqns, dict(zip((*jaxpr.invars, *jaxpr.constvars), (*arrays, *jaxpr.consts), strict=True)))
    saved = [storage.store(var, env[var], is_exact) for var, is_exact in recomputed.saved.items()]
    stored = [jax.tree.map(lambda x: checkpoint_name(x, RESIDUAL), x) for x in saved]
    record(storage.summary(recomputed, saved, [x for x in leaves if not isinstance(x, Literal) and x not in kept]))
    static = _Linearized(jaxpr, leaves, tree, tuple(floats), tuple(active), len(arrays), recomputed)
    constants = [env[var] for var in recomputed.free]
    probes = [tangent_probe(arrays[n]) for n in active]
    return [_read(env, x) for x in jaxpr.outvars[:count]], jax.tree_util.Partial(
        _Pullback(static), stored, constants, probes
    )


class _Pullback:
    """The backward pass, from what is stored to the gradients."""

    def __init__(self, static: _Linearized):
        self.static = static

    def __call__(
        self, stored: list[Any], constants: list[Array], probes: list[Array], cotangents: list[Any]
    ) -> tuple[Any, ...]:
        s = self.static
        cotangents = _once_differentiable([cotangents[n] for n in s.floats], probes)
        # Otherwise XLA would read what the codes are computed from, or compute the floats again before they are needed.
        stored, cotangents = jax.lax.optimization_barrier((stored, cotangents))
        env = dict(zip(s.recomputed.free, constants, strict=True))
        env |= {var: _restore(var, x) for var, x in zip(s.recomputed.saved, stored, strict=True)}
        env = _evaluate(s.recomputed.equations, env)
        pullback = jax.tree.unflatten(s.tree, [_read(env, x) for x in s.leaves])
        gradients = dict(zip(s.active, pullback(cotangents), strict=True))
        return tuple(gradients.get(n) for n in range(s.arguments))


@jax.custom_jvp
def _once_differentiable(cotangents: list[Array], probes: list[Array]) -> list[Array]:
    """Cotangents in a backward pass that raises if it is differentiated again; probes carry the operands' tangents."""
    del probes
    return cotangents


@_once_differentiable.defjvp
def _raise_second_derivative(primals, tangents):
    raise NotImplementedError(
        "residuals in low precision have no second derivative: rounding has none, and zero would be wrong. Leave "
        "residual_qtype out of the rule for the part that is differentiated twice"
    )


class _Storage:
    """How the values of a jaxpr are stored."""

    def __init__(self, jaxpr: Jaxpr, leaves: Sequence[Any], choose: Choose):
        self.scopes: dict[Any, str] = {}
        """The name stack of the first equation that reads a value."""
        for eqn in jaxpr.eqns:
            for atom in eqn.invars:
                if not isinstance(atom, Literal):
                    self.scopes.setdefault(atom, scope(eqn))
            for var in eqn.outvars:  # of a value that only the gradient reads
                self.scopes.setdefault(var, scope(eqn))
        self._choose = functools.lru_cache(choose)
        sizes = [size_of(x) for x in leaves if jnp.issubdtype(x.aval.dtype, jnp.floating)]
        self._enough = max(SMALL, max(sizes, default=0) // RELATIVELY_SMALL)

    def quantizer(self, var: Any) -> Quantizer | None:
        """The quantizer of a value; None if it is stored as it is."""
        if not jnp.issubdtype(var.aval.dtype, jnp.floating) or size_of(var) < self._enough:
            return None
        qtype = self._choose(self.scopes.get(var, ""))
        return None if qtype is None else residual_quantizer(var.aval.shape, qtype)

    def nbytes(self, var: Any, is_exact: bool) -> float:
        """About the bytes of a stored value."""
        if _is_mask(var):
            return size_of(var) / 8
        quantizer = None if is_exact else self.quantizer(var)
        bits = 8 * getattr(var.aval.dtype, "itemsize", 8) if quantizer is None else quantizer.qtype.bits + 0.25
        return max(1.0, size_of(var) * bits / 8)

    def store(self, var: Any, x: Array, is_exact: bool) -> Any:
        """A value as it is stored."""
        if _is_mask(var):
            return pack_bits(x.astype(jnp.uint8), 1)
        quantizer = None if is_exact else self.quantizer(var)
        return x if quantizer is None else quantize_array(quantizer, x)

    def summary(self, recomputed: Recomputation, saved: Sequence[Any], leaves: Sequence[Any]) -> Residuals:
        """What is stored, for the plan."""
        largest = max(recomputed.saved, key=lambda var: size_of(var), default=None)
        names = [
            x.qtype.name if isinstance(x, QArray) else "1 bit" if x.dtype == jnp.uint8 else str(x.dtype) for x in saved
        ]
        shapes = ["x".join(map(str, var.aval.shape)) or "scalar" for var in recomputed.saved]
        before = sum(size_of(var) * getattr(var.aval.dtype, "itemsize", 8) for var in dict.fromkeys(leaves))
        after = sum(size_of(x) * x.dtype.itemsize for x in jax.tree.leaves(saved))
        values = tuple(f"{name} {shape}" for name, shape in zip(names, shapes, strict=True))
        return Residuals("" if largest is None else self.scopes.get(largest, ""), values, before, after)


def residual_quantizer(shape: Sequence[int], qtype: Format) -> Quantizer:
    """The quantizer of a residual of this shape.

    Blocks of 128 along the last axis share a scale, or whole rows if these are not longer than 256. Rows shorter than
    32 share one with their neighbours.

    >>> from octavo.numerics import get_format
    >>> residual_quantizer((4, 512), get_format("int8")).tiled_axes
    ((1, 128),)
    """
    last = len(shape) - 1
    if isinstance(qtype, IntFormat):  # the largest value exactly, so that one probability of 1 has no gradient
        qtype = qtype.replace(preserve_max=True)
    if qtype.tile is not None:
        return Quantizer(qtype, channelwise_axes=range(last))
    if isinstance(shape[-1], int) and shape[-1] > 256 and shape[-1] % 128 == 0:
        return Quantizer(qtype, channelwise_axes=range(last), tiled_axes={last: 128})
    while last > 0 and not at_least(math.prod(shape[last:]), 32):
        last -= 1
    return Quantizer(qtype, channelwise_axes=range(last))


def size_of(x: Any) -> int:
    """The number of values of an array or variable; symbolic axes count as long."""
    return math.prod(n if isinstance(n, int) else SYMBOLIC for n in getattr(x, "aval", x).shape)


def _is_mask(var: Any) -> bool:
    return var.aval.dtype == jnp.bool and size_of(var) >= SMALL


def _restore(var: Any, stored: Any) -> Array:
    """A value as the backward pass reads it."""
    if isinstance(stored, QArray):
        return stored.dequantize(var.aval.dtype)
    return unpack_bits(stored, 1, var.aval.shape[-1]).astype(jnp.bool) if _is_mask(var) else stored


def _instantiate(cotangent: Any) -> Any:
    """The zeros that a cotangent is, if it is known to be zero."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    zeros = jnp.zeros(aval.shape, aval.dtype)
    if aval.sharding.mesh.are_all_axes_explicit and not aval.sharding.mesh.empty:
        zeros = _sharding.reshard_if_explicit(zeros, aval.sharding)
    axes = tuple(aval.mat.varying)
    return jax.lax.pcast(zeros, axes, to="varying") if axes else zeros


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]


def _evaluate(equations: Sequence[Any], env: dict[Any, Any]) -> dict[Any, Any]:
    for eqn in equations:
        with equation_context(eqn):
            env.update(zip(eqn.outvars, bind(eqn, [_read(env, atom) for atom in eqn.invars]), strict=True))
    return env


def evaluate_inline(jaxpr: Jaxpr, *arrays: Any, calls: Sequence[str] = INLINED) -> list[Any]:
    """The results of a jaxpr, with the bodies of these calls in place of them."""
    env = dict(zip((*jaxpr.invars, *jaxpr.constvars), (*arrays, *jaxpr.consts), strict=True))
    for eqn in jaxpr.eqns:
        values = [_read(env, atom) for atom in eqn.invars]
        with equation_context(eqn):
            inlined = eqn.primitive.name in calls
            outs = evaluate_inline(bodies(eqn)[0], *values, calls=calls) if inlined else bind(eqn, values)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [_read(env, atom) for atom in jaxpr.outvars]
