"""The page templates, and the filters that format values in them. Templates escape all text."""

import dataclasses
import functools
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2

from octavo._io import atomic_write
from octavo._optional import installed_version
from octavo._text import format_bytes, format_bytes_si
from octavo.report import format as formats
from octavo.report.charts import histogram_chart
from octavo.report.format import DASH, finite, percent

_PACKAGES = ("octavo", "jax", "jaxlib", "numpy", "ml_dtypes", "flax", "optax", "orbax-checkpoint")
_TEXT: dict[str, Callable[..., str]] = {"text": str, "code": str}
_NUMBERS: dict[str, Callable[..., str]] = {
    "signed": formats.signed,
    "ratio": formats.ratio,
    "seconds": formats.seconds,
    "size": format_bytes,
    "si": format_bytes_si,
    "db": "{:.1f} dB".format,
    "interval": formats.interval,
    "error": formats.with_error,
}


def as_text(value: Any, fmt: str) -> str:
    """A value in a named format, or by a format specification; a dash for None.

    >>> as_text(0.5, ".1%"), as_text(1234, ",d"), as_text(2048, "size"), as_text(None, ".4f")
    ('50.0 %', '1,234', '2.0 KiB', '–')
    """
    if fmt in _TEXT:
        return str(value)
    if value is None:
        return DASH
    if fmt.endswith("%"):
        return percent(value, int(fmt[1:-1]))
    return _NUMBERS[fmt](value) if fmt in _NUMBERS else f"{value:{fmt}}"


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, its class in the style sheet, and the number to sort by, if any."""

    text: str
    css: str
    value: float | None = None


type Columns = Mapping[str, str] | Sequence[tuple[str, str]]
"""Headings with the formats of their columns."""


def heads(columns: Columns, rows: Sequence[Any]) -> list[Cell]:
    """The headings of a table."""
    return [Cell(name, "" if fmt in _TEXT or not rows else "number") for name, fmt in _pairs(columns)]


def cells(row: Sequence[Any], columns: Columns) -> list[Cell]:
    """A row of a table by the formats of its columns. A tuple of numbers is sorted by its first."""
    return [_cell(value, fmt) for value, (_, fmt) in zip(row, _pairs(columns), strict=True)]


def _pairs(columns: Columns) -> list[tuple[str, str]]:
    return list(columns.items() if isinstance(columns, Mapping) else columns)


def _cell(value: Any, fmt: str) -> Cell:
    if fmt in _TEXT:
        return Cell(str(value), "fixed" if fmt == "code" else "")
    return Cell(as_text(value, fmt), "number", finite(value[0] if isinstance(value, tuple) else value))


def plain(value: Any) -> str:
    """A value of a configuration as text.

    >>> plain([True, None, 3])
    'true, none, 3'
    """
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def versions() -> dict[str, str]:
    """The installed versions of Python and of the packages that matter here."""
    found = {name: version for name in _PACKAGES if (version := installed_version(name))}
    return {"python": platform.python_version(), **found}


def write_page(path: str | os.PathLike[str], template: str, **values: Any) -> Path:
    """Render a template and write the page atomically, so that a browser never loads a partial page."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = environment().get_template(template).render(headings=[], version=metadata.version("octavo"), **values)
    atomic_write(path, text)
    return path


@functools.cache
def environment() -> jinja2.Environment:
    """The templates, with their filters."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("octavo.report"),
        autoescape=True,
        extensions=["jinja2.ext.do"],
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.ChainableUndefined,
    )
    made.filters.update(fmt=as_text, heads=heads, cells=cells, plain=plain, histogram=histogram_chart, slug=_slug)
    return made


def _slug(heading: str) -> str:
    return re.sub(r"\W+", "-", heading.lower()).strip("-")
