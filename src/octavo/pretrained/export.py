"""Where a converted model is written to: Octavo's own directory, or files that other programs read."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.pretrained.card import model_card
from octavo.pretrained.convert import Summary
from octavo.pretrained.own import write_model
from octavo.pretrained.source import Source
from octavo.rules import QtRule, QuantizationRule

type Exporter = Callable[[Source, Mapping[str, Any], Path], None]

_exporters: dict[str, Exporter] = {}


def register_exporter(name: str, exporter: Exporter) -> None:
    """Make a form of output known by a name: a function of the model, its parameters by path, and the path."""
    if name in _exporters:
        raise ValueError(f"an exporter named {name!r} exists")
    _exporters[name] = exporter


def exporters() -> tuple[str, ...]:
    """The names of all forms of output."""
    return ("octavo", *_exporters)


def write_export(
    name: str,
    source: Source,
    params: Mapping[str, Any],
    out: Path,
    *,
    rules: Sequence[QuantizationRule],
    summary: Summary,
    command: str,
) -> None:
    """Write a converted model in a form, with its card."""
    card = model_card(source, rules, summary, command=command)
    if name == "octavo":
        served = tuple(rule for rule in rules) if any(map(_has_activations, rules)) else ()
        described = Source(source.config, source.leaves, source.tokenizer, served, source.origin)
        facts = {"command": command, "bits_per_weight": summary.bits_per_weight, "bytes": summary.after}
        write_model(described, dict(params), out, facts=facts)
    else:
        _exporters[name](source, params, out)
    if out.is_dir():
        (out / "README.md").write_text(card, encoding="utf-8")


def _has_activations(rule: QuantizationRule) -> bool:
    """Whether a product that this rule matches needs it when it runs: its activations are rounded, too."""
    if rule.skip:
        return False
    fwd = rule.fwd if isinstance(rule, QtRule) else None
    return rule.act_qtype is not None or rule.rotate is not None or (fwd is not None and fwd.lhs is not None)
