"""A table whose cells have the more colour the worse they are: layers down, their products across."""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from octavo.report.words import DASH, Number

type Cells = Mapping[tuple[str, str], Number]
"""Decibels by layer and product."""

_LAYER = re.compile(r"(?P<name>.*?(?:layers?|blocks?|h))_?(?P<number>\d+)?", re.IGNORECASE)
_TAIL = re.compile(r"/(kernel|embedding|weight|w|dot_general\d*|einsum\d*|conv_general_dilated\d*|ragged_dot\d*)$")
_STRONGEST = 90
_LEAST_SPAN = 6.0
"""A span below one bit is drawn as if it were one: small differences stay pale."""


def place(path: str, turn: Sequence[int] = ()) -> tuple[str, str]:
    """The layer and the product that a path names; `turn` tells which layer, where a loop goes through them.

    >>> place("decoder/layers_3/mlp/wo/kernel"), place("decoder/layers/mlp/wo/dot_general0", (3,))
    (('3', 'mlp/wo'), ('3', 'mlp/wo'))
    >>> place("token_embedder/embedding")
    ('', 'token_embedder')
    """
    parts = _TAIL.sub("", path).split("/")
    for at, part in enumerate(parts):
        found = _LAYER.fullmatch(part)
        number = found and (found["number"] or ".".join(map(str, turn)))
        if found and number:
            kind = found["name"].rstrip("_").lower()
            prefix = "" if kind in ("layer", "layers", "block", "blocks", "h") else f"{found['name'].rstrip('_')} "
            return f"{prefix}{number}", "/".join(parts[at + 1 :]) or part
    return "", "/".join(parts)


def heat_map(caption: str, cells: Cells, *, span: tuple[Number, Number] | None = None, corner: str = "layer") -> str:
    """The table; `span` is what the colours reach over, by default from the lowest number to the highest."""
    rows, columns = (list(dict.fromkeys(name)) for name in zip(*cells, strict=True))
    rows.sort(key=_natural)
    short = shortest(columns)
    low, high = span or extent_of([cells])
    head = "".join(f'<th scope="col"><span title="{escape(c)}">{escape(short[c])}</span></th>' for c in columns)
    body = ""
    for row in rows:
        found = [cells.get((row, column)) for column in columns]
        name = escape(row or "outside")
        body += f'<tr><th scope="row">{name}</th>{"".join(_cell(v, low, high) for v in found)}</tr>\n'
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table class="heat">'
        f'<caption>{escape(caption)}</caption><thead><tr><th scope="col">{escape(corner)}</th>{head}</tr></thead>'
        f"<tbody>\n{body}</tbody></table></div>"
    )


def extent_of(maps: Iterable[Cells]) -> tuple[Number, Number]:
    """The lowest and the highest number of maps that share their colours, one bit apart at least."""
    values = [value for cells in maps for value in cells.values()]
    low, high = min(values), max(values)
    return min(low, high - _LEAST_SPAN), high


def legend(span: tuple[Number, Number]) -> str:
    """What the colours mean."""
    low, high = span
    return (
        f'<p class="legend">{low:.0f} dB <span class="ramp" aria-hidden="true"></span> {high:.0f} dB. '
        "A stronger colour is worse; 6 dB are one bit.</p>"
    )


def shortest(names: Sequence[str]) -> dict[str, str]:
    """Each path by as many of its last parts as tell it from the others.

    >>> shortest(["mlp/wo", "attention/out"]), shortest(["a/w", "b/w"])
    ({'mlp/wo': 'wo', 'attention/out': 'out'}, {'a/w': 'a/w', 'b/w': 'b/w'})
    """
    found = {}
    for name in names:
        parts = name.split("/")
        tails = ["/".join(parts[-n:]) for n in range(1, len(parts) + 1)]
        found[name] = next((t for t in tails if sum(f"/{n}".endswith(f"/{t}") for n in names) == 1), name)
    return found


def _cell(value: Number | None, low: Number, high: Number) -> str:
    if value is None:
        return f"<td>{DASH}</td>"
    strength = round(_STRONGEST * (high - value) / (high - low))
    return f'<td style="--h:{strength}%">{value:.1f}</td>'


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Numbers in their order; what belongs to no layer comes last."""
    if not name:
        return [(2, "")]
    return [(0, int(p)) if p.isdigit() else (1, p) for p in re.split(r"(\d+)", name) if p]
