"""Qwix's `additional_qt_config`: raw settings of a product by the names of its DotGeneralQtConfig."""

from collections.abc import Mapping
from typing import Any

from octavo.rules.checks import (
    check_calibration,
    check_flag,
    check_qtype,
    check_sparsity,
    check_tile,
    check_tiles,
    nearest_name,
)

_OPERANDS = ("lhs", "rhs", "dlhs_grad", "drhs_grad", "dlhs_residual", "drhs_residual")
_CHECKS = {
    **{f"{operand}_qtype": check_qtype for operand in _OPERANDS},
    **{f"{operand}_calibration_method": check_calibration for operand in _OPERANDS},
    **{f"{operand}_disable_channelwise_axes": check_flag for operand in _OPERANDS},
    "tile_size": check_tiles,
    "dlhs_tile_size": check_tile,
    "drhs_tile_size": check_tile,
    "disable_gradient_clipping": check_flag,
    "use_original_residuals": check_flag,
    "sparsity_rule": check_sparsity,
}
_INSTEAD = {
    **{f"{side}_collect_quant_stat": "act_static_scale=True" for side in ("lhs", "rhs")},
    **{f"{side}_stochastic_rounding_noise_fn": "bwd_stochastic_rounding='uniform'" for side in ("dlhs", "drhs")},
}


def check_overrides(field: str, value: Any) -> tuple[tuple[str, Any], ...] | None:
    """The settings as pairs, each checked under its own name.

    >>> check_overrides("additional_qt_config", {"drhs_grad_qtype": "fp8_e5m2"})
    (('drhs_grad_qtype', 'float8_e5m2'),)
    """
    if value is None:
        return None
    if not isinstance(value, Mapping | tuple | list):
        raise ValueError(f"{field}={value!r}: a mapping of Qwix's DotGeneralQtConfig fields")
    pairs = []
    for key, setting in dict(value).items():
        where = f"{field}[{key!r}]"
        if key in _INSTEAD:
            if setting:
                raise ValueError(f"{where} is a function of Qwix's own and has no counterpart: use {_INSTEAD[key]}")
            continue
        if key not in _CHECKS:
            known = sorted((*_CHECKS, *_INSTEAD))
            raise ValueError(f"{where}: no such setting; {nearest_name(key, known)}Known: {', '.join(known)}")
        check = _CHECKS[key]
        optional = setting is None and check in (check_calibration, check_flag)
        if not optional:
            pairs.append((key, check(where, setting)))
    return tuple(pairs)


def swap_sides(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings for a product whose operands have changed places.

    >>> swap_sides({"lhs_qtype": "int8", "drhs_tile_size": 128})
    {'rhs_qtype': 'int8', 'dlhs_tile_size': 128}
    """
    other = {"lhs": "rhs", "rhs": "lhs", "dlhs": "drhs", "drhs": "dlhs"}
    swapped = {}
    for key, value in settings.items():
        side, _, rest = key.partition("_")
        swapped[f"{other[side]}_{rest}" if side in other else key] = value
    return swapped
