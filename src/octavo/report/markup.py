"""The page around the charts: sections, tiles, tables. Every text that comes in is escaped here and in `svg`."""

import dataclasses
import math
import os
import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path

from octavo.report.svg import Line
from octavo.report.words import DASH, Number

# Nothing is loaded from anywhere, and no text in the page can change that.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell: its text, the number to sort by if it has one, and whether it is code."""

    text: str
    value: Number | None = None
    code: bool = False

    def html(self, tag: str) -> str:
        css = ' class="number"' if self.value is not None else ' class="fixed"' if self.code else ""
        sort = f' data-value="{self.value:.10g}"' if self.value is not None and math.isfinite(self.value) else ""
        scope = ' scope="row"' if tag == "th" else ""
        text = escape(self.text)
        return f"<{tag}{scope}{css}{sort}>{f'<code>{text}</code>' if self.code else text}</{tag}>"


@dataclasses.dataclass(frozen=True)
class Tile:
    """A number worth a glance, or a dash, and a few words about it."""

    label: str
    figure: str | None
    about: str = ""

    def html(self) -> str:
        figure, about = escape(self.figure or DASH), escape(self.about)
        shown = f'<dd class="figure">{figure}</dd><dd class="about">{about}</dd>'
        return f"<div><dt>{escape(self.label)}</dt>{shown}</div>"


def page(title: str, lead: str, parts: Sequence[str], foot: str) -> str:
    """A whole page that needs nothing beside itself."""
    style, script = (resources.files("octavo.report").joinpath(name).read_text("utf8") for name in _FILES)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n'
        + contents(parts)
        + "\n".join(part for part in parts if part)
        + f'\n</main>\n<footer class="note">{escape(foot)}</footer>\n<script>\n{script}</script>\n</body>\n</html>\n'
    )


_FILES = ("style.css", "sort.js")
_MOST_NUMBERS = 16
"""Rows of the table of a chart's numbers."""


def write(path: Path, text: str) -> Path:
    """Put a page in its place at once, so that a browser never loads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text, encoding="utf8")
    os.replace(new, path)
    return path


def tiles(found: Sequence[Tile]) -> str:
    """Tiles in a row, or in as many as fit the screen."""
    return f'<dl class="tiles">{"".join(tile.html() for tile in found)}</dl>'


def section(heading: str, *parts: str) -> str:
    """A part of the page under its heading, which links can point to."""
    name = re.sub(r"\W+", "-", heading.lower()).strip("-")
    inside = "\n".join(part for part in parts if part)
    return f'<section aria-labelledby="{name}">\n<h2 id="{name}">{escape(heading)}</h2>\n{inside}\n</section>'


def contents(parts: Sequence[str]) -> str:
    """Links to the sections of a page."""
    found = [match for part in parts for match in re.findall(r'<h2 id="([\w-]+)">(.*?)</h2>', part)]
    if len(found) < 3:
        return ""
    links = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, heading in found)
    return f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n'


def note(text: str) -> str:
    """A sentence in small print."""
    return f'<p class="note">{escape(text)}</p>'


def missing(text: str) -> str:
    """A sentence in place of what is not there."""
    return f'<p class="missing">{escape(text)}</p>'


def figure(svg: str, caption: str, lines: Sequence[Line] = (), *, data: str = "", x: str = "step") -> str:
    """A chart with its caption, and its numbers in a table on request.

    Narrow screens show the names of lines above it instead of beside them. `data` is the table, by default that of the
    lines; `x` is what they run over.
    """
    named = "".join(f'<li class="c{line.color}">{escape(line.name)}</li>' for line in lines if line.name)
    key = f'<ul class="key">{named}</ul>' if named else ""
    shown = data or (_numbers(caption, lines, x) if lines else "")
    numbers = details("Numbers", shown) if shown else ""
    return f"<figure>{key}{svg}<figcaption>{escape(caption)}</figcaption>{numbers}</figure>"


def _numbers(caption: str, lines: Sequence[Line], x: str) -> str:
    """What lines are at some places, evenly apart, the first and the last among them."""
    places = sorted({at for line in lines for at, _ in line.points})
    if len(places) > _MOST_NUMBERS:
        picked = {round(i * (len(places) - 1) / (_MOST_NUMBERS - 1)) for i in range(_MOST_NUMBERS)}
        places = [places[i] for i in sorted(picked)]
    tables = [dict(line.points) for line in lines]
    rows = []
    for at in places:
        found = [values.get(at) for values in tables]
        rows.append([Cell(f"{at:g}"), *(Cell(DASH if y is None else f"{y:.5g}", y or 0.0) for y in found)])
    return table(caption, (x, *(line.name or "value" for line in lines)), rows)


def table(
    caption: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    sortable: bool = False,
    dim: Sequence[bool] = (),
) -> str:
    """A table whose first column names its rows; one that is wider than the screen scrolls by itself."""
    numeric = [bool(rows) and all(row[i].value is not None for row in rows) for i in range(len(columns))]
    head = ""
    for name, number in zip(columns, numeric, strict=True):
        css = ' class="number"' if number else ""
        shown = f'<button type="button">{escape(name)}</button>' if sortable else escape(name)
        head += f'<th scope="col"{css}>{shown}</th>'
    body = ""
    for row, is_dim in zip(rows, dim or [False] * len(rows), strict=True):
        first, *rest = row
        body += f"<tr{' class="dim"' if is_dim else ''}>{first.html('th')}{''.join(c.html('td') for c in rest)}</tr>\n"
    css = ' class="sortable"' if sortable else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table{css}>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>"
    )


def details(summary: str, content: str) -> str:
    """Something that is shown on request."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"
