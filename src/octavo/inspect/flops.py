"""The matmuls of a jaxpr, their FLOPs, and whether their operands are low precision.

A matmul is `native` where both operands have eight bits or fewer, `emulated` where both are wider but were computed
from such codes, `weight_only` where one of them was, and `float` otherwise. Forward dataflow gives every value

* its span: the number of entries before broadcasting, constants aside, by which a scale is recognised; and
* its codes: those that it was computed from elementwise, by decoding or by movement.

Multiplying codes with a scale keeps them; combining two arrays of about the same span does not.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from octavo import kernels
from octavo.distributed.expert_sharding import SHARE
from octavo.ops.lowerings.grouped import ITERATIONS
from octavo.transform.jaxpr import (
    BACKWARD,
    KERNELS,
    MATMULS,
    Equation,
    Jaxpr,
    Literal,
    bodies,
    platform_branch,
    scan_parts,
    scope,
    scope_names,
    while_parts,
)
from octavo.transform.matmul_flops import matmul_flops

SCALE = 8  # codes, at least, for each entry of a scale

# fmt: off
_DECODES = {
    "convert_element_type", "bitcast_convert_type", "reduce_precision", "neg", "abs", "sign", "round", "floor", "max",
    "min", "clamp", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not", "shift_left", "shift_right_logical",
    "shift_right_arithmetic", "is_finite",
}
_SCALES = {"mul", "div", "add", "sub"}
_MOVES = {
    "reshape", "transpose", "broadcast_in_dim", "slice", "dynamic_slice", "squeeze", "expand_dims", "copy", "copy_p",
    "rev", "split", "name", "optimization_barrier", "layout_constraint", "sharding_constraint", "reshard", "mesh_cast",
    "device_put", "pvary", "pcast", "ppermute", "all_to_all", "all_gather", "all_gather_invariant", "octavo_row_major",
}
# fmt: on
_JOINS = {"concatenate": None, "stack": None, "pad": 2, "dynamic_update_slice": 2}


@dataclasses.dataclass(frozen=True)
class CountedMatmul:
    """One matmul, convolution or ragged dot; `flops` are those of all `count` executions."""

    path: str
    op: str
    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    lhs_dtype: str
    rhs_dtype: str
    out_dtype: str
    flops: int
    count: int
    backward: bool
    kind: str
    stored: bool = False
    """Whether an operand was computed from codes that are inputs of the program, as served weights are."""


class FlopCount(NamedTuple):
    """The matmuls of a jaxpr.

    Attributes:
        matmuls: All of them.
        opaque: Kernels, whose matmuls are unknown.
        loops: Loops of unknown trip count.
        codes: For both operands of each matmul the dtype or format of the codes that it was computed from, if any.
    """

    matmuls: tuple[CountedMatmul, ...] = ()
    opaque: tuple[str, ...] = ()
    loops: tuple[str, ...] = ()
    codes: tuple[tuple[str | None, str | None], ...] = ()

    @property
    def flops(self) -> int:
        return sum(p.flops for p in self.matmuls)

    def plus(self, other: "FlopCount") -> "FlopCount":
        return FlopCount._make(mine + theirs for mine, theirs in zip(self, other, strict=True))

    def times(self, count: int, share: int = 1) -> "FlopCount":
        """The same executed `count` times, with its FLOPs divided among `share` devices."""
        scaled = (dataclasses.replace(p, flops=p.flops * count // share, count=p.count * count) for p in self.matmuls)
        return self._replace(matmuls=tuple(scaled))

    def within_scope(self, names: str) -> "FlopCount":
        """The same within a scope of these names."""
        path, backward = "/".join(scope_names(names)), BACKWARD in names
        join = lambda inner: "/".join(filter(None, (path, inner)))  # noqa: E731
        moved = (dataclasses.replace(p, path=join(p.path), backward=backward or p.backward) for p in self.matmuls)
        return FlopCount(tuple(moved), tuple(map(join, self.opaque)), tuple(map(join, self.loops)), self.codes)


def count_flops(jaxpr: Jaxpr, *, platform: str, formats: Mapping[int, str] | None = None) -> FlopCount:
    """Count the matmuls of a jaxpr on a platform; `formats` are those of inputs that are codes, by number."""
    inputs = [_fresh(v.aval) for v in jaxpr.invars]
    for i, name in (formats or {}).items():
        inputs[i] = inputs[i]._replace(origin=_Codes(name))
    for value in inputs:
        if value.origin is not None:
            value.origin.stored = True
    return _run(jaxpr, inputs, platform)[0]


def is_low(dtype: Any) -> bool:
    """Whether a dtype has eight bits or fewer."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits <= 8
    return jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits <= 8


class _Codes:
    """Codes, compared by identity."""

    def __init__(self, name: str):
        self.name, self.stored = name, False


class _Value(NamedTuple):
    span: int
    origin: _Codes | None = None


def _size(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))


def _fresh(aval: Any) -> _Value:
    return _coded(_Value(_size(aval)), aval)


def _coded(value: _Value, aval: Any) -> _Value:
    """The value as new codes, if it has a low-precision dtype and is not computed from codes."""
    is_new = value.origin is None and is_low(getattr(aval, "dtype", np.bool_))
    return _Value(_size(aval), _Codes(str(aval.dtype))) if is_new else value


def _within(value: _Value, aval: Any) -> _Value:
    return value._replace(span=min(value.span, _size(aval)))


def _run(jaxpr: Jaxpr, inputs: Sequence[_Value], platform: str) -> tuple[FlopCount, list[_Value]]:
    env: dict[Any, _Value] = {v: _fresh(v.aval) for v in jaxpr.constvars}
    env |= zip(jaxpr.invars, (_within(x, v.aval) for x, v in zip(inputs, jaxpr.invars, strict=True)), strict=True)
    read = lambda atom: _Value(0) if isinstance(atom, Literal) else env[atom]  # noqa: E731
    done = FlopCount()
    for eqn in jaxpr.eqns:
        found, outs = _equation(eqn, [read(v) for v in eqn.invars], platform)
        done = done.plus(found.within_scope(scope(eqn))) if any(found) else done
        env |= ((v, _coded(x, v.aval)) for v, x in zip(eqn.outvars, outs, strict=True))
    return done, [read(v) for v in jaxpr.outvars]


def _equation(eqn: Equation, values: list[_Value], platform: str) -> tuple[FlopCount, list[_Value]]:
    name = eqn.primitive.name
    outs = [_fresh(v.aval) for v in eqn.outvars]
    if name in MATMULS or name == kernels.MATVEC:
        return _matmul(eqn, values), outs
    if name in KERNELS:
        return FlopCount(opaque=(name,)), outs
    if name in _CONTROL:
        return _CONTROL[name](eqn, values, platform)
    found = bodies(eqn)
    if len(found) == 1 and len(found[0].invars) == len(values) and len(found[0].outvars) == len(outs):
        return _run(found[0], values, platform)
    done = FlopCount()
    for body in found:
        done = done.plus(_run(body, [_fresh(v.aval) for v in body.invars], platform)[0])
    return done, outs if found else _flow(eqn, values)


def _matmul(eqn: Any, values: list[_Value]) -> FlopCount:
    lhs, rhs, out = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
    codes = [None if v.origin is None else v.origin.name for v in values[:2]]
    if eqn.primitive.name in MATMULS:
        op, flops = MATMULS[eqn.primitive.name], matmul_flops(eqn.params, lhs.shape, rhs.shape, out.shape)
        kind = ("float", "weight_only", "emulated")[sum(code is not None for code in codes)]
        kind = "native" if is_low(lhs.dtype) and is_low(rhs.dtype) else kind
    else:  # a CPU kernel, of rows with stored codes; packed codes have half the contracted size
        op, flops = "dot_general", 2 * math.prod(lhs.shape) * out.shape[1]
        kind = "native" if is_low(lhs.dtype) else "weight_only"
    dtypes = [str(x.dtype) for x in (lhs, rhs, out)]
    stored = any(v.origin is not None and v.origin.stored for v in values[:2])
    more: dict[str, Any] = {"flops": flops, "count": 1, "backward": False, "kind": kind, "stored": stored}
    matmul = CountedMatmul("", op, lhs.shape, rhs.shape, *dtypes, **more)
    return FlopCount((matmul,), codes=((codes[0], codes[1]),))


def _joined(a: _Value, b: _Value, aval: Any) -> _Value:
    """The join of two values; in a loop this reaches a fixed point, as spans grow only once."""
    span = a.span if b.span <= a.span else _size(aval)
    return _Value(span, a.origin if b.origin is not None else None)


def _fixed_point(body: Jaxpr, before: list[_Value], carry: list[_Value], after: list[_Value], platform: str):
    """Run the body of a loop with the fixed point of its carry."""
    while True:
        done, outs = _run(body, [*before, *carry, *after], platform)
        places = body.invars[len(before) : len(before) + len(carry)]
        joined = [_joined(a, b, v.aval) for a, b, v in zip(carry, outs[: len(carry)], places, strict=True)]
        if joined == carry:
            return done, [*carry, *outs[len(carry) :]]
        carry = joined


def _scan(eqn: Equation, values: list[_Value], platform: str):
    scan = scan_parts(eqn)
    start = scan.consts + scan.carry
    xs = [_within(x, v.aval) for x, v in zip(values[start:], scan.body.invars[start:], strict=True)]
    done, outs = _fixed_point(scan.body, values[: scan.consts], values[scan.consts : start], xs, platform)
    stacked = [y._replace(span=y.span * scan.length) for y in outs[scan.carry :]]
    return done.times(scan.length), [*outs[: scan.carry], *stacked]


def _while(eqn: Equation, values: list[_Value], platform: str):
    loop = while_parts(eqn)
    consts = loop.cond_consts + loop.body_consts
    done, carry = _fixed_point(loop.body, values[loop.cond_consts : consts], values[consts:], [], platform)
    test, _ = _run(loop.cond, [*values[: loop.cond_consts], *carry], platform)
    done = done.plus(test)
    if trips := re.search(rf"{re.escape(ITERATIONS)}(\d+)", scope(eqn)):
        return done.times(int(trips[1])), carry
    return (done._replace(loops=(*done.loops, "while")) if done.matmuls or done.opaque else done), carry


def _cond(eqn: Equation, values: list[_Value], platform: str):
    branches = eqn.params["branches"]
    if (chosen := platform_branch(eqn, platform)) is not None:
        return _run(chosen, values[1:], platform)
    ran = [_run(b, values[1:], platform) for b in branches]
    outs = ran[0][1]
    for _, other in ran[1:]:
        outs = [_joined(a, b, v.aval) for a, b, v in zip(outs, other, eqn.outvars, strict=True)]
    return max((done for done, _ in ran), key=lambda done: done.flops), outs


def _shard_map(eqn: Equation, values: list[_Value], platform: str):
    body, mesh = eqn.params["jaxpr"], eqn.params["mesh"]
    done, outs = _run(body, values, platform)
    grown = [
        x._replace(span=x.span * _size(v.aval) // max(1, _size(inner.aval)))
        for x, v, inner in zip(outs, eqn.outvars, body.outvars, strict=True)
    ]
    devices = math.prod(mesh.shape[axis] for axis in eqn.params["newly_manual_axes"])
    # Each device has a buffer for all rows; only this share is expected to be routed to its experts.
    share = next((m for inner in body.eqns if (m := re.search(rf"{re.escape(SHARE)}(\d+)", scope(inner)))), None)
    return done.times(devices, 1 if share is None else int(share[1])), grown


_CONTROL: dict[str, Callable[..., Any]] = {"scan": _scan, "while": _while, "cond": _cond, "shard_map": _shard_map}


def _flow(eqn: Equation, values: list[_Value]) -> list[_Value]:
    """The results of an equation without a body that is no matmul."""
    name, sizes = eqn.primitive.name, [_size(v.aval) for v in eqn.outvars]
    if name == "iota":
        return [_Value(0)]
    if name in _MOVES:
        sources = values if len(values) == len(sizes) else values[:1] * len(sizes)
        grown = sizes[0] // max(1, _size(eqn.invars[0].aval)) if name.startswith("all_gather") else 1
        return [x._replace(span=min(x.span * grown, n)) for x, n in zip(sources, sizes, strict=True)]
    if name in _JOINS:
        parts = [v for v in values[: _JOINS[name]] if v.span]
        span = min(sum(v.span for v in parts), sizes[0])
        origins = [v.origin for v in parts if v.origin is not None]
        return [_Value(span, _rejoined(origins) if origins and len(origins) == len(parts) else None)]
    if name == "gather":
        table, places = values[:2]
        if table.origin is None and places.origin is not None and table.span <= 256:
            return [_Value(min(places.span, sizes[0]), places.origin)]
        return [_Value(min(table.span, sizes[0]), table.origin)]
    first: Any = eqn.outvars[0].aval if eqn.outvars else None
    if name == "octavo_quantize" and not is_low(first.dtype):  # the values of a QArray
        return [_Value(sizes[0], values[0].origin)]
    if name == "select_n":
        cases = values[1:] if any(v.span for v in values[1:]) else values
        return [_Value(min(sum(v.span for v in values), sizes[0]), _origin(cases))]
    if name in _DECODES or name in _SCALES:
        inverse = name == "div" and values[0].span < values[1].span
        origin = None if inverse else _origin(values, lone=name in _SCALES)
        return [_Value(min(sum(v.span for v in values), n), origin) for n in sizes]
    return [_fresh(v.aval) for v in eqn.outvars]


def _rejoined(origins: list[_Codes]) -> _Codes:
    """The codes of an array that is joined from several."""
    codes = _Codes(origins[0].name)
    codes.stored = all(origin.stored for origin in origins)
    return codes


def _origin(values: list[_Value], *, lone: bool = False) -> _Codes | None:
    """The codes that all of these were computed from, scales and constants aside; if `lone`, only one may be."""
    most = max(v.span for v in values)
    large = [v.origin for v in values if v.span * SCALE > most]
    return large[0] if large and not (lone and len(large) > 1) and all(o is large[0] for o in large) else None
