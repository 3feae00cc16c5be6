"""Evaluating a jaxpr with its matmuls replaced."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from octavo._typing import Array
from octavo.distributed.expert_parallel import DispatchCall, dispatch
from octavo.ops import marked_product
from octavo.qarray import QArray
from octavo.transform import control_flow
from octavo.transform.frame import Frame, Value
from octavo.transform.jaxpr import (
    CUSTOM,
    MATMULS,
    Equation,
    Jaxpr,
    bind,
    custom_body,
    equation_context,
    has_matmul,
    is_literal,
)
from octavo.transform.provider import GEOMETRY, Operation, operating, product_options, run_product
from octavo.transform.rearrange import as_array, rearrange
from octavo.transform.resolve import find_rule, find_site, product_site
from octavo.transform.site import Site
from octavo.transform.weights import CONSTANT, Origin, propagate


def evaluate(jaxpr: Jaxpr, values: list[Value], frame: Frame) -> list[Value]:
    """The results of a jaxpr for these values, quantized as the frame's rules say."""
    env: dict[Any, Value] = dict(zip(jaxpr.invars, values, strict=True))
    env.update((var, Value(const, CONSTANT)) for var, const in zip(jaxpr.constvars, jaxpr.consts, strict=True))

    def read(atom: Any) -> Value:
        return Value(atom.val, CONSTANT) if is_literal(atom) else env[atom]

    dead = _last_uses(jaxpr)
    for number, eqn in enumerate(jaxpr.eqns):
        outs = _step(eqn, [read(atom) for atom in eqn.invars], frame)
        env.update(zip(eqn.outvars, outs, strict=True))
        for var in dead[number]:
            del env[var]
    return [read(atom) for atom in jaxpr.outvars]


@functools.lru_cache(maxsize=1024)
def _last_uses(jaxpr: Jaxpr) -> list[list[Any]]:
    """For each equation the variables that nothing reads after it, so that their memory is free."""
    kept = {v for v in jaxpr.outvars if not is_literal(v)}
    dead: list[list[Any]] = [[] for _ in jaxpr.eqns]
    for number in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[number]
        for atom in (*eqn.invars, *eqn.outvars):
            if not is_literal(atom) and atom not in kept:
                kept.add(atom)
                dead[number].append(atom)
    return dead


def _step(eqn: Equation, values: list[Value], frame: Frame) -> list[Value]:
    name = eqn.primitive.name
    if name in MATMULS:
        with equation_context(eqn):
            return [_matmul(eqn, values, frame)]
    if name in CUSTOM:
        if (own := _own_product(eqn, values, frame)) is not None:
            return [own]
        opened = any(rule.inside_custom for rule in frame.context.provider.rules)
        if opened and has_matmul(custom_body(eqn), True):
            return evaluate(custom_body(eqn), values, frame.inner(control_flow.scope(eqn), new=frame.new))
    elif (rewrite := control_flow.REWRITES.get(name)) is not None and control_flow.needs_rewrite(eqn, values, frame):
        with equation_context(eqn):
            return rewrite(eqn, values, frame)
    quantized = isinstance(values[0].data, QArray) if values else False
    with equation_context(eqn):
        if quantized:
            outs = rearrange(eqn, values[0].data, [as_array(v.data) for v in values[1:]])
            if outs is not None:
                return [Value(*pair) for pair in zip(outs, propagate(eqn, [v.origin for v in values]), strict=True)]
        outs = bind(eqn, [as_array(v.data) for v in values])
    return [Value(*pair) for pair in zip(outs, propagate(eqn, [v.origin for v in values]), strict=True)]


def _matmul(eqn: Equation, values: list[Value], frame: Frame) -> Value:
    site = find_site(eqn, values, frame)
    data = [_operand(v.data) for v in values]
    origin = propagate(eqn, [v.origin for v in values[:2]])[0]
    if not origin.is_weight and not origin.constant:
        origin = Origin(module=site.path)
    if site.config is None and not any(isinstance(x, QArray) for x in data[:2]):
        return Value(bind(eqn, data)[0], origin)
    frame.context.provider._used.update(() if site.rule is None else (site.rule,))
    return Value(_call_operation(eqn, eqn.params, data, site, frame), origin)


def _operand(data: Any) -> Any:
    """An argument of an operation: numbers that are written into the program become arrays."""
    return data if isinstance(data, QArray) else jnp.asarray(data)


def _own_product(eqn: Equation, values: list[Value], frame: Frame) -> Value | None:
    """A matmul of `octavo.ops`. One with its own config is kept, except that its weight may be a QArray."""
    first = eqn.params["num_consts"]
    atoms, args = eqn.invars[first:], values[first:]
    marked = marked_product(custom_body(eqn))
    # Under vmap the arguments have other shapes, and the function stays opaque.
    if marked is None or marked.shapes != tuple(tuple(a.aval.shape) for a in atoms):  # pyrefly: ignore
        return None
    call = marked.call
    if isinstance(call, DispatchCall):
        return _dispatch(eqn, values, args, frame, call)
    site = product_site(eqn, list(atoms[:2]), args[:2], frame, call)
    origin = Origin(module=site.path)
    with equation_context(eqn):
        if not any(site.quantized) and (call.config is not None or site.config is None):
            return Value(bind(eqn, [as_array(v.data) for v in values])[0], origin)
        data = [_operand(v.data) for v in args]
        if call.config is not None:
            return Value(call.run(*jax.tree.unflatten(marked.tree, data)), origin)
        frame.context.provider._used.update(() if site.rule is None else (site.rule,))
        return Value(_call_operation(eqn, call.params, data, site, frame), origin)


def _dispatch(eqn: Equation, values: list[Value], args: list[Value], frame: Frame, call: DispatchCall) -> Value:
    """Tokens dispatched to experts, in the `dispatch_qtype` of the experts' rule."""
    tokens, order, *anchor = args
    path = anchor[0].origin.module if anchor else None
    rule = find_rule(path or "", "ragged_dot", frame.context)
    origin = Origin(module=tokens.origin.module)
    with equation_context(eqn):
        if rule is None or rule.dispatch_qtype is None:
            return Value(bind(eqn, [as_array(v.data) for v in values])[0], origin)
        config = dataclasses.replace(call.expert_parallel, qtype=rule.dispatch_qtype)
        return Value(dispatch(as_array(tokens.data), order.data, config), origin)


def _call_operation(eqn: Equation, params: Any, data: list[Any], site: Site, frame: Frame) -> Array:
    """The result of the provider's operation, as the equation wants it."""
    provider, context = frame.context.provider, frame.context
    lhs, rhs, *rest = data
    if site.op not in provider.overrides:
        out = run_product(site, frame, lhs, rhs, *rest, params=params)
    else:
        call = functools.partial(_override, provider, site, params, lhs, rhs, *rest)
        with operating(Operation(site, frame)):
            out = call() if context.host is None else context.host(frame, site, call)
    wanted: Any = eqn.outvars[0].aval
    if tuple(out.shape) != tuple(wanted.shape):
        raise ValueError(f"{site.op_id} at {site.path!r} must give the shape {wanted.shape}, but gave {out.shape}")
    return jnp.asarray(out, wanted.dtype)


def _override(provider: Any, site: Site, params: Any, lhs: Any, rhs: Any, *rest: Any) -> Array:
    """The operation as a subclass of the provider defines it, with the arguments that its JAX namesake has."""
    options = product_options(params)
    if site.op == "einsum":
        return provider.einsum(_subscripts(params["dimension_numbers"], lhs.ndim, rhs.ndim), lhs, rhs, **options)
    if site.op == "dot_general":
        return provider.dot_general(lhs, rhs, params["dimension_numbers"], **options)
    if site.op == "conv_general_dilated":
        geometry = {name: params[name] for name in GEOMETRY}
        strides, padding = params["window_strides"], params["padding"]
        return provider.conv_general_dilated(lhs, rhs, strides, padding, **geometry, **options)
    sizes, *offset = rest
    if offset or params.get("group_offset") is not None:
        options["group_offset"] = offset[0] if offset else jnp.asarray(params["group_offset"])
    numbers = params["ragged_dot_dimension_numbers"]
    return getattr(provider, site.op)(lhs, rhs, sizes, dimension_numbers=numbers, **options)


def _subscripts(numbers: Any, lhs_ndim: int, rhs_ndim: int) -> str:
    """The dimension numbers of a dot_general as the subscripts of an einsum."""
    (lc, rc), (lb, rb) = numbers
    letters = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    left = [next(letters) for _ in range(lhs_ndim)]
    shared = {b: left[a] for a, b in (*zip(lb, rb, strict=True), *zip(lc, rc, strict=True))}
    right = [shared.get(b) or next(letters) for b in range(rhs_ndim)]
    kept = [c for a, c in enumerate(left) if a not in (*lc, *lb)] + [c for b, c in enumerate(right) if b not in shared]
    return f"{''.join(left)},{''.join(right)}->{''.join([*(left[a] for a in lb), *kept])}"
