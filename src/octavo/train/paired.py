"""Statistics of paired runs: gaps by batch, and the time to a loss.

Runs of one seed see the same batches in the same order, so their losses are compared step by step. Losses of adjacent
steps are alike in both, since they have almost the same weights; so the differences are averaged in blocks of steps.
"""

import math
import statistics
from collections.abc import Sequence

# The last part of a run whose steps are compared, and the number of blocks that they are divided into.
WINDOW, BLOCKS = 0.25, 8
# A run has reached a target at the loss of float after this part of its steps.
TARGET = 0.75

type Curve = Sequence[Sequence[float]]
"""Pairs of a step and a loss."""


def block_gaps(losses: Curve, base: Curve) -> list[float]:
    """The gap of a run to that of its batches in float, for each block of steps in the last part of the runs.

    >>> block_gaps([[step, 1.01] for step in range(64)], [[step, 1.0] for step in range(64)])[:2]
    [0.010000000000000009, 0.010000000000000009]
    """
    known = dict(_pairs(base))
    pairs = [(loss, known[step]) for step, loss in losses if step in known]
    pairs = pairs[len(pairs) - int(WINDOW * len(pairs)) :]
    size = len(pairs) // BLOCKS
    if not size:
        return []
    pairs = pairs[len(pairs) - size * BLOCKS :]
    blocks = [pairs[i : i + size] for i in range(0, len(pairs), size)]
    return [sum(a for a, _ in block) / sum(b for _, b in block) - 1 for block in blocks]


def interval_by_batch(gaps: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """The mean gap of blocks in several seeds, and its 95 % confidence interval.

    If seeds differ by more than their blocks explain (an F test at 5 %), the interval is that of the means of seeds;
    otherwise all blocks are values of one sample, which is why three seeds suffice.

    Args:
      gaps: The gaps of the blocks of each seed.

    Returns:
      The mean and the ends of the interval; NaN where there are too few values.

    >>> [round(x, 4) for x in interval_by_batch([[0.0, 1.0, 2.0, 1.0], [1.0, 0.0, 1.0, 2.0]])]
    [1.0, 0.368, 1.632]
    """
    gaps = [seed for seed in gaps if seed]
    values = [gap for seed in gaps for gap in seed]
    if not values:
        return math.nan, math.nan, math.nan
    means = [statistics.fmean(seed) for seed in gaps]
    blocks, seeds = min(len(seed) for seed in gaps), len(means)
    sample = values
    if seeds > 1 and blocks > 1:
        import scipy.special  # a dependency of JAX

        within = statistics.fmean(statistics.variance(seed) for seed in gaps)
        limit = float(scipy.special.fdtri(seeds - 1, seeds * (blocks - 1), 0.95))
        sample = means if blocks * statistics.variance(means) > limit * within else values
    return statistics.fmean(values), *interval(sample)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of a mean, by Student's t; NaN for a single value.

    >>> [round(x, 3) for x in interval([1.0, 2.0, 3.0])]
    [-0.484, 4.484]
    """
    if len(values) < 2:
        return math.nan, math.nan
    import scipy.special  # a dependency of JAX

    half = float(scipy.special.stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def mean_curve(curves: Sequence[Curve]) -> list[tuple[float, float]]:
    """The mean of curves at the steps that all of them have."""
    known = [dict(_pairs(curve)) for curve in curves]
    steps = sorted(set.intersection(*map(set, known))) if known else []
    return [(step, statistics.fmean(curve[step] for curve in known)) for step in steps]


def _pairs(curve: Curve) -> list[tuple[float, float]]:
    return [(step, loss) for step, loss in curve]


def steps_to(curve: Curve, target: float) -> float:
    """The step at which a curve first is at a loss or below, interpolated between its points; NaN if it never is.

    >>> steps_to([(10, 3.0), (20, 2.0), (30, 1.0)], 1.5)
    25.0
    """
    before: Sequence[float] | None = None
    for step, loss in curve:
        if loss <= target:
            if before is None or before[1] == loss:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
        before = (step, loss)
    return math.nan


def target_of(curve: Curve) -> float:
    """The loss of a curve after three quarters of its steps; NaN for an empty one."""
    if not curve:
        return math.nan
    last = curve[-1][0]
    return next(loss for step, loss in curve if step >= TARGET * last)
