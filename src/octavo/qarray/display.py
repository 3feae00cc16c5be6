"""Printing of QArrays: one line of text, or a small table in a notebook.

`q` is a QArray, whose module imports this one.
"""

import html as html_escape
import math
from typing import Any

import jax
import numpy as np


def granularity(q: Any) -> str:
    """A description of which values share a scale."""
    tiles = dict(enumerate(q.tile_shape))
    shape = q._stored_shape
    channel = [a for a, t in tiles.items() if t == 1 and shape[a] > 1]
    tiled = [f"{t} along axis {a}" for a, t in tiles.items() if 1 < t < shape[a]]
    words = (
        [f"per channel of {'axis' if len(channel) == 1 else 'axes'} {', '.join(map(str, channel))}"] if channel else []
    )
    words += [f"tiles of {' x '.join(tiled)}"] if tiled else []
    return ", ".join(words) or "per tensor"


def _facts(q: Any) -> dict[str, str]:
    facts = {"format": q.qtype.name, "shape": str(q.shape), "dtype": q.dtype.name, "scale": _array(q.scale)}
    facts["granularity"] = granularity(q)
    if q.zero_point is not None:
        facts["zero point"] = _array(q.zero_point)
    if q.outer_scale is not None:
        facts["outer scale"] = _array(q.outer_scale)
    if q.padding:
        facts["padding"] = ", ".join(f"{n} along axis {a}" for a, n in q.padding)
    if q.packed is not None:
        facts["packed"] = f"{q.qtype.bits} bits each along axis {q.packed[0]}"
    facts["bits per value"] = f"{8 * q.nbytes / max(1, q.size):.4g}"
    return facts


def _array(x: Any) -> str:
    return f"{x.dtype.name}[{','.join(map(str, x.shape))}]"


def _is_plain(q: Any) -> bool:
    return all(hasattr(x, "shape") and hasattr(x, "dtype") for x in (q.qvalue, q.scale))


def text(q: Any) -> str:
    """One line: shape, format, scale, granularity, bits."""
    if not _is_plain(q):
        # Shardings, specs and other placeholders, as JAX puts them into a pytree.
        return f"QArray({q.qvalue!r}, {q.scale!r}, {q.zero_point!r}, {q.qtype.name!r}, outer_scale={q.outer_scale!r})"
    facts = _facts(q)
    rest = "; ".join(f"{k} {v}" for k, v in facts.items() if k not in ("format", "shape", "dtype", "granularity"))
    return (
        f"QArray({facts['format']}[{','.join(map(str, q.shape))}] of {facts['dtype']}, {facts['granularity']}; {rest})"
    )


def html(q: Any) -> str:
    """A table of properties, and a histogram of the codes if they are concrete."""
    if not _is_plain(q):
        return f"<code>{html_escape.escape(text(q))}</code>"
    rows = "".join(
        f"<tr><th style='text-align:left'>{k}</th><td style='text-align:left'>{html_escape.escape(v)}</td></tr>"
        for k, v in _facts(q).items()
    )
    drawn = "" if isinstance(q.qvalue, jax.core.Tracer | jax.ShapeDtypeStruct) else _histogram(q)
    return f"<div><b>QArray</b><table>{rows}</table>{drawn}</div>"


def _histogram(q: Any, *, bars: int = 32, most: int = 1 << 16) -> str:
    """How often the representable values are used, as a row of bars, from a sample of the codes."""
    if not q.size:
        return ""
    codes = q.unpack().qvalue.ravel()
    stride = max(1, math.ceil(codes.size / most))
    values = np.asarray(q.qtype.decode(codes[::stride]))
    counts, _ = np.histogram(values[np.isfinite(values)], bins=bars, range=(q.qtype.smallest, q.qtype.largest))
    heights = 40 * counts / max(1, counts.max())
    rects = "".join(
        f"<rect x='{6 * i}' y='{40 - h:.1f}' width='5' height='{h:.1f}' fill='currentColor'/>"
        for i, h in enumerate(heights)
    )
    label = f"{q.qtype.smallest:g} … {q.qtype.largest:g}"
    return f"<svg width='{6 * bars}' height='40' role='img' aria-label='codes from {label}'>{rects}</svg><br>{label}"
