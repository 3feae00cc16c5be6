"""Splitting a jaxpr into matmuls and the segments of other operations between them.

A segment holds what the next matmul reads and is not computed yet, so that an activation function and the gate that
it is multiplied by are in one segment, whatever is computed between them.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from octavo.numerics import Format, get_format
from octavo.qarray import QArray
from octavo.rules.path_match import path_matcher
from octavo.transform import jaxpr as jaxprs
from octavo.transform.frame import Frame, Value
from octavo.transform.jaxpr import Equation, Jaxpr, Literal, bind, bodies, equation_context
from octavo.transform.rearrange import as_array
from octavo.transform.residuals import Residuals, compressed, evaluate_inline
from octavo.transform.resolve import scope_path
from octavo.transform.weights import CONSTANT, Origin, propagate

_OPAQUE = ("custom_vjp_call", "scan", "while", "cond", "shard_map", *jaxprs.KERNELS)


def segments(jaxpr: Jaxpr) -> list[Equation | Jaxpr]:
    """The steps of a jaxpr: equations that are evaluated on their own, and segments of others as jaxprs.

    Results that no step needs are not computed.
    """
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    waiting = {id(eqn): eqn for eqn in jaxpr.eqns if is_inside(eqn)}
    groups: list[Equation | list[Equation]] = []

    def demand(atoms: Sequence[Any]) -> None:
        found: set[int] = set()
        stack = [atom for atom in atoms if not isinstance(atom, Literal)]
        while stack:
            eqn = made.get(stack.pop())
            if eqn is not None and id(eqn) in waiting and id(eqn) not in found:
                found.add(id(eqn))
                stack += [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        if found:
            groups.append([waiting.pop(each) for each in list(waiting) if each in found])  # in their order

    for eqn in jaxpr.eqns:
        if not is_inside(eqn):
            demand(eqn.invars)
            groups.append(eqn)
    demand(jaxpr.outvars)
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    steps: list[Equation | Jaxpr] = []
    for group in reversed(groups):
        step = _segment(jaxpr, group, needed) if isinstance(group, list) else group
        needed.update(atom for atom in step.invars if not isinstance(atom, Literal))
        steps.append(step)
    return steps[::-1]


def is_inside(eqn: Equation) -> bool:
    """Whether an equation may be part of a segment, rather than being evaluated on its own."""
    name = eqn.primitive.name
    if name in jaxprs.MATMULS or name in _OPAQUE or eqn.effects:
        return False
    return all(is_inside(each) for body in jaxprs.bodies(eqn) for each in body.eqns)


def _segment(jaxpr: Jaxpr, eqns: list[Equation], needed: set[Any]) -> Jaxpr:
    """Equations as a jaxpr that returns those of their results that later steps need."""
    own = {var for eqn in eqns for var in eqn.outvars}
    read = (atom for eqn in eqns for atom in eqn.invars)
    invars = list(dict.fromkeys(atom for atom in read if not isinstance(atom, Literal) and atom not in own))
    outvars = [var for eqn in eqns for var in eqn.outvars if var in needed]
    return jaxpr.replace(constvars=[], consts=[], invars=invars, outvars=outvars, eqns=eqns)


def evaluate_segment(body: Jaxpr, values: list[Value], frame: Frame) -> list[Value]:
    """The results of a segment, whose residuals are in low precision where a rule says so."""
    origins = [v.origin for v in values]
    choose = functools.partial(residual_qtype, frame, tuple(origins))
    run = functools.partial(evaluate_inline, body, calls=("jit",))
    scopes = {jaxprs.scope(eqn) for eqn in body.eqns}
    if any(choose(names) is not None for names in scopes) and not any(isinstance(v.data, QArray) for v in values):
        # What a checkpoint computes again is decided here.
        run = compress(functools.partial(evaluate_inline, body), values, choose, frame)
    outs = run(*(as_array(v.data) for v in values))
    return [Value(*pair) for pair in zip(outs, _origins(body, origins), strict=True)]


def bind_compressed(eqn: Equation, values: list[Value], frame: Frame) -> list[Any]:
    """The results of an equation such as a matmul in float, whose residuals may be in low precision."""
    data = [as_array(v.data) for v in values]
    choose = functools.partial(residual_qtype, frame, tuple(v.origin for v in values))
    wanted = frame.context.provider.residuals and not frame.context.init and eqn.primitive.name in jaxprs.MATMULS
    if not wanted or choose(jaxprs.scope(eqn)) is None:
        return bind(eqn, data)

    def run(*data: Any) -> list[Any]:
        with equation_context(eqn):  # also when it is differentiated later
            return bind(eqn, data)

    return compress(run, values, choose, frame)(*data)


def compress(run: Any, values: list[Value], choose: Any, frame: Frame) -> Any:
    """A function of the data of values with its residuals in low precision, which the plan will list."""
    context, trips, origins = frame.context, frame.trips, [v.origin for v in values]

    def record(saved: Residuals) -> None:
        path = segment_path(frame, origins, saved.path)
        sizes = {"bytes_before": trips * saved.bytes_before, "bytes_after": trips * saved.bytes_after}
        found = dataclasses.replace(saved, path=path, times=trips, **sizes)
        # A scan first differentiates its body for some of the carry only.
        context.residuals[run] = max(found, context.residuals.get(run, found), key=lambda each: each.bytes_before)

    return compressed(run, [bool(origin.leaves) or origin.constant for origin in origins], choose, record)


def segment_path(frame: Frame, origins: Sequence[Origin], names: str) -> str:
    """The path of an operation under these names, or of the modules of these values where there are none."""
    return scope_path("/".join(filter(None, (frame.scope, names))), origins, frame.context)


def residual_qtype(frame: Frame, origins: Sequence[Origin], names: str) -> Format | None:
    """The format of residuals of operations under these names."""
    path, rules = segment_path(frame, origins, names), frame.context.provider.residuals
    rule = next((rule for rule in rules if path_matcher(rule.module_path)(path)), None)
    qtype = getattr(rule, "residual_qtype", None)
    return None if qtype is None else get_format(qtype)


def _origins(body: Jaxpr, origins: list[Origin]) -> list[Origin]:
    """The origins of the results of a segment."""
    env = dict(zip(body.invars, origins, strict=True)) | dict.fromkeys(body.constvars, CONSTANT)
    for eqn in body.eqns:
        given = [CONSTANT if isinstance(atom, Literal) else env[atom] for atom in eqn.invars]
        inner = eqn.primitive.name == "jit" and any(origin.leaves for origin in given)
        env.update(zip(eqn.outvars, _origins(bodies(eqn)[0], given) if inner else propagate(eqn, given), strict=True))
    return [CONSTANT if isinstance(atom, Literal) else env[atom] for atom in body.outvars]
