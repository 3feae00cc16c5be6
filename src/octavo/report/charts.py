"""Charts as SVG: lines in panels over one axis, dots with whiskers, histograms. The style sheet colors them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from octavo.report.axis import Point, Scale, decimate, extent, last, tick_labels
from octavo.report.format import Number

# Each chart is drawn twice, and the style sheet shows the one that fits the screen.
WIDTH, NARROW = 640, 330
_TOP, _GAP, _BOTTOM, _LABEL_HEIGHT = 26, 44, 40, 14
_MOST_NUMBERS = 16  # rows of the table of a chart's numbers
_MOST_LEVELS = 40  # grid lines in a histogram; formats with more values have marks below the axis only

_TEXT = Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>')
_SVG = Markup(
    '<svg xmlns="http://www.w3.org/2000/svg" class="{}" viewBox="0 0 {} {:.0f}" role="img">'
    "<title>{}</title><desc>{}</desc>{}</svg>"
)


@dataclasses.dataclass(frozen=True)
class Line:
    """A named line; color 0 is the baseline, `raw` is drawn faintly behind it, `band` is x, lowest and highest."""

    name: str
    points: Sequence[Point]
    color: int = 1
    raw: Sequence[Point] = ()
    band: Sequence[tuple[Number, Number, Number]] = ()


@dataclasses.dataclass(frozen=True)
class Panel:
    """Lines over one vertical axis.

    The axis includes 0 with `zero`, ends at `top`, and with `log` is logarithmic where the highest value is more than
    three times the lowest.
    """

    label: str
    lines: Sequence[Line]
    height: int = 220
    zero: bool = False
    log: bool = False
    top: Number | None = None

    def scale(self, start: Number) -> Scale:
        values = [y for line in self.lines for _, y in (*line.points, *line.raw)]
        values += [y for line in self.lines for _, *ends in line.band for y in ends]
        known = [y for y in values if y is not None]
        log = self.log and bool(known) and 0 < 3 * min(known) < max(known)
        low, high = extent(values, zero=self.zero, log=log)
        high = high if self.top is None else min(high, self.top)
        return Scale(low, high if high > low else low + 1, start + self.height, start, log)


@dataclasses.dataclass(frozen=True)
class Dot:
    """A row of a dot chart: a value with an interval around it, which may be unknown."""

    name: str
    value: Number
    low: Number | None = None
    high: Number | None = None


@dataclasses.dataclass(frozen=True)
class LineChart:
    """Panels above each other over one horizontal axis; the names of lines are those of the first panel."""

    title: str
    x_label: str
    panels: Sequence[Panel]

    @property
    def lines(self) -> Sequence[Line]:
        return self.panels[0].lines

    @property
    def ends(self) -> str:
        """The values at the end, for captions and screen readers."""
        ends = [(line.name, last(line.points)) for line in self.lines]
        return ", ".join(f"{name} {'not finite' if y is None else f'{y:.4g}'}".strip() for name, y in ends)

    def longest(self) -> Number:
        """The highest value."""
        return max(y for line in self.lines for _, y in line.points if y is not None)

    def svg(self) -> Markup:
        return Markup("").join(self._draw(width) for width in (WIDTH, NARROW))

    def _draw(self, width: int) -> Markup:
        wide = width == WIDTH
        xs = [x for panel in self.panels for line in panel.lines for x, _ in (*line.points, *line.raw)]
        low, high = min(xs, default=0.0), max(xs, default=1.0)
        labels = [len(line.name) for panel in self.panels for line in panel.lines if line.name and wide]
        right = 14 + min(150, 7 * max(labels)) if labels else 14
        x = Scale(low, high if high > low else low + 1, 58 if wide else 42, width - right)
        parts, start = [], float(_TOP)
        for panel in self.panels:
            parts += _panel(panel, x, panel.scale(start), named=wide)
            start += panel.height + _GAP
        end = start - _GAP
        parts += _x_axis(x, end, self.x_label, 6 if wide else 4)
        return _svg(self.title, f"At the end: {self.ends}.", width, end + _BOTTOM, parts)

    def numbers(self) -> list[list[Any]]:
        """The lines at evenly spaced points, the first and the last among them."""
        xs = sorted({x for line in self.lines for x, _ in line.points})
        if len(xs) > _MOST_NUMBERS:
            xs = [xs[round(i * (len(xs) - 1) / (_MOST_NUMBERS - 1))] for i in range(_MOST_NUMBERS)]
        values = [dict(line.points) for line in self.lines]
        return [[f"{x:g}", *(at.get(x) for at in values)] for x in xs]


def _panel(panel: Panel, x: Scale, y: Scale, *, named: bool) -> list[Markup]:
    ticks = y.ticks(5 if panel.height > 150 else 3)
    parts = [_text(0, y.end - 11, panel.label + ", logarithmic" * y.log, "axis")]
    for tick, name in zip(ticks, tick_labels(ticks), strict=True):
        parts.append(_rule(x.start, y(tick), x.end, y(tick), "zero" if tick == 0 else "grid"))
        parts.append(_text(x.start - 8, y(tick) + 4, name, "tick end"))
    parts += [_band(line, x, y) for line in panel.lines if line.band]
    parts += [_path(line.raw, x, y, f"raw c{line.color}") for line in panel.lines]
    # The baseline, dashed, is on top: a recipe with the same loss would hide it.
    drawn = sorted(panel.lines, key=lambda line: line.color == 0)
    parts += [_path(line.points, x, y, f"line c{line.color}") for line in drawn]
    ends = [(y(end), line) for line in panel.lines if line.name and (end := last(line.points)) is not None]
    for at, line in _separate_labels(ends, y.start) if named else ():
        parts.append(_text(x.end + 8, at + 4, _shorten(line.name, 21), f"name c{line.color}"))
    return parts


def _separate_labels(labels: list[tuple[Number, Line]], bottom: Number) -> list[tuple[Number, Line]]:
    """Labels at the ends of their lines, moved apart where they would overlap."""
    ordered = sorted(labels, key=lambda entry: entry[0])
    ys = [y for y, _ in ordered]
    for i in range(1, len(ys)):
        ys[i] = max(ys[i], ys[i - 1] + _LABEL_HEIGHT)
    # Labels below the bottom edge are moved up, and move the others up with them.
    for i in reversed(range(len(ys))):
        ys[i] = min(ys[i], bottom if i == len(ys) - 1 else ys[i + 1] - _LABEL_HEIGHT)
    return [(y, line) for y, (_, line) in zip(ys, ordered, strict=True)]


@dataclasses.dataclass(frozen=True)
class DotChart:
    """A dot for each row's value on a line from its low to its high end, and a line at `mark`."""

    title: str
    x_label: str
    rows: Sequence[Dot]
    fmt: str = "{:.2f}"
    mark: Number | None = 0
    lines = ()

    @property
    def has_intervals(self) -> bool:
        return any(row.low is not None for row in self.rows)

    def svg(self) -> Markup:
        return Markup("").join(self._draw(width) for width in (WIDTH, NARROW))

    def _draw(self, width: int) -> Markup:
        wide, rows, mark = width == WIDTH, self.rows, self.mark
        text = "; ".join(f"{row.name} {self.fmt.format(row.value)}" for row in rows)
        names = [_shorten(row.name, 28 if wide else 44) for row in rows]
        left = 16 + 7.8 * max(map(len, names), default=0) if wide else 12
        low, high = extent([*(v for row in rows for v in (row.value, row.low, row.high)), mark])
        margin = 0.04 * (high - low)
        x = Scale(low - margin, high + margin, left, width - 20)
        height, top = (30, 12) if wide else (44, 8)
        end = top + height * len(rows)
        ticks = x.ticks(6 if wide else 4)
        parts = [_rule(x(t), top, x(t), end, "zero" if t == mark else "grid") for t in ticks]
        if mark is not None and mark not in ticks:
            parts.append(_rule(x(mark), top, x(mark), end, "zero"))
        for i, (name, row) in enumerate(zip(names, rows, strict=True)):
            y = top + height * (i + (0.5 if wide else 0.7))
            parts.append(_text(left - 12, y + 4, name, "name end") if wide else _text(0, y - 14, name, "name"))
            if row.low is not None and row.high is not None:
                parts.append(_rule(x(row.low), y, x(row.high), y, "line c1"))
                parts += [_rule(x(v), y - 4, x(v), y + 4, "line c1") for v in (row.low, row.high)]
            parts.append(Markup('<circle class="dot c1" cx="{:.1f}" cy="{:.1f}" r="4.5"/>').format(x(row.value), y))
        return _svg(self.title, text, width, end + _BOTTOM, [*parts, *_x_axis(x, end, self.x_label, 6 if wide else 4)])


def histogram_chart(histogram: Mapping[str, Any], text: str) -> Markup:
    """Bars on a logarithmic scale, and below them the values of the number format."""
    counts, low, high = histogram["counts"], histogram["low"], histogram["high"]
    total, top, bottom = max(1, sum(counts)), 10, 118
    x = Scale(low, high, 52, 332)
    floor = 10.0 ** math.floor(math.log10(1 / total))
    y = Scale(floor, 1.0, bottom, top, log=True)
    decades = list(range(round(math.log10(floor)), 1))
    parts = []
    for power in decades[:: -max(1, math.ceil(len(decades) / 4))]:
        parts.append(_rule(x.start, y(10.0**power), x.end, y(10.0**power), "grid"))
        parts.append(_text(x.start - 6, y(10.0**power) + 4, _power_percent(power + 2), "tick end"))
    grid = [x(value) for value in histogram["grid"] if low <= value <= high]
    many = len(grid) > _MOST_LEVELS
    parts += [_rule(at, top, at, bottom, "level") for at in grid if not many]
    edges = [x(low + i * (high - low) / len(counts)) for i in range(len(counts) + 1)]
    bars = [(a, b, y(max(n / total, floor))) for a, b, n in zip(edges, edges[1:], counts, strict=False) if n]
    d = "".join(f"M{a:.1f} {bottom:.1f}L{a:.1f} {t:.1f}L{b:.1f} {t:.1f}L{b:.1f} {bottom:.1f}Z" for a, b, t in bars)
    parts.append(_svg_path("bars c1", d))
    marks = "".join(f"M{at:.1f} {bottom + 2:.1f}L{at:.1f} {bottom + 8:.1f}" for at in grid)
    parts.append(_svg_path("marks many" if many else "marks", marks))
    ticks = x.ticks(5)
    parts += [_text(x(t), bottom + 22, n, "tick mid") for t, n in zip(ticks, tick_labels(ticks), strict=True)]
    return _SVG.format("small", 340, 150, f"{histogram['path']}, {histogram['format']}", text, Markup("").join(parts))


def _power_percent(power: int) -> str:
    return f"{10**power} %" if power >= 0 else f"{10.0**power:.{-power}f} %" if power >= -2 else f"1e{power} %"


def _x_axis(x: Scale, bottom: Number, label: str, count: int) -> list[Markup]:
    ticks = x.ticks(count)
    named = zip(ticks, tick_labels(ticks), strict=True)
    return [*(_text(x(t), bottom + 17, n, "tick mid") for t, n in named), _text(x.end, bottom + 34, label, "tick end")]


def _path(points: Sequence[Point], x: Scale, y: Scale, css: str) -> Markup:
    """One path, broken where a value is not finite; a value without neighbors is a dot."""
    runs: list[list[str]] = [[]]
    for at, value in decimate(points):
        if value is None:
            runs.append([])
        else:
            runs[-1].append(f"{x(at):.1f} {y(value):.1f}")
    return _svg_path(css, "".join(f"M{'L'.join(run)}" if len(run) > 1 else f"M{run[0]}h.1" for run in runs if run))


def _band(line: Line, x: Scale, y: Scale) -> Markup:
    few = line.band[:: max(1, len(line.band) // 300)]
    corners = [f"{x(at):.1f} {y(high):.1f}" for at, _, high in few]
    corners += [f"{x(at):.1f} {y(low):.1f}" for at, low, _ in reversed(few)]
    return _svg_path(f"band c{line.color}", f"M{'L'.join(corners)}Z")


def _rule(x1: Number, y1: Number, x2: Number, y2: Number, css: str) -> Markup:
    return _svg_path(css, f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}")


def _svg_path(css: str, path: str) -> Markup:
    return Markup('<path class="{}" d="{}"/>').format(css, path) if path else Markup("")


def _text(x: Number, y: Number, text: str, css: str) -> Markup:
    return _TEXT.format(css, x, y, text)


def _shorten(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _svg(title: str, text: str, width: int, height: Number, parts: Sequence[Markup]) -> Markup:
    return _SVG.format("wide" if width == WIDTH else "narrow", width, height, title, text, Markup("").join(parts))
