"""Quantization error by layer, as tables with colored cells, and telemetry by step."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from octavo.report.axis import last
from octavo.report.charts import Line, LineChart, Panel
from octavo.report.format import Number, finite

_LAYER = re.compile(r"(?P<name>.*?(?:layers?|blocks?|h))_?(?P<number>\d+)?", re.IGNORECASE)
_SUFFIX = re.compile(r"/(kernel|embedding|weight|w|dot_general\d*|einsum\d*|conv_general_dilated\d*|ragged_dot\d*)$")
_STRONGEST = 90
_LEAST_SPAN = 6.0  # dB, one bit: smaller differences stay pale
_CLASSES = ("weight", "activation", "gradient")
_MEASURES = (
    ("saturation", "Saturation, % of values", 100.0, "Values beyond the range of the format, clipped to it"),
    ("underflow", "Underflow, % of values", 100.0, "Values other than zero that became zero"),
    ("sqnr_db", "Signal to quantization noise, dB", 1.0, "Higher is better, 6 dB are one bit"),
)
_OPERANDS = {
    "lhs": "Forward, lhs: activations",
    "rhs": "Forward, rhs: weights",
    "dlhs": "Backward, gradient operand of dlhs",
    "drhs": "Backward, gradient operand of drhs",
}


def layer_and_op(path: str, index: Sequence[int] = ()) -> tuple[str, str]:
    """The layer and the operation that a path names; `index` is the iteration of a scan over layers.

    >>> layer_and_op("decoder/layers_3/mlp/wo/kernel"), layer_and_op("decoder/layers/mlp/wo/dot_general0", (3,))
    (('3', 'mlp/wo'), ('3', 'mlp/wo'))
    >>> layer_and_op("token_embedder/embedding")
    ('', 'token_embedder')
    """
    parts = _SUFFIX.sub("", path).split("/")
    for i, part in enumerate(parts):
        found = _LAYER.fullmatch(part)
        number = found and (found["number"] or ".".join(map(str, index)))
        if found and number:
            name = found["name"].rstrip("_")
            prefix = "" if name.lower() in ("layer", "layers", "block", "blocks", "h") else f"{name} "
            return f"{prefix}{number}", "/".join(parts[i + 1 :]) or part
    return "", "/".join(parts)


@dataclasses.dataclass(frozen=True)
class HeatMap:
    """Decibels by layer, downwards, and operation; the lower, the stronger the color."""

    caption: str
    cells: Mapping[tuple[str, str], Number]
    span: tuple[Number, Number]

    def columns(self) -> dict[str, str]:
        return shortest(list(dict.fromkeys(op for _, op in self.cells)))

    def rows(self) -> list[tuple[str, list[tuple[Number | None, int]]]]:
        layers = sorted({layer for layer, _ in self.cells}, key=_natural)
        return [(layer, [self._cell(layer, op) for op in self.columns()]) for layer in layers]

    def _cell(self, layer: str, op: str) -> tuple[Number | None, int]:
        value, (low, high) = self.cells.get((layer, op)), self.span
        return value, 0 if value is None else round(_STRONGEST * (high - value) / (high - low))


def span_of(maps: Iterable[Mapping[tuple[str, str], Number]]) -> tuple[Number, Number]:
    """The lowest and the highest value of maps that share their colors, one bit apart at least."""
    values = [value for cells in maps for value in cells.values()]
    return min(*values, max(values) - _LEAST_SPAN), max(values)


def shortest(paths: Sequence[str]) -> dict[str, str]:
    """The fewest last components of each path that distinguish it from the others.

    >>> shortest(["mlp/wo", "attention/out"]), shortest(["a/w", "b/w"])
    ({'mlp/wo': 'wo', 'attention/out': 'out'}, {'a/w': 'a/w', 'b/w': 'b/w'})
    """
    found = {}
    for path in paths:
        parts = path.split("/")
        tails = ["/".join(parts[-n:]) for n in range(1, len(parts) + 1)]
        found[path] = next((t for t in tails if sum(f"/{p}".endswith(f"/{t}") for p in paths) == 1), path)
    return found


def _natural(name: str) -> list[tuple[int, int | str]]:
    """A sort key: numbers by value, what belongs to no layer last."""
    return [(0, int(p)) if p.isdigit() else (1, p) for p in re.split(r"(\d+)", name) if p] or [(2, "")]


@dataclasses.dataclass(frozen=True)
class ErrorMaps:
    """A heat map for each operand of the matmuls, at a step."""

    step: int
    span: tuple[Number, Number]
    maps: list[HeatMap]


def error_maps(telemetry: Sequence[Mapping[str, Any]]) -> ErrorMaps | None:
    """The signal to noise of each layer's matmuls at the last measurement."""
    cells: dict[str, dict[tuple[str, str], Number]] = {}
    for site, operands in ((telemetry[-1].get("sites") if telemetry else None) or {}).items():
        for name, row in operands.items():
            for index, db in indexed(row.get("sqnr_db")):
                cells.setdefault(name, {})[layer_and_op(site, index)] = db
    if not cells:
        return None
    span = span_of(cells.values())
    maps = [HeatMap(caption, cells[name], span) for name, caption in _OPERANDS.items() if name in cells]
    return ErrorMaps(telemetry[-1]["step"], span, maps)


def indexed(value: Any) -> list[tuple[tuple[int, ...], float]]:
    """The finite numbers in nested lists with their indices: one for each iteration of the loops around a matmul.

    >>> indexed([1.5, None]), indexed(2.0)
    ([((0,), 1.5)], [((), 2.0)])
    """
    if isinstance(value, list):
        return [((i, *index), x) for i, part in enumerate(value) for index, x in indexed(part)]
    return [((), float(value))] if isinstance(value, int | float) and math.isfinite(value) else []


def telemetry_charts(telemetry: Sequence[Mapping[str, Any]]) -> list[tuple[LineChart, str]]:
    """A chart for each measure, with a line for each class of tensors, and its caption."""
    charts = []
    for measure, label, factor, caption in _MEASURES:
        lines = []
        for color, kind in enumerate(_CLASSES, 1):
            values = [(line["step"], finite(line.get(kind, {}).get(measure))) for line in telemetry]
            points = [(step, None if value is None else factor * value) for step, value in values]
            if last(points) is not None:
                lines.append(Line(kind, points, color))
        if lines:
            panel = Panel(label, lines, height=130, zero=measure != "sqnr_db")
            charts.append((LineChart(label, "step", [panel]), caption))
    return charts


def worst_sites(line: Mapping[str, Any]) -> list[list[Any]]:
    """The class, the operand and the signal to noise of the operands that fit worst at a step."""
    rows = [[kind, *(line.get(kind, {}).get(name) for name in ("worst_site", "worst_sqnr_db"))] for kind in _CLASSES]
    return [row for row in rows if row[1] and finite(row[2]) is not None]
