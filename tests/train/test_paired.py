"""Gaps by batch: their intervals hold the true gap as often as they say, and are narrow with three seeds."""

import math

import numpy as np
import pytest

from octavo.train.paired import BLOCKS, block_gaps, interval, interval_by_batch, mean_curve, steps_to, target_of

SEEDS, STEPS, GAP = 3, 800, 0.01


def curves(rng, seeds_differ):
    """Losses of float and of a recipe, of the same batches; their difference is correlated over about five steps."""
    batches = 2 + 0.2 * rng.standard_normal((SEEDS, STEPS))
    noise = rng.standard_normal((SEEDS, STEPS))
    for step in range(1, STEPS):
        noise[:, step] = 0.8 * noise[:, step - 1] + 0.6 * noise[:, step]
    gaps = GAP + 0.01 * noise + seeds_differ * rng.standard_normal((SEEDS, 1))
    number = lambda losses: [[float(i), float(x)] for i, x in enumerate(losses)]  # noqa: E731
    return [(number(base * (1 + gap)), number(base)) for base, gap in zip(batches, gaps, strict=True)]


@pytest.mark.parametrize(("seeds_differ", "least"), [(0.0, 0.9), (0.02, 0.85)])
def test_intervals_hold_the_gap_as_often_as_they_say(seeds_differ, least):
    rng, held, width, plain = np.random.default_rng(0), [], [], []
    for _ in range(200):
        gaps = [block_gaps(run, base) for run, base in curves(rng, seeds_differ)]
        mean, low, high = interval_by_batch(gaps)
        assert low <= mean <= high
        held.append(low <= GAP <= high)
        width.append(high - low)
        ends = interval([float(np.mean(seed)) for seed in gaps])
        plain.append(ends[1] - ends[0])
    assert least <= np.mean(held) <= 0.99
    if not seeds_differ:
        assert np.median(width) < 0.6 * np.median(plain)  # than by seed alone
        assert np.median(width) < 0.005


def test_blocks_are_of_the_last_quarter_and_of_common_steps():
    base = [[step, 1.0 + step] for step in range(100)]
    run = [[step, (1.0 + step) * (1.5 if step < 76 else 1.1)] for step in range(100)]
    assert block_gaps(run, base) == pytest.approx([0.1] * BLOCKS)
    assert block_gaps(run[:50], base) == pytest.approx([0.5] * BLOCKS)
    assert block_gaps(run[:20], base) == []
    assert all(math.isnan(x) for x in interval_by_batch([]))
    assert all(math.isnan(x) for x in interval_by_batch([[]]))


def test_seeds_that_differ_give_the_interval_of_seeds():
    far = [[1.0, 1.1, 0.9], [2.0, 2.1, 1.9], [3.0, 3.1, 2.9]]
    assert interval_by_batch(far)[1:] == interval([1.0, 2.0, 3.0])


def test_the_steps_to_a_target_are_interpolated():
    curve = mean_curve([[[10, 4.0], [20, 3.0], [40, 2.0]], [[10, 4.0], [20, 1.0]]])
    assert curve == [(10, 4.0), (20, 2.0)]
    assert steps_to(curve, 3.0) == 15
    assert steps_to(curve, 5.0) == 10
    assert math.isnan(steps_to(curve, 1.0))
    assert target_of([(10, 4.0), (20, 3.0), (30, 2.0), (40, 1.0)]) == 2.0
    assert math.isnan(target_of([]))
