"""Rewriting loops, branches, calls and shard_map: each is called again with a rewritten body.

Calling `jax.lax.scan`, `jax.jit`, `jax.shard_map` and the like, rather than editing their equations, lets values be
QArrays, adds inputs and outputs for state, and keeps to JAX's public interface.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from octavo.qarray import QArray, shardings
from octavo.transform import jaxpr
from octavo.transform.frame import Frame, Key, Value
from octavo.transform.jaxpr import Equation, Jaxpr, scope
from octavo.transform.rearrange import as_array
from octavo.transform.weights import ACTIVATION, Origin, combine, layer_origin


def needs_rewrite(eqn: Equation, values: list[Value], frame: Frame) -> bool:
    """Whether to rewrite a body: it has a matmul, or weights pass through it."""
    if eqn.primitive.name == "cond" and eqn.params.get("branches_platforms"):
        return False  # lowerings of one function for several platforms
    opened = any(rule.inside_custom for rule in frame.context.provider.rules)
    if any(jaxpr.has_matmul(body, opened) for body in jaxpr.bodies(eqn)):
        return True
    if any(isinstance(v.data, QArray) for v in values):
        return True
    return eqn.primitive.name == "jit" and any(v.origin.is_weight for v in values)


class Body:
    """A jaxpr as a function of values, state and a PRNG key; counters and origins are those of the last trace."""

    def __init__(self, jaxpr: Jaxpr, origins: list[Origin], frame: Frame, name: str, **changes: Any):
        self.jaxpr, self.origins, self.name, self.changes = jaxpr, origins, name, changes
        self.start = dict(frame.counters)
        # A body may be traced again later, so it must not hold tracers of the frame.
        self.frame = frame.inner(name, state={}, key=None, **changes)
        self.end = self.start
        self.outs: list[Origin] = []

    def __call__(self, data: list[Any], state: dict[Key, Any], key: Any) -> tuple[list[Any], dict[Key, Any]]:
        inner = self.frame.inner("", counters=dict(self.start), state=state, key=key)
        values = [Value(d, o) for d, o in zip(data, self.origins, strict=True)]
        outs = inner.context.evaluate(self.jaxpr, values, inner)
        self.end, self.outs = inner.counters, [v.origin for v in outs]
        return [v.data for v in outs], inner.new

    def finish(self, frame: Frame) -> None:
        """Set the counters of the frame to their values after the body."""
        frame.counters.clear()
        frame.counters.update(self.end)


def _arrays(data: list[Any]) -> list[Any]:
    return [as_array(d) for d in data]


def _state_keys(rewrite: Any, eqn: Equation, values: list[Value], frame: Frame) -> list[Key]:
    """The keys of the state that a body uses, by abstract evaluation."""
    context = frame.context
    if not context.stateful or context.init:
        return []
    init = dataclasses.replace(context, init=True, update=False, sites={}, cache={})
    inner = frame.inner("", context=init, counters=dict(frame.counters), state={}, key=None)

    def run(data):
        rewrite(eqn, [Value(d, v.origin) for d, v in zip(data, values, strict=True)], inner)
        return inner.new

    return list(jax.eval_shape(run, [v.data for v in values]))


def _state(rewrite: Any, eqn: Equation, values: list[Value], frame: Frame) -> dict[Key, Any]:
    return {key: frame.read(key, lambda: None) for key in _state_keys(rewrite, eqn, values, frame)}


def _wrap(data: list[Any], origins: list[Origin]) -> list[Value]:
    return [Value(d, o) for d, o in zip(data, origins, strict=True)]


def _jit(eqn: Equation, values: list[Value], frame: Frame) -> list[Value]:
    body, origins = eqn.params["jaxpr"], [v.origin for v in values]
    opened = any(rule.inside_custom for rule in frame.context.provider.rules)
    if not jaxpr.has_matmul(body, opened) or frame.context.init:
        inner = frame.inner(scope(eqn), new=frame.new)
        return inner.context.evaluate(body, values, inner)
    state = _state(_jit, eqn, values, frame)
    run, fn = _jitted(eqn, origins, frame, tuple(sorted(state)))
    outs, new = run([v.data for v in values], state, frame.key)
    fn.finish(frame)
    frame.new.update(new)
    return _wrap(outs, fn.outs)


def _jitted(eqn: Equation, origins: list[Origin], frame: Frame, keys: tuple[Key, ...]) -> tuple[Any, Body]:
    """The jitted form of a nested jit, cached so that equal calls compile once."""
    body, context = eqn.params["jaxpr"], frame.context
    place = (frame.scope, scope(eqn), tuple(sorted(frame.counters.items())), frame.manual_axes, frame.trips)
    cached = (body, tuple(origins), place, keys, context.update, eqn.params["name"])
    if cached in context.cache:
        return context.cache[cached]
    fn = Body(body, origins, frame, scope(eqn))
    options = jaxpr.jit_options(eqn)
    donated = options.pop("donate_argnums")
    ins, outs = options.pop("in_shardings", None), options.pop("out_shardings", None)
    if ins is not None:
        options["in_shardings"] = (*ins, None, None)
    if outs is not None:
        options["out_shardings"] = (list(outs), None)

    def flat(*args):
        *data, state, key = args
        return fn(data, state, key)

    flat.__name__ = flat.__qualname__ = eqn.params["name"]
    jitted = jax.jit(flat, donate_argnums=donated, **options)
    context.cache[cached] = (lambda data, state, key: jitted(*data, state, key)), fn
    return context.cache[cached]


def _remat(eqn: Equation, values: list[Value], frame: Frame) -> list[Value]:
    fn = Body(eqn.params["jaxpr"], [v.origin for v in values], frame, scope(eqn))
    state = _state(_remat, eqn, values, frame)
    if eqn.params["differentiated"]:
        outs, new = _keep_barrier(eqn, fn, [v.data for v in values], state, frame.key)
    else:
        run = jax.checkpoint(fn, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
        outs, new = run([v.data for v in values], state, frame.key)
    fn.finish(frame)
    frame.new.update(new)
    return _wrap(outs, fn.outs)


def _keep_barrier(eqn: Equation, fn: Body, data: list[Any], state: Any, key: Any) -> Any:
    """The rematerialization of a backward pass, kept apart from the forward computation by a barrier."""
    leaves, tree = jax.tree.flatten((data, state, key))
    leaves, barrier_tree = jax.tree.flatten(jax.lax.optimization_barrier(leaves))
    return fn(*jax.tree.unflatten(tree, jax.tree.unflatten(barrier_tree, leaves)))


def _scan(eqn: Equation, values: list[Value], frame: Frame) -> list[Value]:
    parts = jaxpr.scan_parts(eqn)
    n, m = parts.consts, parts.consts + parts.carry
    consts, init, xs = values[:n], values[n:m], values[m:]
    unchanged = [parts.body.outvars[i] is parts.body.invars[n + i] for i in range(parts.carry)]
    kept = [v.origin if same else ACTIVATION for v, same in zip(init, unchanged, strict=True)]
    origins = [*(v.origin for v in consts), *kept, *(layer_origin(v.origin) for v in xs)]
    fn = Body(parts.body, origins, frame, scope(eqn), trips=frame.trips * parts.length)
    state = _state(_scan, eqn, values, frame)
    keys = None if frame.key is None else jax.random.split(frame.key, parts.length)

    def step(carry, x):
        data, state, key = x
        outs, new = fn([*(v.data for v in consts), *carry, *data], state, key)
        outs = _arrays(outs)
        return outs[: parts.carry], (outs[parts.carry :], new)

    stacked = [_stacked(v.data, parts.length) for v in xs]
    carry, (ys, new) = jax.lax.scan(
        step,
        _arrays([v.data for v in init]),
        (stacked, state, keys),
        length=parts.length,
        reverse=parts.reverse,
        unroll=parts.unroll,
    )
    fn.finish(frame)
    frame.new.update(new)
    outs = [v.origin if same else o for v, same, o in zip(init, unchanged, fn.outs, strict=False)]
    return _wrap([*carry, *ys], [*outs, *(combine([o]) for o in fn.outs[parts.carry :])])


def _stacked(data: Any, length: int) -> Any:
    """Stacked weights with stacked scales, also where all layers share one."""
    if not isinstance(data, QArray):
        return data
    return data._map(lambda x: x if x.shape[0] == length else jnp.broadcast_to(x, (length, *x.shape[1:])))


def _while(eqn: Equation, values: list[Value], frame: Frame) -> list[Value]:
    parts = jaxpr.while_parts(eqn)
    n, m = parts.cond_consts, parts.cond_consts + parts.body_consts
    cond_consts, body_consts, init = values[:n], values[n:m], values[m:]
    unchanged = [parts.body.outvars[i] is parts.body.invars[parts.body_consts + i] for i in range(len(init))]
    kept = [v.origin if same else ACTIVATION for v, same in zip(init, unchanged, strict=True)]
    cond = Body(parts.cond, [*(v.origin for v in cond_consts), *kept], frame, scope(eqn))
    carry = _arrays([v.data for v in init])
    if frame.context.init:
        # Only the keys of the state matter: the body runs once.
        fn = Body(parts.body, [*(v.origin for v in body_consts), *kept], frame, scope(eqn))
        outs, new = fn([*(v.data for v in body_consts), *carry], {}, frame.key)
        fn.finish(frame)
        frame.new.update(new)
        return _wrap(_arrays(outs), fn.outs)
    state = _state(_while, eqn, values, frame)
    fn = Body(parts.body, [*(v.origin for v in body_consts), *kept], frame, scope(eqn))

    def cond_fun(loop):
        outs, _ = cond([*(v.data for v in cond_consts), *loop[0]], {}, None)
        return outs[0]

    def body_fun(loop):
        carry, state, key = loop
        now, rest = (None, None) if key is None else tuple(jax.random.split(key))
        outs, new = fn([*(v.data for v in body_consts), *carry], state, now)
        return _arrays(outs), state | new, rest

    carry, new, _ = jax.lax.while_loop(cond_fun, body_fun, (carry, state, frame.key))
    fn.finish(frame)
    frame.new.update(new)
    return _wrap(carry, [v.origin if same else o for v, same, o in zip(init, unchanged, fn.outs, strict=True)])


def _cond(eqn: Equation, values: list[Value], frame: Frame) -> list[Value]:
    index, operands = values[0], values[1:]
    origins, data = [v.origin for v in operands], [v.data for v in operands]
    branches = eqn.params["branches"]
    if frame.context.init:
        for branch in branches:
            fn = Body(branch, origins, frame, scope(eqn))
            outs, new = fn(data, {}, frame.key)
            fn.finish(frame)
            frame.new.update(new)
        return _wrap(_arrays(outs), fn.outs)
    state = _state(_cond, eqn, values, frame)
    made: list[Body] = []

    def branch_function(branch: Jaxpr):
        def run(data, state, key):
            if made:
                made[-1].finish(frame)
            fn = Body(branch, origins, frame, scope(eqn))
            made.append(fn)
            outs, new = fn(data, state, key)
            return _arrays(outs), state | new

        return run

    outs, new = jax.lax.switch(index.data, [branch_function(b) for b in branches], data, state, frame.key)
    made[-1].finish(frame)
    frame.new.update(new)
    return _wrap(outs, [combine([fn.outs[i] for fn in made]) for i in range(len(outs))])


def _shard_map(eqn: Equation, values: list[Value], frame: Frame) -> list[Value]:
    p = eqn.params
    manual = tuple(p["newly_manual_axes"])
    devices = math.prod(dict(p["mesh"].shape)[name] for name in manual)
    fn = Body(
        p["jaxpr"],
        [v.origin for v in values],
        frame,
        scope(eqn),
        manual_axes=(*frame.manual_axes, *manual),
        trips=frame.trips * devices,
    )
    state = _state(_shard_map, eqn, values, frame)
    specs = [
        shardings(v.data, spec) if isinstance(v.data, QArray) else spec
        for v, spec in zip(values, p["in_specs"], strict=True)
    ]

    def run(data, state, key):
        for name in manual if key is not None else ():
            key = jax.random.fold_in(key, jax.lax.axis_index(name))
        outs, new = fn(data, state, key)
        return _arrays(outs), new

    none = PartitionSpec()
    mapped = jax.shard_map(
        run,
        mesh=p["mesh"],
        in_specs=(specs, none, none),
        out_specs=(list(p["out_specs"]), none),
        axis_names=set(manual),
        check_vma=p["check_vma"],
    )
    outs, new = mapped([v.data for v in values], state, frame.key)
    fn.finish(frame)
    frame.new.update(new)
    return _wrap(outs, fn.outs)


REWRITES = {
    "jit": _jit,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "remat2": _remat,
    "checkpoint": _remat,
    "shard_map": _shard_map,
}
