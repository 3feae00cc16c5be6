"""Numbers as text for people."""

import math
from typing import Any

type Number = int | float

DASH = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"


def percent(share: Number, digits: int = 1) -> str:
    """A share in percent.

    >>> percent(0.9712)
    '97.1 %'
    """
    return f"{100 * share:.{digits}f} %"


def signed(share: Number) -> str:
    """A difference in percent, with its sign.

    >>> signed(0.0123), signed(-0.004)
    ('+1.23 %', '−0.40 %')
    """
    return f"{100 * share:+.2f} %".replace("-", MINUS)


def interval(ends: tuple[Number, Number]) -> str:
    """An interval of differences in percent.

    >>> interval((-0.01, 0.02))
    '−1.00 to +2.00 %'
    """
    return f"{signed(ends[0])[:-2]} to {signed(ends[1])}"


def ratio(value: Number) -> str:
    """A ratio.

    >>> ratio(0.8249)
    '0.82 ×'
    """
    return f"{value:.2f} {TIMES}"


def seconds(value: Number) -> str:
    """A short time.

    >>> seconds(0.0412), seconds(3.5)
    ('41.2 ms', '3.5 s')
    """
    unit, size = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e-3)) if value >= s), ("µs", 1e-6))
    return f"{value / size:.3g} {unit}"


def with_error(measured: tuple[Number, Number | None]) -> str:
    """A mean with its standard error.

    >>> with_error((12.3456, 0.1)), with_error((439.29, None))
    ('12.346 ± 0.100', '439.3')
    """
    mean, error = measured
    digits = 1 if mean >= 100 else 3
    return f"{mean:,.{digits}f}" + ("" if error is None else f" ± {error:,.{digits}f}")


def finite(value: Any) -> float | None:
    """A finite number, or None for everything else.

    >>> finite(2), finite(float("nan")), finite(None)
    (2.0, None, None)
    """
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
