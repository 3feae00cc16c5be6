"""From numbers to coordinates: axes with round ticks, and lines with few enough points to draw."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

from octavo.report.format import MINUS, Number

type Point = tuple[Number, Number | None]
"""A value, or None where it is not finite, over its step or time."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """Maps the interval `low` to `high` onto `start` to `end`, linearly or by logarithm, and clips to it.

    >>> scale = Scale(0, 10, 100, 200)
    >>> scale(5), scale.ticks(3)
    (150.0, [0.0, 5.0, 10.0])
    """

    low: Number
    high: Number
    start: Number
    end: Number
    log: bool = False

    def __post_init__(self):
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(f"a scale goes from a number to a larger one, above 0 if logarithmic; got {self}")

    def __call__(self, value: Number) -> Number:
        low, value, high = (
            math.log(x) if self.log else x for x in (self.low, min(max(value, self.low), self.high), self.high)
        )
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, count: int) -> list[Number]:
        """About `count` round numbers in the interval."""
        if self.log and self.high > 20 * self.low:
            exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [m * 10.0**e for e in exponents for m in (1, 2, 5) if self.low <= m * 10.0**e <= self.high]
            return found[:: math.ceil(len(found) / (count + 1))]
        # If only one or two ticks fit, use the next smaller step.
        for more in range(4):
            step = _round_step((self.high - self.low) / max(1, count - 1 + more))
            multiples = range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)
            if len(multiples) >= min(3, count):
                break
        return [i * step for i in multiples]


def _round_step(step: Number) -> Number:
    power = 10.0 ** math.floor(math.log10(step))
    return power * next(m for m in (1, 2, 5, 10) if m * power >= step * 0.8)


def tick_labels(ticks: Sequence[Number]) -> list[str]:
    """The ticks as text, all with the fewest digits that distinguish them.

    >>> tick_labels([0.0, 0.05, 0.1]), tick_labels([0.0, 5000.0, 10000.0]), tick_labels([1e-7, 2e-7])
    (['0', '0.05', '0.10'], ['0', '5,000', '10,000'], ['1e-07', '2e-07'])
    """
    sizes = [abs(tick) for tick in ticks if tick]
    if sizes and (max(sizes) >= 1e7 or max(sizes) < 1e-4):
        return [f"{tick:.3g}" for tick in ticks]
    digits = next((d for d in range(8) if all(abs(t - round(t, d)) <= 1e-6 * max(sizes, default=1) for t in ticks)), 8)
    return ["0" if tick == 0 else f"{tick:,.{digits}f}".replace("-", MINUS) for tick in ticks]


def extent(values: Iterable[Number | None], *, zero: bool = False, log: bool = False) -> tuple[Number, Number]:
    """The interval that an axis shows: all values with a margin, and 0 if `zero`.

    >>> extent([1.0, None, 3.0], zero=True), extent([])
    ((0.0, 3.15), (0.0, 1.0))
    """
    known = [v for v in values if v is not None] + ([0.0] if zero else [])
    low, high = min(known, default=0.0), max(known, default=0.0)
    if not known or (zero and low == high):
        return 0.0, 1.0
    if log:
        return low / 1.05, high * 1.05
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return (low if zero and low == 0 else low - margin), (high if zero and high == 0 else high + margin)


def decimate(points: Sequence[Point], most: int = 600) -> list[Point]:
    """At most about `most` of the points: the lowest and highest of each bin, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    width = math.ceil(2 * len(points) / most)
    out: list[Point] = []
    for start in range(0, len(points), width):
        part = points[start : start + width]
        known = [(y, i) for i, (_, y) in enumerate(part) if y is not None]
        chosen = {min(known)[1], max(known)[1]} if known else set()
        chosen |= {next(i for i, (_, y) in enumerate(part) if y is None)} if len(known) < len(part) else set()
        out += [part[i] for i in sorted(chosen)]
    return out


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """The centered mean over about `window` points, fewer towards the ends; not across values that are not finite.

    >>> smooth([(0, 1.0), (1, 2.0), (2, 6.0), (3, None)], 3)
    [(0, 1.0), (1, 3.0), (2, 6.0), (3, None)]
    """
    out: list[Point] = []
    for is_finite, run in itertools.groupby(points, key=lambda point: point[1] is not None):
        stretch = list(run)
        sums = [0.0, *itertools.accumulate(y for _, y in stretch if y is not None)]
        for i, point in enumerate(stretch):
            half = min(window // 2, i, len(stretch) - 1 - i)
            mean = (sums[i + half + 1] - sums[i - half]) / (2 * half + 1) if is_finite else None
            out.append((point[0], mean))
    return out


def last(points: Sequence[Point]) -> Number | None:
    """The last finite value."""
    return next((y for _, y in reversed(points) if y is not None), None)
