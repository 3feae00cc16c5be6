"""Evaluating a jaxpr with its matmuls replaced."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from octavo import ops
from octavo._typing import Array
from octavo.distributed.expert_parallel import DispatchCall, dispatch
from octavo.ops import ProductCall, marked_product
from octavo.qarray import QArray
from octavo.rules import find
from octavo.transform import control_flow
from octavo.transform.flash_kernels import FlashKernels
from octavo.transform.frame import Frame, Operation, Value, current_operation
from octavo.transform.jaxpr import (
    CUSTOM,
    KERNELS,
    MATMULS,
    Equation,
    Jaxpr,
    Literal,
    bind,
    bodies,
    current_platform,
    custom_body,
    equation_context,
    has_matmul,
    platform_branch,
    scope,
)
from octavo.transform.learned import learned_ranges
from octavo.transform.rearrange import as_array, rearrange
from octavo.transform.resolve import find_kernel, find_site, is_unbatched
from octavo.transform.segments import bind_compressed, evaluate_segment, segments
from octavo.transform.site import GEOMETRY, Site, operand_axes
from octavo.transform.softmax import center, find_keys
from octavo.transform.state import delayed_ranges, gradient_state, static_ranges
from octavo.transform.weights import ACTIVATION, CONSTANT, Origin, combine, propagate

_OPTIONS = ("precision", "preferred_element_type", "out_sharding", "sharding")


def evaluate(jaxpr: Jaxpr, values: list[Value], frame: Frame) -> list[Value]:
    """The results of a jaxpr for these values, quantized as the frame's rules say."""
    env: dict[Any, Value] = dict(zip(jaxpr.invars, values, strict=True))
    env.update((var, Value(const, CONSTANT)) for var, const in zip(jaxpr.constvars, jaxpr.consts, strict=True))
    keys = find_keys(jaxpr) if frame.context.provider.attention else {}
    compress = frame.context.provider.residuals and not frame.context.init
    kernels = FlashKernels(jaxpr, keys, frame) if keys and not compress else None
    keys = {id(jaxpr.eqns[n]): side for n, side in keys.items()}
    steps = segments(jaxpr) if compress else jaxpr.eqns
    uses = ((atom, n) for n, step in enumerate(steps) for atom in (*step.invars, *step.outvars))
    last_use = {atom: n for atom, n in uses if not isinstance(atom, Literal)}
    kept = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    for n, step in enumerate(steps):
        inputs = [Value(a.val, CONSTANT) if isinstance(a, Literal) else env[a] for a in step.invars]
        if isinstance(step, Jaxpr):
            outs = evaluate_segment(step, inputs, frame)
        elif kernels is not None and kernels.replaces(n, inputs):
            outs = kernels.run(n, inputs)
        else:
            with equation_context(step):
                outs = evaluate_equation(step, inputs, frame, keys.get(id(step)))
            if kernels is not None:
                kernels.note(n)
        env.update(zip(step.outvars, outs, strict=True))
        for atom in (*step.invars, *step.outvars):  # a value that nothing reads any more is freed
            if not isinstance(atom, Literal) and last_use[atom] == n and atom not in kept:
                env.pop(atom, None)
    return [Value(a.val, CONSTANT) if isinstance(a, Literal) else env[a] for a in jaxpr.outvars]


def evaluate_equation(eqn: Equation, values: list[Value], frame: Frame, keys: int | None = None) -> list[Value]:
    """The results of an equation, within `equation_context`."""
    name = eqn.primitive.name
    if frame.context.init and eqn.effects and not eqn.outvars:
        return []  # such as jax.debug.print: only shapes and initial state are wanted
    if name in MATMULS:
        return [_matmul(eqn, values, frame, keys=keys)]
    if name in CUSTOM:
        body = custom_body(eqn)
        marked = marked_product(body)
        # Under vmap the arguments have other shapes, and the function stays opaque.
        if marked is not None and is_unbatched(eqn, marked):
            return [(_dispatch if isinstance(marked.call, DispatchCall) else _matmul)(eqn, values, frame, marked)]
        if frame.context.provider.inside_custom and has_matmul(body, True):
            return evaluate(body, values, frame.inner(scope(eqn), new=frame.new))
    elif (rewrite := control_flow.REWRITES.get(name)) is not None and control_flow.needs_rewrite(eqn, values, frame):
        return rewrite(eqn, values, frame)
    if frame.context.init:
        _list_opaque(eqn, values, frame)
    outs: list[Any] | None = None
    if values and isinstance(values[0].data, QArray):
        outs = rearrange(eqn, values[0].data, [as_array(v.data) for v in values[1:]])
    if outs is None:
        outs = bind(eqn, [as_array(v.data) for v in values])
    return [Value(*pair) for pair in zip(outs, propagate(eqn, [v.origin for v in values]), strict=True)]


def _list_opaque(eqn: Equation, values: list[Value], frame: Frame) -> None:
    """Add the matmuls of an equation that is not rewritten to the sites."""
    name = eqn.primitive.name
    if name in KERNELS:
        kind = {"pallas_call": "a Pallas kernel", "ffi_call": f"the FFI kernel {eqn.params.get('target_name')}"}
        return find_kernel(eqn, values, frame.inner("", opaque=f"{kind.get(name, name)}: it is not rewritten"))
    marked = marked_product(custom_body(eqn)) if name in CUSTOM else None
    reason = f"in the body of a {name.removesuffix('_call')} function" if name in CUSTOM else f"in the body of {name}"
    if marked is not None:
        reason = "an operation of octavo.ops under vmap"
        if not isinstance(marked.call, DispatchCall):
            first = eqn.params["num_consts"]
            find_site(eqn, eqn.invars[first:], values[first:], frame.inner("", opaque=reason), marked)
        return None
    branch = platform_branch(eqn, current_platform())
    reason = reason if branch is None else "in the body of jax.lax.platform_dependent"
    for body in bodies(eqn) if branch is None else [branch]:
        if has_matmul(body, True, kernels=True):
            given = values[1:] if branch is not None else values
            known = len(given) == len(body.invars)
            origins = [v.origin for v in given] if known else [ACTIVATION] * len(body.invars)
            _trace_listing(body, origins, frame.inner(scope(eqn), opaque=reason, state={}, key=None))
    return None


def _trace_listing(body: Jaxpr, origins: list[Origin], frame: Frame) -> None:
    """Evaluate a body abstractly, for its sites."""
    arrays = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in body.invars]  # pyrefly: ignore

    def run(*data):
        evaluate(body, [Value(*pair) for pair in zip(data, origins, strict=True)], frame)

    jax.eval_shape(run, *arrays)


def _matmul(
    eqn: Equation, values: list[Value], frame: Frame, marked: ProductCall | None = None, keys: int | None = None
) -> Value:
    """A matmul of JAX or, if `marked`, of `octavo.ops`.

    One with its own config is kept, except that its weight may be a QArray.
    """
    call = None if marked is None else marked.call
    first = 0 if call is None else eqn.params["num_consts"]
    args = values[first:]
    site = find_site(eqn, eqn.invars[first:], args, frame, marked, keys)
    provider = frame.context.provider
    provider._used.update(() if site.rule is None else (site.rule,))
    left, right = site.origins
    known = call is None and (left.constant or left.leaves) and (right.constant or right.leaves)
    origin = combine(site.origins) if known else Origin(module=site.path)
    given = call is not None and call.config is not None
    if not any(site.quantized) and (given or site.config is None) and not site.is_adapted:
        return Value(bind_compressed(eqn, values, frame)[0], origin)
    # Numbers that are written into the program become arrays.
    data = [v.data if isinstance(v.data, jax.Array | QArray) else jnp.asarray(v.data) for v in args]
    if site.keys is not None and isinstance(keys_given := data[site.keys], jax.Array):
        axes = operand_axes(site.params, site.lhs[0], site.rhs[0])[site.keys]
        data[site.keys] = center(keys_given, (*axes["contracting"], *axes["batch"]))
    if marked is not None and given:
        return Value(marked.call.run(*jax.tree.unflatten(marked.tree, data)), origin)
    run = _run_override if site.op in provider.overrides else run_matmul
    out, (shape, dtype) = run(site, frame, *data, params=site.params), site.out
    if tuple(out.shape) != shape:
        raise ValueError(f"{site.op_id} at {site.path!r} must give the shape {shape}, but gave {out.shape}")
    return Value(jnp.asarray(out, dtype), origin)


def _dispatch(eqn: Equation, values: list[Value], frame: Frame, marked: ProductCall) -> Value:
    """Tokens dispatched to experts, in the `dispatch_qtype` of the experts' rule."""
    tokens, order, *anchor = values[eqn.params["num_consts"] :]
    path = anchor[0].origin.module if anchor else None
    rule = find(frame.context.provider.rules, path or "", "ragged_dot", weights=True)
    origin = Origin(module=tokens.origin.module)
    if rule is None or rule.dispatch_qtype is None:
        return Value(bind(eqn, [as_array(v.data) for v in values])[0], origin)
    config = dataclasses.replace(marked.call.expert_parallel, qtype=rule.dispatch_qtype)
    return Value(dispatch(as_array(tokens.data), order.data, config), origin)


def matmul_call(params: Mapping[str, Any], rest: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The function of a matmul with these parameters, its arguments after lhs and rhs, and its keyword arguments.

    `rest` are the operands after the first two.
    """
    options = {name: params[name] for name in _OPTIONS if params.get(name) is not None}
    if "window_strides" in params:
        options |= {name: params[name] for name in GEOMETRY if name in params}
        return ops.conv_general_dilated, (params["window_strides"], params["padding"]), options
    if len(rest) > 1 or params.get("group_offset") is not None:
        options["group_offset"] = rest[1] if len(rest) > 1 else jnp.asarray(params["group_offset"])
    if "ragged_dot_dimension_numbers" in params:
        return ops.ragged_dot_general, (rest[0], params["ragged_dot_dimension_numbers"]), options
    return ops.dot_general, (params.get("dimension_numbers"),), options


def run_matmul(site: Site, frame: Frame, lhs: Any, rhs: Any, *rest: Any, params: Mapping[str, Any]) -> Array:
    """Run a matmul with the parameters of a JAX primitive, quantized by the config of its site."""
    (op, args, options), config, operands = matmul_call(params, rest), site.config, (lhs, rhs)
    if config is None:
        return op(lhs, rhs, *args, **options)
    stateful, quantized = frame.context.provider.stateful, any(isinstance(x, QArray) for x in operands)
    axes = operand_axes(params, lhs.shape, rhs.shape) if stateful or quantized else ()
    scaling: dict[str, Any] = static_ranges(site, frame, operands, axes) if stateful else {}
    if stateful:
        (lhs, rhs), learned = learned_ranges(site, frame, operands, axes)
        operands, scaling = (lhs, rhs), scaling | learned
    if quantized:
        scaling |= delayed_ranges(site, frame, operands, axes) if stateful else {}
        sides = zip(operands, (config.fwd.lhs, config.fwd.rhs), axes, ("lhs", "rhs"), strict=True)
        codes = [
            x
            if operand is None or isinstance(x, QArray)
            else operand.quantizer(x.ndim, **own).quantize(x, bounds=scaling.get(name))
            for x, operand, own, name in sides
        ]
        return op(*codes, *args, **options)
    if "window_strides" not in params:
        options["placement"] = site.placement
    if stateful:
        scaling |= gradient_state(site, frame, lhs, rhs, params)
    key = _rounding_key(site, frame) if config.stochastic else None
    return op(lhs, rhs, *args, **options, config=config, key=key, scaling=scaling)


def _rounding_key(site: Site, frame: Frame) -> Array | None:
    """The random key of a matmul; None if there is none and only gradients need one, which raise without it."""
    key = frame.key_of(site.path, site.op_id)
    if key is None and frame.context.init:
        return jax.random.key(0)
    if key is None and site.config is not None and site.config.fwd.stochastic:
        raise ValueError(
            f"{site.op_id} at {site.path!r} rounds stochastically and needs a random key: call "
            "octavo.quantized(fn, rules).stateful(key=key)(...), or in a Flax model give the rng stream "
            "'stochastic_rounding'"
        )
    return key


def _run_override(site: Site, frame: Frame, lhs: Any, rhs: Any, *rest: Any, params: Mapping[str, Any]) -> Array:
    """Run the operation of a subclass of the provider, with the arguments that its JAX namesake has."""
    (_, args, options), numbers = matmul_call(params, rest), params.get("dimension_numbers")
    args = (lhs, rhs, *args)
    if site.op == "einsum":
        args = (_subscripts(numbers, lhs.ndim, rhs.ndim), lhs, rhs)
    elif "ragged_dot_dimension_numbers" in params:
        args, options["dimension_numbers"] = (lhs, rhs, rest[0]), params["ragged_dot_dimension_numbers"]
    run = functools.partial(frame.context.provider.handlers[site.op], *args, **options)
    token = current_operation.set(Operation(site, frame))
    try:
        return run() if frame.context.host is None else frame.context.host(frame, site, run)
    finally:
        current_operation.reset(token)


def _subscripts(numbers: Any, lhs_ndim: int, rhs_ndim: int) -> str:
    """The dimension numbers of a dot_general as the subscripts of an einsum."""
    (lc, rc), (lb, rb) = numbers
    letters = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    left = [next(letters) for _ in range(lhs_ndim)]
    shared = {b: left[a] for a, b in (*zip(lb, rb, strict=True), *zip(lc, rc, strict=True))}
    right = [shared.get(b) or next(letters) for b in range(rhs_ndim)]
    kept = [c for a, c in enumerate(left) if a not in (*lc, *lb)] + [c for b, c in enumerate(right) if b not in shared]
    return f"{''.join(left)},{''.join(right)}->{''.join([*(left[a] for a in lb), *kept])}"
