"""Numbers in words that a person reads at a glance."""

import math
from typing import Any

type Number = int | float

DASH = "\N{EN DASH}"
"""Stands for what is not known."""
MINUS = "\N{MINUS SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"


def percent(share: Number | None, digits: int = 1) -> str | None:
    """A share in percent.

    >>> percent(0.9712), percent(None)
    ('97.1 %', None)
    """
    return None if share is None else f"{100 * share:.{digits}f} %"


def signed(share: Number | None) -> str | None:
    """A difference in percent, with its sign.

    >>> signed(0.0123), signed(-0.004)
    ('+1.23 %', '−0.40 %')
    """
    return None if share is None else f"{100 * share:+.2f} %".replace("-", MINUS)


def ratio(value: Number | None) -> str | None:
    """A ratio.

    >>> ratio(0.8249)
    '0.82 ×'
    """
    return None if value is None else f"{value:.2f} {TIMES}"


def seconds(value: Number | None) -> str:
    """A short time in the unit that suits it.

    >>> seconds(0.0412), seconds(3.5), seconds(None)
    ('41.2 ms', '3.5 s', '–')
    """
    if value is None:
        return DASH
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"


def size(count: Number | None) -> str:
    """Bytes in the unit that suits them.

    >>> size(1536), size(3 * 2**30), size(None)
    ('1.5 KiB', '3.0 GiB', '–')
    """
    if count is None:
        return DASH
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def known(value: Any) -> float | None:
    """A finite number, or None for everything else.

    >>> known(2), known(float("nan")), known(None)
    (2.0, None, None)
    """
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
