"""Resolving the rule of a matmul: its path, its weight, its rule, and the config that the rule compiles to."""

import dataclasses
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from octavo import _sharding
from octavo.distributed import GradReduce, weight_gather
from octavo.ops import DotConfig, Matmul, Placement
from octavo.ops.product import UNPLACED, Call
from octavo.ops.products.ragged import FloatCall
from octavo.ops.ragged import GMM
from octavo.qarray import QArray
from octavo.rules import QtRule, QuantizationRule, dot_config, find
from octavo.transform.frame import Context, Frame, Value
from octavo.transform.jaxpr import BACKWARD, MATMULS, Equation, is_einsum, module_of, scope, scope_names
from octavo.transform.matmul_flops import matmul_flops
from octavo.transform.site import Site
from octavo.transform.weights import Origin, common_module

_FLOATS = ("bfloat16", "float16", "float32", "float64")


def find_site(eqn: Equation, values: list[Value], frame: Frame) -> Site:
    """The site of a matmul equation, with its rule; counts its operation."""
    names = _names(eqn, frame)
    op = MATMULS[eqn.primitive.name]
    if op == "dot_general" and is_einsum(names):
        op = "einsum"
    if op == "ragged_dot" and GMM in names:
        op = "gmm"
    draft = _draft(eqn, eqn.invars[:2], values[:2], frame, op, eqn.primitive.name, eqn.params)
    if BACKWARD in names:
        draft = dataclasses.replace(draft, gradient="dlhs" if draft.weights[1] else "drhs")
    return _with_rule(draft, frame)


def product_site(eqn: Equation, atoms: list[Any], values: list[Value], frame: Frame, call: Call | FloatCall) -> Site:
    """The site of a matmul of `octavo.ops`; rules do not apply to one with its own config."""
    op = "gmm" if GMM in _names(eqn, frame) else call.product.op
    draft = _draft(eqn, atoms, values, frame, op, call.product.primitive, call.params)
    if call.config is None:
        return _with_rule(draft, frame)
    return _record(dataclasses.replace(draft, config=call.config), frame)


def find_rule(path: str, op: str, context: Context) -> QuantizationRule | None:
    """The rule for an operation with a weight at this path."""
    return find(context.provider.rules, path, op, weights=True)


def _with_rule(draft: Site, frame: Frame) -> Site:
    """A site with its rule and config."""
    rule = _rule(draft, frame.context)
    reason, config = _decide(draft, rule)
    placement = UNPLACED
    if config is not None and rule is not None and (stored := _stored(draft, frame.context)) is not None:
        axes, left = tuple(rule.gather_axes), not draft.weights[1]
        gather = weight_gather(stored, axes, left=left) if axes else None
        placement = Placement(gather, _grad_reduce(draft, rule, stored))
    site = dataclasses.replace(draft, rule=rule, config=config, placement=placement, reason=reason)
    return _record(site, frame)


def _names(eqn: Equation, frame: Frame) -> str:
    return "/".join(s for s in (frame.scope, scope(eqn)) if s)


def _record(site: Site, frame: Frame) -> Site:
    frame.context.sites[site.path, site.op_id, site.gradient] = site
    return site


def _draft(
    eqn: Equation, atoms: list[Any], values: list[Value], frame: Frame, op: str, primitive: str, params: dict[str, Any]
) -> Site:
    lhs, rhs = values
    path = _path(_names(eqn, frame), lhs.origin, rhs.origin, frame.context)
    left, right, out = (_type(v.aval) for v in (*atoms, *eqn.outvars))
    # With expert parallelism every device has a buffer for all rows, but each row is computed by one expert.
    sharding = params.get("sharding")
    copies = 1 if sharding is None else sharding.num_devices(sharding.experts)
    return Site(
        path=path,
        op=op,
        op_id=frame.op_id(path, op),
        lhs=left,
        rhs=right,
        out=out,
        origins=(lhs.origin, rhs.origin),
        numbers=params.get("dimension_numbers") or params.get("ragged_dot_dimension_numbers"),
        trips=frame.trips,
        flops=frame.trips * matmul_flops(primitive, params, left[0], right[0], out[0]) // copies,
        quantized=(isinstance(lhs.data, QArray), isinstance(rhs.data, QArray)),
    )


def _path(names: str, lhs: Origin, rhs: Origin, context: Context) -> str:
    for origin in (rhs, lhs):
        if origin.is_weight and origin.module is not None:
            return origin.module
    if context.modules is not None:
        return module_of(names, context.modules)
    given = scope_names(names)
    if context.root is not None and given[:1] == [context.root]:
        return "/".join(given[1:])
    return "/".join(given) if given else common_module([lhs, rhs]) or ""


def _rule(site: Site, context: Context) -> QuantizationRule | None:
    paths = site.candidates[:1] if context.strict_paths else site.candidates
    for rule in context.provider.rules:
        if any(find([rule], path, site.op, weights=any(site.weights)) for path in paths):
            return rule
    return None


def _decide(site: Site, rule: QuantizationRule | None) -> tuple[str | None, DotConfig | None]:
    """The reason why a site stays in float, or its config."""
    if rule is None:
        return "no rule matches", None
    if rule.leaves_alone:
        return "a rule leaves it alone", None
    if site.lhs[1] not in _FLOATS or site.rhs[1] not in _FLOATS:
        return f"{site.lhs[1]} x {site.rhs[1]} is not a matmul of floats", None
    if site.op in ("dot_general", "einsum") and not site.numbers[0][0]:
        return "an outer product: nothing is contracted", None
    lhs, rhs = site.weights
    config = dot_config(rule, lhs_weight=lhs, rhs_weight=rhs)
    if config is None:
        return "two activations, and the rule has no act_qtype", None
    if site.gradient is not None:
        gradient = _gradient_config(config, site.gradient)
        return (None, gradient) if gradient is not None else ("the rule keeps gradients in float", None)
    return None, config


def _stored(site: Site, context: Context) -> NamedSharding | None:
    """The sharding of a site's weight, from that of its parameter; None if that is not known.

    An axis of the operand is sharded as the axis of the parameter that it is, or of which it is the outer factor.
    """
    lhs, rhs = site.weights
    origin = site.origins[1] if rhs else site.origins[0]
    sharding = context.shardings.get(site.leaf or "")
    if sharding is None or not (lhs or rhs) or origin.axes is None:
        return None
    parts = _sharding.partitions(sharding, 32)
    spec = [parts[max(axis, key=lambda factor: factor.stride).axis] if axis else None for axis in origin.axes]
    named = [name for part in spec for name in _sharding.names(part)]
    return None if len(named) != len(set(named)) else NamedSharding(sharding.mesh, PartitionSpec(*spec))


def _grad_reduce(site: Site, rule: QuantizationRule, stored: NamedSharding) -> GradReduce | None:
    """The quantized gradient reduction of a site's weight; None in float or on one device."""
    if not isinstance(rule, QtRule) or rule.reduce_qtype is None or site.gradient is not None:
        return None
    left = not site.weights[1]
    if site.op in ("dot_general", "einsum"):
        batch = site.numbers[1][0 if left else 1]
    elif site.op in ("ragged_dot", "gmm"):
        batch = site.numbers.rhs_group_dimensions
    else:
        return None
    given: Any = tuple(rule.reduce_axes)
    given = given if isinstance(given[0], tuple) else (given,)
    if unknown := [axis for names in given for axis in names if axis not in stored.mesh.axis_names]:
        raise ValueError(
            f"reduce_axes={rule.reduce_axes}: the mesh has the axes {stored.mesh.axis_names}, and not {unknown[0]!r}"
        )
    # Along axes that shard the batch axes of the weight, such as experts, nothing is reduced.
    parts = _sharding.partitions(stored, 32)
    own = {name for axis in batch for name in _sharding.names(parts[axis])}
    rows = tuple(tuple(axis for axis in names if stored.mesh.shape[axis] > 1 and axis not in own) for names in given)
    return GradReduce(stored, rows, rule.reduce_qtype, rule.reduce_feedback, left) if any(rows) else None


def _gradient_config(config: DotConfig, gradient: str) -> DotConfig | None:
    """The config of a gradient matmul that is part of the function itself: cotangent first, then residual."""
    matmul = config.dlhs if gradient == "dlhs" else config.drhs
    if matmul.lhs is None and matmul.rhs is None:
        return None
    residual = config.fwd.rhs if gradient == "dlhs" else config.fwd.lhs
    rhs = matmul.rhs if matmul.rhs is not None or matmul.residual == "original" else residual
    without = [None if o is None else o.replace(tracker=None) for o in (matmul.lhs, rhs)]
    fwd = Matmul(without[0], without[1], rotate=matmul.rotate, accumulator=matmul.accumulator)
    return DotConfig(fwd, lowering=config.lowering, clip_gradient=config.clip_gradient)


def _type(aval: Any) -> tuple[tuple[int, ...], str]:
    return tuple(aval.shape), str(aval.dtype)
