"""Errors for fields of a rule that contradict each other or have no effect, raised when the rule is made."""

import dataclasses
from typing import Any

from octavo.numerics import get_format

_READ_BY_FORWARD = (
    "tile_size", "act_static_scale", "weight_calibration_method", "act_calibration_method", "rounding", "rotate",
    "square_tiles",
)  # fmt: skip
_READ_BY_ALL = ("per_tensor", "disable_channelwise_axes", "arithmetic", "check_finite", "additional_qt_config")
_READ_BY_BACKWARD = (
    "bwd_calibration_method", "bwd_weight_grad_tile_size", "bwd_weight_grad_accumulator", "bwd_stochastic_rounding",
    "bwd_rotate", "bwd_random_signs", "residual",
)  # fmt: skip


def check_conflicts(rule: Any) -> None:
    """Raise for types that would have no effect or contradict each other."""
    named = [
        f for f in ("weight_qtype", "act_qtype", "kv_qtype", "bwd_qtype", "fwd", "dlhs", "drhs") if _given(rule, f)
    ]
    if rule.skip and named:
        raise ValueError(
            f"skip=True leaves everything in float, but {named[0]}={getattr(rule, named[0])!r} asks for more: "
            "drop one of the two"
        )
    if rule.act_static_scale and rule.act_qtype is None and not _given(rule, "fwd"):
        raise ValueError("act_static_scale=True without act_qtype: there is no activation to scale; set act_qtype")
    if rule.scope == "activations" and rule.weight_qtype is not None:
        raise ValueError(
            f"weight_qtype={rule.weight_qtype!r} with scope='activations': matmuls of two activations have no weight; "
            "set act_qtype (and kv_qtype), or another scope"
        )
    alone = rule.act_qtype is not None and rule.weight_qtype is None and not _given(rule, "fwd")
    if alone and rule.scope != "activations":
        raise ValueError(
            f"act_qtype={rule.act_qtype!r} without weight_qtype would leave matmuls with a weight in float, as Qwix "
            "silently does: set weight_qtype too, or scope='activations' for matmuls of two activations"
        )
    wrong = rule.scope == "weights" or rule.act_qtype is None or rule.act_static_scale or _given(rule, "fwd")
    if rule.attention and wrong:
        raise ValueError(
            "attention=True chooses the ranges of matmuls of two activations: set act_qtype, a scope other than "
            "'weights', and neither act_static_scale nor fwd"
        )
    if rule.square_tiles and rule.tile_size is None:
        raise ValueError("square_tiles=True needs tile_size, as in tile_size=128")
    if hasattr(rule, "bwd_qtype"):
        _check_backward(rule)


def check_learned(rule: Any) -> None:
    """Raise for learned scales of anything but weights, and where a scale is more than a float for each group."""
    config = rule._configs[True, False]
    others = [o for c in rule._configs.values() if c not in (config, None) for o in (c.fwd.lhs, c.fwd.rhs)]
    if config is not None:
        others += [config.fwd.lhs, config.dlhs.lhs, config.drhs.lhs]
        others += [] if rule.learns_scales else [config.dlhs.rhs, config.drhs.rhs]
    if any(o is not None and o.calibration.learned for o in others):
        raise ValueError("lsq learns the scales of weights: give it as weight_calibration_method, with a weight_qtype")
    if not rule.learns_scales:
        return
    weight = config.fwd.rhs
    reasons = {
        f"weight_qtype={weight.qtype.name!r}, whose blocks have scales of their own": weight.qtype.tile is not None,
        "rotate": config.fwd.rotate is not None,
        "sparsity": config.sparsity is not None,
        f"arithmetic={weight.arithmetic!r}": weight.arithmetic != "float32",
        f"rounding={rule.rounding!r}": not weight.rounding.nearest,
        "smooth": config.fwd.smooth is not None,
    }
    if wrong := [name for name, given in reasons.items() if given]:
        raise ValueError(f"learned scales (lsq) cannot be combined with {wrong[0]}: leave one of the two out")


def _check_backward(rule: Any) -> None:
    """Raise for settings of gradients that stay in float, or of a matmul that is replaced."""
    if rule.bwd_qtype is not None and rule.weight_qtype is None and rule.fwd is None and rule.scope != "activations":
        raise ValueError(
            f"bwd_qtype={rule.bwd_qtype!r} without weight_qtype: gradients are quantized where the forward matmul is; "
            "set weight_qtype"
        )
    overridden = any(key.endswith("_grad_qtype") for key, _ in rule.additional_qt_config or ())
    if rule.bwd_qtype is None and not overridden:
        unread = [f for f in _READ_BY_BACKWARD if _changed(rule, f) and getattr(rule, f) not in ("reuse", "original")]
        if unread and (rule.dlhs is None or rule.drhs is None):
            raise ValueError(f"{_shown(rule, unread[0])} without bwd_qtype: the gradients stay in float; set bwd_qtype")
    _check_reduction(rule)
    if rule.scope != "all":  # else the fields still apply to matmuls of two activations
        _check_replaced(rule)
    _check_same(rule, "weight_qtype", "fwd", "rhs")
    _check_same(rule, "act_qtype", "fwd", "lhs")
    _check_same(rule, "bwd_qtype", "dlhs", "lhs")
    _check_same(rule, "bwd_qtype", "drhs", "lhs")


def _check_reduction(rule: Any) -> None:
    if rule.reduce_qtype is None:
        unread = [f for f in ("reduce_axes", "reduce_feedback") if _changed(rule, f)]
        if unread:
            raise ValueError(f"{_shown(rule, unread[0])} without reduce_qtype: gradients are reduced in float; set it")
    elif not rule.reduce_axes:
        raise ValueError(
            f"{_shown(rule, 'reduce_qtype')} needs reduce_axes, the mesh axes along which rows are sharded, as in "
            "reduce_axes=('data', 'fsdp')"
        )
    elif get_format(rule.reduce_qtype).tile is not None:
        raise ValueError(
            f"{_shown(rule, 'reduce_qtype')} has tiles of its own; sums have blocks of theirs: use int8 or a float8"
        )
    elif rule.scope == "activations":
        raise ValueError(f"{_shown(rule, 'reduce_qtype')} with scope='activations': there are no weights' gradients")


def _check_replaced(rule: Any) -> None:
    fwd, bwd = rule.fwd is not None, rule.dlhs is not None and rule.drhs is not None
    unread = [
        *((f, "fwd") for f in _READ_BY_FORWARD if fwd and _changed(rule, f)),
        *((f, "dlhs and drhs") for f in _READ_BY_BACKWARD if bwd and _changed(rule, f)),
        *((f, "fwd, dlhs and drhs") for f in _READ_BY_ALL if fwd and bwd and _changed(rule, f)),
    ]
    if unread:
        field, instead = unread[0]
        raise ValueError(f"{_shown(rule, field)} would not be read: {instead} say it all; set it there")


def _check_same(rule: Any, field: str, matmul: str, side: str) -> None:
    whole, qtype = getattr(rule, matmul), getattr(rule, field)
    operand = None if whole is None else getattr(whole, side)
    if operand is not None and qtype is not None and get_format(qtype) != operand.qtype:
        raise ValueError(
            f"{field}={qtype!r} but {matmul}.{side} is {operand.qtype.name}: {matmul} replaces what {field} says; "
            "change it there, or leave one of the two out"
        )


def _given(rule: Any, field: str) -> bool:
    return getattr(rule, field, None) is not None


def _changed(rule: Any, field: str) -> bool:
    default = {f.name: f.default for f in dataclasses.fields(rule)}[field]
    return getattr(rule, field) != default


def _shown(rule: Any, field: str) -> str:
    return f"{field}={getattr(rule, field)!r}"
