"""Rewriting loops, branches, calls and shard_map: each is called again with a rewritten body.

Calling `jax.lax.scan`, `jax.jit`, `jax.shard_map` and the like, rather than editing their equations, lets values be
QArrays, adds inputs and outputs for state, and keeps to JAX's public interface.
"""

import dataclasses
import math
import weakref
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from octavo.qarray import QArray, shardings
from octavo.transform import jaxpr
from octavo.transform.frame import Frame, Key, Programs, Value
from octavo.transform.jaxpr import Equation, Jaxpr, scope
from octavo.transform.rearrange import as_array
from octavo.transform.weights import ACTIVATION, Origin, combine, layer_origin


def needs_rewrite(eqn: Equation, values: list[Value], frame: Frame) -> bool:
    """Whether to rewrite a body: it has a matmul, or weights pass through it."""
    if eqn.primitive.name == "cond" and eqn.params.get("branches_platforms"):
        return False  # lowerings of one function for several platforms
    if any(_has_matmul(body, frame) for body in jaxpr.bodies(eqn)) or (frame.context.init and eqn.effects):
        return True
    if any(isinstance(v.data, QArray) for v in values):
        return True
    return eqn.primitive.name == "jit" and any(v.origin.leaves for v in values)


def _has_matmul(body: Jaxpr, frame: Frame) -> bool:
    """Whether a body has a matmul that can be replaced or, while state is being initialized, that is listed."""
    listing = frame.context.init
    return jaxpr.has_matmul(body, listing or frame.context.provider.inside_custom, kernels=listing)


class Body:
    """A body of an equation as a function of values, state and a PRNG key, to be called by a function of JAX.

    Counters and origins are those of the last trace.
    """

    def __init__(self, eqn: Equation, body: Jaxpr, origins: list[Origin], frame: Frame, **changes: Any):
        self.jaxpr, self.origins, self.start = body, origins, dict(frame.counters)
        # A body may be traced again later, so it must not hold tracers of the frame. A call that JAX has traced before
        # finds no sites, so they are kept with the body.
        context = dataclasses.replace(frame.context, sites={})
        self.frame = frame.inner(scope(eqn), context=context, state={}, key=None, **changes)
        self.end = self.start
        self.outs: list[Origin] = []

    def __call__(self, data: list[Any], state: dict[Key, Any], key: Any) -> tuple[list[Any], dict[Key, Any]]:
        inner = self.frame.inner("", counters=dict(self.start), state=state, key=key)
        outs = inner.context.evaluate(self.jaxpr, _values(data, self.origins), inner)
        self.end, self.outs = inner.counters, [v.origin for v in outs]
        return [v.data for v in outs], inner.new

    def finish(
        self, frame: Frame, outs: list[Any], new: dict[Key, Any], origins: list[Origin] | None = None
    ) -> list[Value]:
        """Update the counters and the state of the frame; returns the results as values."""
        frame.counters.clear()
        frame.counters.update(self.end)
        frame.new.update(new)
        frame.context.sites.update(self.frame.context.sites)
        return _values(outs, self.outs if origins is None else origins)


def _values(data: list[Any], origins: list[Origin]) -> list[Value]:
    return [Value(d, o) for d, o in zip(data, origins, strict=True)]


def _data(values: list[Value]) -> list[Any]:
    return [v.data for v in values]


def _origins(values: list[Value]) -> list[Origin]:
    return [v.origin for v in values]


def _arrays(data: list[Any]) -> list[Any]:
    return [as_array(d) for d in data]


def _state(rewrite: Any, eqn: Equation, values: list[Value], frame: Frame) -> dict[Key, Any]:
    """The state that a body uses, whose keys are found by abstract evaluation."""
    context = frame.context
    if not context.provider.stateful or context.init:
        return {}
    init = dataclasses.replace(context, init=True, update=False, sites={}, cache=Programs())

    def run(data):
        inner = frame.inner("", context=init, counters=dict(frame.counters), state={}, key=None)
        rewrite(eqn, _values(data, _origins(values)), inner)
        return inner.new

    return {key: frame.read(key, lambda: None) for key in jax.eval_shape(run, _data(values))}


def _jit(eqn: Equation, values: list[Value], frame: Frame) -> list[Value]:
    body = eqn.params["jaxpr"]
    if frame.context.init or not _has_matmul(body, frame):
        return frame.context.evaluate(body, values, frame.inner(scope(eqn), new=frame.new))
    state = _state(_jit, eqn, values, frame)
    run, fn = _jitted(eqn, _origins(values), frame, tuple(sorted(state)))
    return fn.finish(frame, *run(*_data(values), state, frame.key))


def _jitted(eqn: Equation, origins: list[Origin], frame: Frame, keys: tuple[Key, ...]) -> tuple[Any, Body]:
    """The jitted form of a nested jit, cached so that equal calls compile once."""
    body, context = eqn.params["jaxpr"], frame.context
    place = (frame.scope, scope(eqn), tuple(sorted(frame.counters.items())), frame.manual_axes, frame.trips)
    known = context.cache.setdefault(body, {})
    cached = (tuple(origins), place, keys, context.update, eqn.params["name"])
    if cached in known:
        return known[cached]
    # Only a call of this body traces it again. A reference would keep it in the cache for good.
    fn = Body(eqn, cast(Jaxpr, weakref.proxy(body)), origins, frame)
    options = jaxpr.jit_options(eqn)
    if options.get("in_shardings") is not None:
        options["in_shardings"] = (*options["in_shardings"], None, None)
    if options.get("out_shardings") is not None:
        options["out_shardings"] = (list(options["out_shardings"]), None)

    def flat(*args):
        *data, state, key = args
        return fn(data, state, key)

    flat.__name__ = flat.__qualname__ = eqn.params["name"]
    known[cached] = jax.jit(flat, **options), fn
    return known[cached]


def _remat(eqn: Equation, values: list[Value], frame: Frame) -> list[Value]:
    fn = Body(eqn, eqn.params["jaxpr"], _origins(values), frame)
    args = _data(values), _state(_remat, eqn, values, frame), frame.key
    if eqn.params["differentiated"]:
        # The rematerialization of a backward pass is kept apart from the forward computation by a barrier.
        return fn.finish(frame, *fn(*jax.lax.optimization_barrier(args)))
    run = jax.checkpoint(fn, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
    return fn.finish(frame, *run(*args))


def _carried(body: Jaxpr, init: list[Value], first: int) -> list[Origin | None]:
    """The origins of the carry of a loop where its body returns it unchanged; None for the other ones."""
    unchanged = [body.outvars[i] is body.invars[first + i] for i in range(len(init))]
    return [v.origin if same else None for v, same in zip(init, unchanged, strict=True)]


def _scan(eqn: Equation, values: list[Value], frame: Frame) -> list[Value]:
    parts = jaxpr.scan_parts(eqn)
    n, m = parts.consts, parts.consts + parts.carry
    consts, init, xs = values[:n], values[n:m], values[m:]
    kept = _carried(parts.body, init, n)
    origins = [*_origins(consts), *(o or ACTIVATION for o in kept), *(layer_origin(v.origin) for v in xs)]
    fn = Body(eqn, parts.body, origins, frame, trips=frame.trips * parts.length)
    state = _state(_scan, eqn, values, frame)
    keys = None if frame.key is None else jax.random.split(frame.key, parts.length)

    def step(carry, x):
        data, state, key = x
        outs, new = fn([*_data(consts), *carry, *data], state, key)
        outs = _arrays(outs)
        return outs[: parts.carry], (outs[parts.carry :], new)

    stacked = [_stacked(v.data, parts.length) for v in xs]
    carry, (ys, new) = jax.lax.scan(
        step,
        _arrays(_data(init)),
        (stacked, state, keys),
        length=parts.length,
        reverse=parts.reverse,
        unroll=parts.unroll,
    )
    carried = [old or o for old, o in zip(kept, fn.outs, strict=False)]
    return fn.finish(frame, [*carry, *ys], new, [*carried, *(combine([o]) for o in fn.outs[parts.carry :])])


def _stacked(data: Any, length: int) -> Any:
    """Stacked weights with stacked scales, also where all layers share one."""
    if not isinstance(data, QArray):
        return data
    return data._map(lambda x: x if x.shape[0] == length else jnp.broadcast_to(x, (length, *x.shape[1:])))


def _while(eqn: Equation, values: list[Value], frame: Frame) -> list[Value]:
    parts = jaxpr.while_parts(eqn)
    n, m = parts.cond_consts, parts.cond_consts + parts.body_consts
    cond_consts, body_consts, init = values[:n], values[n:m], values[m:]
    kept = _carried(parts.body, init, parts.body_consts)
    own = [o or ACTIVATION for o in kept]
    cond = Body(eqn, parts.cond, [*_origins(cond_consts), *own], frame)
    fn = Body(eqn, parts.body, [*_origins(body_consts), *own], frame)
    carry = _arrays(_data(init))
    if frame.context.init:
        # Only the keys of the state matter: the body runs once.
        outs, new = fn([*_data(body_consts), *carry], {}, frame.key)
        return fn.finish(frame, _arrays(outs), new)

    def cond_fun(loop):
        outs, _ = cond([*_data(cond_consts), *loop[0]], {}, None)
        return outs[0]

    def body_fun(loop):
        carry, state, key = loop
        now, rest = (None, None) if key is None else tuple(jax.random.split(key))
        outs, new = fn([*_data(body_consts), *carry], state, now)
        return _arrays(outs), state | new, rest

    start = carry, _state(_while, eqn, values, frame), frame.key
    carry, new, _ = jax.lax.while_loop(cond_fun, body_fun, start)
    return fn.finish(frame, carry, new, [old or o for old, o in zip(kept, fn.outs, strict=True)])


def _cond(eqn: Equation, values: list[Value], frame: Frame) -> list[Value]:
    index, operands = values[0], values[1:]
    made: list[Body] = []

    def branch_function(branch: Jaxpr):
        def run(data, state, key):
            if made:  # the operations of a branch are numbered after those of the branches before it
                made[-1].finish(frame, [], {}, [])
            made.append(Body(eqn, branch, _origins(operands), frame))
            outs, new = made[-1](data, state, key)
            return _arrays(outs), state | new

        return run

    branches = [branch_function(branch) for branch in eqn.params["branches"]]
    args = _data(operands), _state(_cond, eqn, values, frame), frame.key
    if frame.context.init:
        ran = [branch(*args) for branch in branches]
        return made[-1].finish(frame, ran[-1][0], {k: v for _, new in ran for k, v in new.items()})
    outs, new = jax.lax.switch(index.data, branches, *args)
    return made[-1].finish(frame, outs, new, [combine([fn.outs[i] for fn in made]) for i in range(len(outs))])


def _shard_map(eqn: Equation, values: list[Value], frame: Frame) -> list[Value]:
    p = eqn.params
    # In the order of the mesh: that of a set differs from process to process, and keys depend on it.
    manual = tuple(name for name in p["mesh"].axis_names if name in p["newly_manual_axes"])
    devices = math.prod(dict(p["mesh"].shape)[name] for name in manual)
    changes: Any = {"manual_axes": (*frame.manual_axes, *manual), "trips": frame.trips * devices}
    fn = Body(eqn, p["jaxpr"], _origins(values), frame, **changes)
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
    return fn.finish(frame, *mapped(_data(values), state, frame.key))


REWRITES = {
    "jit": _jit,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "remat2": _remat,
    "checkpoint": _remat,
    "shard_map": _shard_map,
}
