"""Histograms of tensors as small drawings: bars on a logarithmic scale, and under them the format's own values."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from octavo.report.markup import Cell, details, note, section, table
from octavo.report.scale import Scale, names
from octavo.report.svg import rule, text_at
from octavo.report.words import known, percent

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 340, 150, 52, 8, 10, 118
_MANY = 40
"""More values than this are drawn under the axis only."""


def histograms_section(found: Sequence[Mapping[str, Any]], *, about: str, heading: str = "Worst tensors") -> str:
    """The tensors with the lowest signal to noise, side by side where there is room."""
    if not found:
        return ""
    drawn = "".join(_figure(one) for one in found)
    words = (
        "How often values occur, each divided by the scale that it shares with its neighbours, so that one number "
        "format fits them all. The marks below the axis are the values that the format has."
    )
    return section(heading, note(f"{about} {words}"), f'<div class="pairs">{drawn}</div>', _table(found, heading))


def _figure(one: Mapping[str, Any]) -> str:
    title = f"{one['path']}, {one['format']}"
    db = known(one.get("sqnr_db"))
    ratio = "" if db is None else f"{db:.1f} dB, "
    lost = f"{percent(one['clipped'], 2)} beyond the ends, {percent(one['zeroed'], 2)} became zero"
    return (
        f'<figure class="small"><figcaption><code>{escape(str(one["path"]))}</code><br>{escape(str(one["format"]))}, '
        f"{escape(str(one['granularity']))}: {escape(ratio + lost)}</figcaption>"
        f"{_svg(one, title, ratio + lost)}</figure>"
    )


def _svg(one: Mapping[str, Any], title: str, text: str) -> str:
    counts, total = one["counts"], max(1, sum(one["counts"]))
    x = Scale(one["low"], one["high"], _LEFT, _WIDTH - _RIGHT)
    floor = 10.0 ** math.floor(math.log10(1 / total))
    y = Scale(floor, 1.0, _BOTTOM, _TOP, log=True)
    parts = []
    decades = range(round(math.log10(floor)), 1)
    for power in list(decades)[:: -max(1, math.ceil(len(decades) / 4))]:
        parts.append(rule(_LEFT, y(10.0**power), _WIDTH - _RIGHT, y(10.0**power), "grid"))
        parts.append(text_at(_LEFT - 6, y(10.0**power) + 4, _share(power + 2), "tick end"))
    grid = [value for value in one["grid"] if one["low"] <= value <= one["high"]]
    if len(grid) <= _MANY:
        parts += [rule(x(value), _TOP, x(value), _BOTTOM, "level") for value in grid]
    width = (one["high"] - one["low"]) / len(counts)
    bars = []
    for number, count in enumerate(counts):
        if count:
            left, right = x(one["low"] + number * width), x(one["low"] + (number + 1) * width)
            top = y(max(count / total, floor))
            bars.append(
                f"M{left:.1f} {_BOTTOM:.1f}L{left:.1f} {top:.1f}L{right:.1f} {top:.1f}L{right:.1f} {_BOTTOM:.1f}Z"
            )
    parts.append(f'<path class="bars c1" d="{"".join(bars)}"/>' if bars else "")
    marks = "".join(f"M{x(value):.1f} {_BOTTOM + 2:.1f}L{x(value):.1f} {_BOTTOM + 8:.1f}" for value in grid)
    parts.append(f'<path class="marks{" many" * (len(grid) > _MANY)}" d="{marks}"/>' if marks else "")
    ticks = x.ticks(5)
    parts += [text_at(x(t), _BOTTOM + 22, n, "tick mid") for t, n in zip(ticks, names(ticks), strict=True)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        f"<title>{escape(title)}</title><desc>{escape(text)}</desc>{''.join(parts)}</svg>"
    )


def _share(power: int) -> str:
    """A power of ten in percent."""
    return f"{10**power} %" if power >= 0 else f"{10.0**power:.{-power}f} %" if power >= -2 else f"1e{power} %"


def _table(found: Sequence[Mapping[str, Any]], caption: str) -> str:
    rows = []
    for one in found:
        db = known(one.get("sqnr_db"))
        rows.append(
            [
                Cell(str(one["path"]), code=True),
                Cell(str(one["format"])),
                Cell(" \N{MULTIPLICATION SIGN} ".join(map(str, one["shape"]))),
                Cell("" if db is None else f"{db:.1f} dB", db),
                Cell(percent(one["clipped"], 3) or "", one["clipped"]),
                Cell(percent(one["zeroed"], 3) or "", one["zeroed"]),
            ]
        )
    columns = ("tensor", "format", "shape", "SQNR", "beyond the ends", "became zero")
    return details("The same as a table", table(caption, columns, rows))
