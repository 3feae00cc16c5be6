"""How well the number formats fitted the tensors of a run, by class of tensor and step."""

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.report.heat import extent_of, heat_map, legend, place
from octavo.report.markup import Cell, figure, missing, note, section, table
from octavo.report.scale import Point
from octavo.report.svg import Line, Panel, chart
from octavo.report.weights import turns
from octavo.report.words import Number, known

_CLASSES = ("weight", "activation", "gradient")
_MEASURES = (
    ("saturation", "Saturation, % of values", 100.0, "values beyond the end of the format, cut off there"),
    ("underflow", "Underflow, % of values", 100.0, "values other than zero that became zero"),
    ("sqnr_db", "Signal to quantization noise, dB", 1.0, "higher is better, 6 dB are one bit"),
)
_OPERANDS = {
    "lhs": "Forward, left operand: activations",
    "rhs": "Forward, right operand: weights",
    "dlhs": "Backward, gradient that dlhs multiplies",
    "drhs": "Backward, gradient that drhs multiplies",
}


def telemetry_section(lines: Sequence[Mapping[str, Any]]) -> str:
    """A chart for each measure, a line in it for each class of tensor, and the products that fitted worst."""
    heading = "Fit of the number formats"
    if not lines:
        return section(
            heading,
            missing("There is no telemetry: quantization_metrics_interval was 0, or nothing was quantized."),
        )
    charts = [_chart(lines, *measure) for measure in _MEASURES]
    if not any(charts):
        return section(heading, missing("The telemetry has no saturation, underflow or sqnr_db of a class of tensors."))
    return section(heading, *charts, _worst(lines[-1]))


def heat_section(lines: Sequence[Mapping[str, Any]], heading: str = "Error by layer") -> str:
    """The signal to noise of each layer's products at the last measurement, one map for each operand."""
    sites = (lines[-1].get("sites") if lines else None) or {}
    maps: dict[str, dict[tuple[str, str], Number]] = {}
    for site, operands in sites.items():
        for name, row in operands.items():
            for turn, db in turns(row.get("sqnr_db")):
                maps.setdefault(name, {})[place(site, turn)] = db
    if not maps:
        return ""
    span = extent_of(maps.values())
    drawn = [heat_map(words, maps[name], span=span) for name, words in _OPERANDS.items() if name in maps]
    words = f"Signal to quantization noise of what each product multiplies, in dB, at step {lines[-1]['step']}."
    return section(heading, note(words), legend(span), f'<div class="pairs">{"".join(drawn)}</div>')


def _chart(lines: Sequence[Mapping[str, Any]], measure: str, label: str, factor: Number, words: str) -> str:
    drawn = []
    for number, kind in enumerate(_CLASSES, 1):
        points = _series(lines, kind, measure, factor)
        if any(y is not None for _, y in points):
            drawn.append(Line(kind, points, number))
    if not drawn:
        return ""
    last = ", ".join(f"{line.name} {_last(line):.3g}" for line in drawn)
    text = f"Lines over steps for {', '.join(line.name for line in drawn)}. At the end: {last}."
    panel = Panel(label, drawn, height=130, zero=measure != "sqnr_db")
    return figure(chart(label, text, "step", [panel]), f"{words[0].upper()}{words[1:]}. At the end: {last}.", drawn)


def _series(lines: Sequence[Mapping[str, Any]], kind: str, measure: str, factor: Number) -> list[Point]:
    values = [(line["step"], known(_of(line, kind, measure))) for line in lines]
    return [(step, None if value is None else factor * value) for step, value in values]


def _of(line: Mapping[str, Any], kind: str, measure: str) -> Any:
    """A measure of a class, whether the line is nested or has names with slashes."""
    row = line.get(kind)
    return row.get(measure) if isinstance(row, Mapping) else line.get(f"{kind}/{measure}")


def _last(line: Line) -> Number:
    return next(y for _, y in reversed(line.points) if y is not None)


def _worst(line: Mapping[str, Any]) -> str:
    rows = []
    for kind in _CLASSES:
        site, db = _of(line, kind, "worst_site"), known(_of(line, kind, "worst_sqnr_db"))
        if site and db is not None:
            rows.append([Cell(kind), Cell(str(site), code=True), Cell(f"{db:.1f} dB", db)])
    if not rows:
        return ""
    return table(f"Lowest signal to noise at step {line['step']}", ("tensor", "product and operand", "SQNR"), rows)
