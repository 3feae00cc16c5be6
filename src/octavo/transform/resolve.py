"""Resolving the rule of a matmul: its path, its weight, its rule, and the config that the rule compiles to."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from octavo import _sharding
from octavo.distributed import GradReduce, weight_gather
from octavo.ops import DotConfig, Matmul, Placement, ProductCall
from octavo.ops.product import UNPLACED
from octavo.ops.ragged import GMM
from octavo.qarray import QArray
from octavo.rules import QtRule, QuantizationRule, dot_config
from octavo.transform.frame import Context, Frame, Value
from octavo.transform.jaxpr import BACKWARD, MATMULS, Equation, is_einsum, module_of, scope, scope_names
from octavo.transform.site import Site, matmul_product
from octavo.transform.softmax import softmax_operand
from octavo.transform.weights import ACTIVATION, Origin, common_module

_FLOATS = ("bfloat16", "float16", "float32", "float64")


def find_site(
    eqn: Equation,
    atoms: Sequence[Any],
    values: list[Value],
    frame: Frame,
    marked: ProductCall | None = None,
    keys: int | None = None,
) -> Site:
    """The site of a matmul equation with these operands, with its rule and config; counts its operation.

    `marked` is the call of `octavo.ops` that the equation holds, if any. Rules do not apply to a call with a config.
    `keys` is the operand of attention's scores that has the keys.
    """
    call, trips = None if marked is None else marked.call, frame.trips
    context, names = frame.context, "/".join(filter(None, (frame.scope, scope(eqn))))
    op = MATMULS[eqn.primitive.name] if call is None else call.product.op
    if op == "dot_general" and call is None and "->" in names and is_einsum(names):
        op = "einsum"
    if op == "ragged_dot" and GMM in names:
        op = "gmm"
    if op == "einsum" and "einsum" not in context.provider.handlers:  # its dot_general is replaced
        op = "dot_general"
    left, right = origins = values[0].origin, values[1].origin
    lhs, rhs = bool(left.leaves), bool(right.leaves)
    if not lhs and not rhs:
        lhs, rhs = left.constant and not right.constant, right.constant and not left.constant
    weights, weight = (lhs and not rhs, rhs), right if rhs else left if lhs else None
    leaf = weight.leaves[0] if weight is not None and weight.leaves else None
    path = next((o.module for o in (right, left) if o.leaves and o.module is not None), None)
    path = scope_path(names, origins, context) if path is None else path
    op_id = next_op_id(path, op, frame)
    avals: Any = [v.aval for v in (*atoms[:2], *eqn.outvars)]
    types = [(tuple(aval.shape), str(aval.dtype)) for aval in avals]
    if marked is not None and not is_unbatched(eqn, marked):  # under vmap: one execution for each example
        single = *marked.shapes[:2], marked.call.product.out_shape(*marked.shapes[:2])
        trips *= math.prod(types[2][0]) // max(1, math.prod(single[2]))
        types = [(shape, dtype) for shape, (_, dtype) in zip(single, types, strict=True)]
    site = Site(
        path=path,
        op=op,
        op_id=op_id,
        lhs=types[0],
        rhs=types[1],
        out=types[2],
        origins=origins,
        weights=weights,
        leaf=leaf,
        rule_paths=(path,) if leaf is None or context.strict_paths else (path, leaf),
        params=eqn.params if call is None else call.params,
        trips=trips,
        quantized=(isinstance(values[0].data, QArray), isinstance(values[1].data, QArray)),
        gradient=("dlhs" if rhs else "drhs") if call is None and BACKWARD in names else None,
    )
    if call is not None and call.config is not None:
        site = dataclasses.replace(site, config=call.config, scope=scope_path(names, origins, context))
    elif frame.opaque is not None:
        site = dataclasses.replace(site, reason=frame.opaque, opaque=True)
    else:
        site = _resolve(site, context)
        if site.config is not None and site.rule is not None and site.rule.attention:
            site = dataclasses.replace(site, keys=keys)
    context.sites[path, site.op_id, site.gradient] = site
    return site


def find_kernel(eqn: Equation, values: list[Value], frame: Frame) -> None:
    """Add a kernel to the sites."""
    op, names = eqn.primitive.name, "/".join(filter(None, (frame.scope, scope(eqn))))
    left, right, *_ = origins = [*(v.origin for v in values), ACTIVATION, ACTIVATION]
    leaf = next((leaf for origin in origins for leaf in origin.leaves), None)
    path = scope_path(names, (left, right), frame.context)
    avals: Any = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    types = [*((tuple(aval.shape), str(aval.dtype)) for aval in avals), ((), "float32"), ((), "float32")]
    site = Site(
        path=path,
        op=op,
        op_id=next_op_id(path, op, frame),
        lhs=types[0],
        rhs=types[1],
        out=types[len(eqn.invars)] if eqn.outvars else types[0],
        origins=(left, right),
        weights=(False, False),
        leaf=leaf,
        rule_paths=(path,) if leaf is None or frame.context.strict_paths else (path, leaf),
        params=eqn.params,
        trips=frame.trips,
        quantized=(False, False),
        reason=f"{frame.opaque}, and its FLOPs are not counted",
        opaque=True,
    )
    frame.context.sites[path, site.op_id, None] = site


def is_unbatched(eqn: Equation, marked: ProductCall) -> bool:
    """Whether a call of `octavo.ops` has the arguments that it was made with; under vmap it has larger ones."""
    atoms: Any = eqn.invars[eqn.params["num_consts"] :]
    return marked.shapes == tuple(tuple(a.aval.shape) for a in atoms)


def next_op_id(path: str, op: str, frame: Frame) -> str:
    """The name of the next operation of its kind in a module. State has these names, so what is opaque has others."""
    kind = op if frame.opaque is None else f"opaque_{op}"
    number = frame.counters.get((path, kind), 0)
    frame.counters[path, kind] = number + 1
    return f"{kind}{number}"


def scope_path(names: str, origins: Sequence[Origin], context: Context) -> str:
    """The path of a matmul without parameters: its named scopes, or else the module of its operands."""
    if context.modules is not None:
        return module_of(names, context.modules)
    given = scope_names(names)
    if context.root is not None and given[:1] == [context.root]:
        return "/".join(given[1:])
    return "/".join(given) if given else common_module(origins) or ""


def _resolve(site: Site, context: Context) -> Site:
    """The site with its rule, and with its config or the reason why it stays in float."""
    (lhs, rhs), rules = site.weights, context.provider.rules
    softmax = softmax_operand(site.origins) if context.provider.attention else None
    matching = (r for r in rules if any(r.matches(path, site.op, weights=lhs or rhs) for path in site.rule_paths))
    rule, config, reason = next(matching, None), None, None
    if rule is None:
        reason = "no rule matches"
    elif rule.leaves_alone:
        reason = "a rule leaves it alone"
    elif site.op not in context.provider.handlers:
        reason = f"the provider does not replace {site.op}"
    elif site.lhs[1] not in _FLOATS or site.rhs[1] not in _FLOATS:
        reason = f"{site.lhs[1]} x {site.rhs[1]} is not a matmul of floats"
    elif site.op in ("dot_general", "einsum") and not site.params["dimension_numbers"][0][0]:
        reason = "an outer product: nothing is contracted"
    elif (config := dot_config(rule, lhs_weight=lhs, rhs_weight=rhs, softmax=softmax)) is None:
        adapted = rule.adapts and (lhs or rhs)
        reason = "float with an adapter" if adapted else "two activations, and the rule has no act_qtype"
    elif site.gradient is not None and (config := _gradient_config(config, site)) is None:
        reason = "the rule keeps gradients in float"
    elif "window_strides" in site.params and (problem := _unsupported(site, config)) is not None:
        config, reason = None, problem
    site = dataclasses.replace(site, rule=rule, config=config, reason=reason)
    sharding = None if config is None else context.shardings.get(site.leaf)
    if rule is None or sharding is None:
        return site
    return dataclasses.replace(site, placement=_placement(site, rule, sharding))


def _unsupported(site: Site, config: DotConfig) -> str | None:
    """Why a convolution cannot have this config; None if it can."""
    try:
        matmul_product(site.params, site.lhs[0], site.rhs[0]).check(config)
    except NotImplementedError as error:
        return str(error)
    return None


def _gradient_config(config: DotConfig, site: Site) -> DotConfig | None:
    """The config of a gradient matmul that is part of the function itself.

    Its operands are cotangent and residual; in the weight gradient of a ragged dot JAX has them in the other order.
    """
    gradient = site.gradient
    matmul = config.dlhs if gradient == "dlhs" else config.drhs
    if matmul.lhs is None and matmul.rhs is None:
        return None
    residual = config.fwd.rhs if gradient == "dlhs" else config.fwd.lhs
    rhs = matmul.rhs if matmul.rhs is not None or matmul.residual == "original" else residual
    without = [None if o is None else o.replace(tracker=None) for o in (matmul.lhs, rhs)]
    if gradient == "drhs" and "ragged_dot_dimension_numbers" in site.params:
        without.reverse()
    fwd = Matmul(without[0], without[1], rotate=matmul.rotate, accumulator=matmul.accumulator)
    return DotConfig(fwd, lowering=config.lowering, clip_gradient=config.clip_gradient)


def _placement(site: Site, rule: QuantizationRule, sharding: NamedSharding) -> Placement:
    """The low-precision collectives of a site's weight, whose parameter has this sharding."""
    left = not site.weights[1]
    origin = site.origins[0 if left else 1]
    if origin.axes is None:
        return UNPLACED
    # An axis of the operand is sharded as the axis of the parameter that it is, or of which it is the outer factor.
    parts = _sharding.partitions(sharding, 32)
    spec = [parts[max(axis, key=lambda factor: factor.stride).axis] if axis else None for axis in origin.axes]
    named = [name for part in spec for name in _sharding.names(part)]
    if len(named) != len(set(named)):
        return UNPLACED
    stored, axes = NamedSharding(sharding.mesh, PartitionSpec(*spec)), tuple(rule.gather_axes)
    return Placement(weight_gather(stored, axes, left=left) if axes else None, _grad_reduce(site, rule, stored, left))


def _grad_reduce(site: Site, rule: QuantizationRule, stored: NamedSharding, left: bool) -> GradReduce | None:
    """The quantized gradient reduction of a site's weight; None in float or on one device."""
    if not isinstance(rule, QtRule) or rule.reduce_qtype is None or site.gradient is not None:
        return None
    if site.op in ("dot_general", "einsum"):
        batch = site.params["dimension_numbers"][1][0 if left else 1]
    elif site.op in ("ragged_dot", "gmm"):
        batch = site.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
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
