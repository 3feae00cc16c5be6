"""MaxText's "intmp": bits of weights and activations by layer, from one small table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo._documents import read_document
from octavo._names import did_you_mean
from octavo.rules.checks import check, check_regex
from octavo.rules.rule import SENSITIVE, QtRule, QuantizationRule, excluding

MIXED = "intmp"
_DEFAULT = "__default__"
_TRAINING = ("g_bits", "g_scale", "g_rounding", "g_tile_size")
_KEYS = ("w_bits", "a_bits", "w_scale", "a_scale", "tile_size", *_TRAINING)
_ROUNDINGS = {"nearest": None, "stochastic": "uniform"}


def mixed_precision(
    config: Mapping[str, Any] | str | Path | None,
    module_path: str = ".*",
    *,
    exclude: str | None = SENSITIVE,
    **overrides: Any,
) -> tuple[QuantizationRule, ...]:
    """Rules from a table {regular expression: {w_bits, a_bits, w_scale, a_scale, tile_size}}, or from its JSON file.

    `__default__` has the defaults of all entries, and is the rule for all other layers of `module_path`. Bits of None
    are float; a scale s below 1 clips at s times the largest magnitude; a tile of -1 is none. For training, `g_bits`
    and `g_scale` are those of gradients, `g_rounding` is "nearest" or "stochastic", and `g_tile_size` is that of the
    weight's gradient. As in MaxText the *last* entry that matches applies, so the rules are in reverse order.
    Numerics are AQT's: without `g_bits`, gradients are float matmuls with the low-bit weights and activations.

    >>> for rule in mixed_precision({"__default__": {"w_bits": 8}, ".*/key": {"w_bits": 4}}, exclude=None):
    ...     print(rule.module_path, rule.weight_qtype, rule.residual, rule.arithmetic)
    .*/key int4 reuse aqt
    .* int8 reuse aqt
    """
    if config is None:
        raise ValueError(
            f"the recipe {MIXED!r} is a table of bits by layer: pass config={{'__default__': {{'w_bits': 8}}, "
            "'.*/query': {'w_bits': 4}}, or the path of a JSON file with it"
        )
    table = config if isinstance(config, Mapping) else read_document(Path(config))
    if not isinstance(table, Mapping):
        raise ValueError(f"{config}: a table of bits by layer is a mapping such as {{'__default__': {{'w_bits': 8}}}}")
    table = dict(table)
    default = _checked(_DEFAULT, table.pop(_DEFAULT, {}))
    layers = [_rule(path, {**default, **_checked(path, entry)}, overrides) for path, entry in table.items()]
    # Entries of the table precede the exclusion, so that a layer named there is quantized.
    rest = _rule(module_path, default, overrides).replace(optional=True)
    return (*reversed(layers), *excluding(exclude), rest)


def _checked(path: str, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{MIXED}: {path!r} has {entry!r}; a mapping such as {{'w_bits': 4}}")
    for key in entry:
        if key not in _KEYS:
            hint = did_you_mean(key, _KEYS)
            raise ValueError(f"{MIXED}: {path!r} has an unknown key {key!r}; {hint}Known: {', '.join(_KEYS)}")
    return dict(entry)


def _rule(path: str, entry: dict[str, Any], overrides: dict[str, Any]) -> QuantizationRule:
    check(f"{MIXED} path", path, check_regex)
    weight, act = entry.get("w_bits"), entry.get("a_bits")
    if weight is None:
        if act is not None:
            raise ValueError(f"{MIXED}: {path!r} has a_bits={act} but no w_bits; set w_bits too")
        return QuantizationRule(module_path=path, skip=True)
    tile = entry.get("tile_size")
    fields: dict[str, Any] = {
        "weight_qtype": f"int{weight}",
        "act_qtype": None if act is None else f"int{act}",
        "tile_size": None if tile in (None, -1) else tile,
        "weight_calibration_method": _method(entry.get("w_scale")),
        "act_calibration_method": None if act is None or entry.get("a_scale") is None else _method(entry["a_scale"]),
        "scope": "weights",
        # As AQT's dot_general_make: its arithmetic, and gradients with the low-bit values of the forward.
        "arithmetic": "aqt",
        "residual": "reuse",
        "additional_qt_config": {"disable_gradient_clipping": True},
    }
    gradient = entry.get("g_bits")
    if gradient is not None:
        fields |= _gradient(path, entry)
    elif extra := [key for key in _TRAINING[1:] if key in entry]:
        raise ValueError(f"{MIXED}: {path!r} has {extra[0]}={entry[extra[0]]} but no g_bits; set g_bits too")
    try:
        return QtRule(module_path=path, **{**fields, **overrides})
    except ValueError as error:
        raise ValueError(f"{MIXED}: {path!r}: {error}") from None


def _gradient(path: str, entry: dict[str, Any]) -> dict[str, Any]:
    rounding, tile = entry.get("g_rounding", "nearest"), entry.get("g_tile_size")
    if rounding not in _ROUNDINGS:
        raise ValueError(f"{MIXED}: {path!r} has g_rounding={rounding!r}; it is one of {', '.join(_ROUNDINGS)}")
    return {
        "bwd_qtype": f"int{entry['g_bits']}",
        "bwd_calibration_method": _method(entry.get("g_scale")),
        "bwd_stochastic_rounding": _ROUNDINGS[rounding],
        "bwd_weight_grad_tile_size": None if tile in (None, -1) else tile,
    }


def _method(scale: float | None) -> str:
    return "absmax" if scale in (None, 1, 1.0) else f"absmax,{scale}"
