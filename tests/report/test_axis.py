"""Axes end on round numbers and lines keep their spikes."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.report.axis import Scale, decimate, extent, smooth, tick_labels

finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(finite, min_size=1), st.booleans())
def test_every_value_has_a_place(values, zero):
    low, high = extent(values, zero=zero)
    scale = Scale(low, high, 300, 20)
    assert all(20 <= scale(v) <= 300 for v in values)
    assert all(low <= t <= high or abs(t) < 1e-9 for t in scale.ticks(5))
    assert 1 <= len(scale.ticks(5)) <= 11
    assert len(tick_labels(scale.ticks(5))) == len(scale.ticks(5))


def test_log_scale():
    scale = Scale(1, 1000, 0, 300, log=True)
    assert [round(scale(v)) for v in (1, 10, 100, 1000)] == [0, 100, 200, 300]
    assert scale.ticks(6)[0] == 1
    assert Scale(2, 9, 0, 1, log=True).ticks(5) == [2, 4, 6, 8]


def test_scale_is_checked():
    for low, high, log in ((1, 1, False), (2, 1, False), (0, 1, True), (float("nan"), 1, False)):
        with pytest.raises(ValueError, match="a scale goes from a number to a larger one, above 0 if logarithmic"):
            Scale(low, high, 0, 1, log)


def test_values_beyond_an_axis_are_at_its_end():
    assert Scale(0, 1, 100, 0)(7.0) == 0
    assert Scale(0, 1, 100, 0)(-7.0) == 100


@given(st.integers(601, 3000), st.integers(0, 3), st.integers(0, 2**32))
def test_decimate_keeps_extremes_and_gaps(count, holes, number):
    random = Random(number)
    values = [random.gauss(0, 1) for _ in range(count)]
    for _ in range(holes):
        values[random.randrange(count)] = None
    points = list(enumerate(values))
    few = decimate(points)
    assert len(few) <= 1000
    assert [p for p in points if p in few] == few
    for chosen in (min, max):
        known = [v for v in values if v is not None]
        assert not known or chosen(v for _, v in few if v is not None) == chosen(known)
    assert (None in values) == any(v is None for _, v in few)


def test_smooth():
    line = [(i, 3.0 * i) for i in range(20)]
    assert smooth(line, 7) == [(x, pytest.approx(y)) for x, y in line], "a straight line stays where it is"
    assert smooth(line, 1) == line
    spike = [(i, float(i == 5)) for i in range(11)]
    assert smooth(spike, 5)[5][1] == pytest.approx(1 / 5)
    assert smooth([(0, 1.0), (1, None), (2, 3.0)], 3) == [(0, 1.0), (1, None), (2, 3.0)]
    assert smooth([], 3) == []
