"""Charts as SVG: lines over steps, panels that share an axis, dots with whiskers. Colours come from the page."""

import dataclasses
from collections.abc import Sequence
from html import escape
from typing import Any

from octavo.report.scale import Point, Scale, extent, names, thin
from octavo.report.words import Number

WIDTH, NARROW = 640, 330
_LEFT, _LEFT_NARROW, _TOP, _GAP, _BOTTOM = 58, 42, 26, 44, 40
_LABEL = 14
"""The least distance between two labels."""
_MOST_NAME = 28


@dataclasses.dataclass(frozen=True)
class Line:
    """A named line. Its colour is a number, 0 for what others are measured against.

    `raw` is drawn faintly behind it; `band` is the interval around it, as lowest and highest over each place.
    """

    name: str
    points: Sequence[Point]
    color: int = 1
    raw: Sequence[Point] = ()
    band: Sequence[tuple[Number, Number, Number]] = ()


@dataclasses.dataclass(frozen=True)
class Panel:
    """Lines over one vertical axis.

    `top` ends it below the highest values, `zero` has it start at 0, and `log` makes it logarithmic where the highest
    value is more than three times the lowest.
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


def chart(title: str, text: str, x_label: str, panels: Sequence[Panel]) -> str:
    """Panels above each other over one horizontal axis, with a title and a text for those who cannot see them.

    There are two drawings of it, of which the page shows one: for wide screens and for phones.
    """
    return _chart(title, text, x_label, panels, WIDTH) + _chart(title, text, x_label, panels, NARROW)


def _chart(title: str, text: str, x_label: str, panels: Sequence[Panel], width: int) -> str:
    xs = [x for panel in panels for line in panel.lines for x, _ in (*line.points, *line.raw)]
    low, high = (min(xs), max(xs)) if xs else (0.0, 1.0)
    wide = width == WIDTH
    labels = [line.name for panel in panels for line in panel.lines if line.name and wide]
    right = 14 + min(150, 7 * max(map(len, labels))) if labels else 14
    x = Scale(low, high if high > low else low + 1, _LEFT if wide else _LEFT_NARROW, width - right)
    parts, start = [], float(_TOP)
    for panel in panels:
        parts.append(_panel(panel, x, panel.scale(start), named=wide))
        start += panel.height + _GAP
    end = start - _GAP
    ticks = x.ticks(6 if wide else 4)
    parts += [text_at(x(t), end + 17, n, "tick mid") for t, n in zip(ticks, names(ticks), strict=True)]
    parts.append(text_at(x.end, end + 34, x_label, "tick end"))
    return _svg(title, text, width, end + _BOTTOM, parts)


def whiskers(
    title: str,
    text: str,
    x_label: str,
    rows: Sequence[tuple[str, Number, Number | None, Number | None]],
    *,
    mark: Number | None = 0,
) -> str:
    """A dot for each row's value on a line from its low to its high end, which may be unknown; `mark` is shown.

    Like a chart it is drawn for wide screens and for phones, where names are above their rows.
    """
    return "".join(_whiskers(title, text, x_label, rows, mark, width) for width in (WIDTH, NARROW))


def _whiskers(title: str, text: str, x_label: str, rows: Sequence[Any], mark: Number | None, width: int) -> str:
    wide = width == WIDTH
    left = 16 + 7.8 * max((len(_short(name, _MOST_NAME)) for name, *_ in rows), default=0) if wide else 12
    low, high = extent([*(v for _, *values in rows for v in values), mark])
    room = 0.04 * (high - low)
    x = Scale(low - room, high + room, left, width - 20)
    step, top = (30, 12) if wide else (44, 8)
    end = top + step * len(rows)
    ticks = x.ticks(6 if wide else 4)
    parts = [rule(x(t), top, x(t), end, "zero" if t == mark else "grid") for t in ticks]
    if mark is not None and mark not in ticks:
        parts.append(rule(x(mark), top, x(mark), end, "zero"))
    parts += [text_at(x(t), end + 17, n, "tick mid") for t, n in zip(ticks, names(ticks), strict=True)]
    for number, (name, value, least, most) in enumerate(rows):
        y = top + step * (number + (0.5 if wide else 0.7))
        if wide:
            parts.append(text_at(left - 12, y + 4, _short(name, _MOST_NAME), "name end"))
        else:
            parts.append(text_at(0, y - 14, _short(name, 44), "name"))
        if least is not None and most is not None:
            parts.append(rule(x(least), y, x(most), y, "line c1"))
            parts += [rule(x(v), y - 4, x(v), y + 4, "line c1") for v in (least, most)]
        parts.append(f'<circle class="dot c1" cx="{x(value):.1f}" cy="{y:.1f}" r="4.5"/>')
    parts.append(text_at(x.end, end + 34, x_label, "tick end"))
    return _svg(title, text, width, end + _BOTTOM, parts)


def _panel(panel: Panel, x: Scale, y: Scale, *, named: bool) -> str:
    ticks = y.ticks(5 if panel.height > 150 else 3)
    parts = [text_at(0, y.end - 11, panel.label + ", logarithmic" * y.log, "axis")]
    for tick, name in zip(ticks, names(ticks), strict=True):
        parts.append(rule(x.start, y(tick), x.end, y(tick), "zero" if tick == 0 else "grid"))
        parts.append(text_at(x.start - 8, y(tick) + 4, name, "tick end"))
    for line in panel.lines:
        if line.band:
            parts.append(_band(line, x, y))
    for line in panel.lines:
        parts.append(_path(line.raw, x, y, f"raw c{line.color}"))
    for line in panel.lines:
        parts.append(_path(line.points, x, y, f"line c{line.color}"))
    ends = [(y(last), line) for line in panel.lines if line.name and (last := _last(line.points)) is not None]
    for place, line in _spread(ends, y.start) if named else ():
        parts.append(text_at(x.end + 8, place + 4, _short(line.name), f"name c{line.color}"))
    return "".join(parts)


def _spread(named: list[tuple[Number, Line]], bottom: Number) -> list[tuple[Number, Line]]:
    """Labels at the ends of their lines, moved apart where they would overlap."""
    ordered = sorted(named, key=lambda entry: entry[0])
    places = [place for place, _ in ordered]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + _LABEL)
    # What went over the edge comes back, and pushes the others up.
    for i in reversed(range(len(places))):
        limit = bottom if i == len(places) - 1 else places[i + 1] - _LABEL
        places[i] = min(places[i], limit)
    return [(place, line) for place, (_, line) in zip(places, ordered, strict=True)]


def _last(points: Sequence[Point]) -> Number | None:
    return next((y for _, y in reversed(points) if y is not None), None)


def _short(name: str, most: int = 21) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _path(points: Sequence[Point], x: Scale, y: Scale, css: str) -> str:
    """One path, broken where a value is not finite; a value with none beside it is a dot."""
    runs: list[list[str]] = [[]]
    for place, value in thin(points):
        if value is None:
            runs.append([])
        else:
            runs[-1].append(f"{x(place):.1f} {y(value):.1f}")
    drawn = "".join(f"M{'L'.join(run)}" if len(run) > 1 else f"M{run[0]}h.1" for run in runs if run)
    return f'<path class="{css}" d="{drawn}"/>' if drawn else ""


def _band(line: Line, x: Scale, y: Scale) -> str:
    few = line.band[:: max(1, len(line.band) // 300)]
    upper = [f"{x(at):.1f} {y(high):.1f}" for at, _, high in few]
    lower = [f"{x(at):.1f} {y(low):.1f}" for at, low, _ in reversed(few)]
    return f'<path class="band c{line.color}" d="M{"L".join(upper + lower)}Z"/>'


def rule(x1: Number, y1: Number, x2: Number, y2: Number, css: str) -> str:
    """A straight line."""
    return f'<path class="{css}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def text_at(x: Number, y: Number, text: str, css: str) -> str:
    """A text, escaped."""
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _svg(title: str, text: str, width: int, height: Number, parts: Sequence[str]) -> str:
    css = "wide" if width == WIDTH else "narrow"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{css}" viewBox="0 0 {width} {height:.0f}" role="img">'
        f"<title>{escape(title)}</title><desc>{escape(text)}</desc>{''.join(parts)}</svg>"
    )
