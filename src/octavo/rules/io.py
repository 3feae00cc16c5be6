"""Rules as JSON and YAML, with only the fields that differ from their defaults."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo._config import Config, _decode, _encode
from octavo._documents import parse_json, parse_yaml, read_document
from octavo._names import did_you_mean
from octavo._optional import import_optional
from octavo.calibration import get_calibration
from octavo.numerics import Stochastic, get_rounding
from octavo.ops import Matmul, Operand
from octavo.rules.checks import check, check_choice, check_qtype
from octavo.rules.registry import recipe, recipes
from octavo.rules.rule import QtRule, QuantizationRule

type RulesLike = str | Path | QuantizationRule | Sequence[QuantizationRule]
"""Anything that can be converted to rules: a recipe's name, a file, a rule, or several."""

_SUFFIXES = (".json", ".yml", ".yaml")
_OPERAND = {"calibration": get_calibration("absmax"), "rounding": get_rounding("nearest")}
_MATMULS = ("fwd", "dlhs", "drhs")


def rules_to_json(rules: Sequence[QuantizationRule]) -> str:
    """Rules as JSON: a list of mappings; a rule is a QtRule unless `type` says otherwise.

    >>> print(rules_to_json([QtRule(module_path=".*/mlp", weight_qtype="int8")]))
    [
      {
        "module_path": ".*/mlp",
        "weight_qtype": "int8"
      }
    ]
    """
    return json.dumps([_plain_rule(rule) for rule in rules], indent=2)


def rules_from_json(text: str) -> tuple[QuantizationRule, ...]:
    """The rules in a JSON text: a list of mappings, or one under `rules`, `qwix` or `quantization`.

    >>> rules_from_json('{"qwix": {"rules": [{"weight_qtype": "int4", "tile_size": 32}]}}')
    (QtRule(weight_qtype='int4', tile_size=32),)
    """
    return _rules(parse_json(text))


def rules_to_yaml(rules: Sequence[QuantizationRule]) -> str:
    """Rules as YAML, the same mappings as in JSON."""
    yaml = import_optional("yaml", "YAML", "pyyaml")
    return yaml.safe_dump([_plain_rule(rule) for rule in rules], sort_keys=False)


def rules_from_yaml(text: str) -> tuple[QuantizationRule, ...]:
    """The rules in a YAML text, the same mappings as in JSON."""
    return _rules(parse_yaml(text))


def as_rules(source: RulesLike | Sequence[Any]) -> tuple[QuantizationRule, ...]:
    """Convert to rules: a recipe's name, a .json or .yml file, a rule, or a sequence of rules.

    >>> as_rules(QtRule(weight_qtype="int8"))
    (QtRule(weight_qtype='int8'),)
    """
    if isinstance(source, QuantizationRule):
        return (source,)
    if isinstance(source, Path) or (isinstance(source, str) and source.endswith(_SUFFIXES)):
        path = Path(source)
        if path.suffix not in _SUFFIXES:
            raise ValueError(f"{path}: rules are read from {', '.join(_SUFFIXES)} files")
        found = _rules(read_document(path))
        if not found:
            raise ValueError(f"{path}: there is no rule in it, so nothing would be quantized")
        return found
    if isinstance(source, str):
        return recipe(source)
    rules = tuple(source)
    for i, rule in enumerate(rules, 1):
        if not isinstance(rule, QuantizationRule):
            hint = (
                f"; did you mean recipe({rule!r})?" if isinstance(rule, str) and rule in recipes(aliases=True) else ""
            )
            raise ValueError(f"rule {i} of {len(rules)} is {rule!r}, which is no QuantizationRule{hint}")
    return rules


def _plain_rule(rule: QuantizationRule) -> dict[str, Any]:
    kind = {} if type(rule) is QtRule else {"type": type(rule).__name__}
    return {**kind, **_differing(rule)}


def _differing(config: Config) -> dict[str, Any]:
    """The fields that differ from their defaults, as plain values."""
    plain = {}
    for field in (f for f in dataclasses.fields(config) if f.init):  # pyrefly: ignore
        value, default = getattr(config, field.name), field.default
        if isinstance(config, Operand):
            default = {"tile": config.qtype.tile, **_OPERAND}.get(field.name, default)
        if value != default:
            plain[field.name] = _plain(field.name, value)
    return plain


def _plain(field: str, value: Any) -> Any:
    if field in ("tile_size", "additional_qt_config") and isinstance(value, tuple):
        return {key: _plain(str(key), setting) for key, setting in value}
    if field.endswith("qtype"):
        value = check_qtype(value)
        value = str(value) if isinstance(value, str) else value
    if isinstance(value, Matmul | Operand):
        return _differing(value)
    if isinstance(value, Stochastic) and not value.shared_axes:
        return "stochastic" if value.bits == 24 else f"stochastic,{value.bits}"
    return _encode(value)


def _rules(data: Any) -> tuple[QuantizationRule, ...]:
    for key in ("quantization", "qwix", "rules"):
        if isinstance(data, Mapping) and key in data:
            # A whole configuration may have `quantization` in it; below that, what is not read is a mistake.
            others = [repr(name) for name in data if name not in (key, "use_abstract_model")]
            if others and key != "quantization":
                raise ValueError(f"rules are given by {key!r} alone; remove {', '.join(others)}")
            data = data[key]
    if isinstance(data, Mapping) or not isinstance(data, Sequence) or isinstance(data, str):
        raise ValueError(f"rules are a list of mappings, or one under 'rules' or 'qwix: rules'; got {data!r}")
    return tuple(_rule(entry, f"rule {i} of {len(data)}") for i, entry in enumerate(data, 1))


def _rule(entry: Any, label: str) -> QuantizationRule:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{label} is {entry!r}; a mapping such as {{'weight_qtype': 'int8'}}")
    fields = dict(entry)
    kinds = {name: c for name, c in Config._classes.items() if issubclass(c, QuantizationRule)}
    kind = kinds[check(f"{label}: type", fields.pop("type", "QtRule"), check_choice(*kinds))]
    _check_known(kind, fields, label)
    try:
        for name in set(_MATMULS) & set(fields):
            fields[name] = _matmul(fields[name], f"{label}: {name}")
        return kind(**{name: _made(value) for name, value in fields.items()})
    except (ValueError, TypeError) as error:
        raise ValueError(str(error) if str(error).startswith(label) else f"{label}: {error}") from None


def _matmul(entry: Any, label: str) -> Matmul | None:
    if not isinstance(entry, Mapping):
        return entry
    fields = dict(entry)
    _check_known(Matmul, fields, label)
    for side in {"lhs", "rhs"} & set(fields):
        operand = fields[side]
        if isinstance(operand, Mapping):
            _check_known(Operand, operand, f"{label}.{side}")
            fields[side] = Operand(**{name: _made(value) for name, value in operand.items()})
        elif operand is not None:
            fields[side] = Operand(operand)
    return Matmul(**fields)


def _made(value: Any) -> Any:
    """A value of a field: lists become tuples, and the keys of a mapping that are axes become numbers."""
    if isinstance(value, list):
        return tuple(_made(v) for v in value)
    if isinstance(value, Mapping):
        if "class" in value:
            return _decode(dict(value))
        return {int(k) if str(k).lstrip("-").isdigit() else k: _made(v) for k, v in value.items()}
    return value


def _check_known(kind: type, fields: Mapping[str, Any], label: str) -> None:
    known = [field.name for field in dataclasses.fields(kind) if field.init]
    for name in fields:
        if name not in known:
            raise ValueError(f"{label}: unknown field {name!r}; {did_you_mean(name, known)}Known: {', '.join(known)}")
