"""Scales of block formats: exact powers of two, rounded up or by OCP's floor."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.numerics import get_format, power_of_two_scale, round_scale
from tests.reference import power_of_two_up

MX = ["mxfp8", "mxfp8_e5m2", "mxfp6", "mxfp6_e3m2", "mxfp4", "mxint8"]


@pytest.mark.parametrize("name", MX)
@given(x=st.floats(2.0**-100, 2.0**100, width=32))
def test_scale_is_the_smallest_power_of_two_that_does_not_saturate(name, x):
    fmt = get_format(name)
    scale = float(power_of_two_scale(jnp.float32(x), fmt))
    assert scale == power_of_two_up(float(np.float32(x)) / fmt.bound)
    assert x <= fmt.bound * scale < 2 * x


@pytest.mark.parametrize("name", MX)
@given(x=st.floats(2.0**-100, 2.0**100, width=32))
def test_floor_is_the_ocp_specification(name, x):
    fmt = get_format(name)
    largest_exponent = {"mxfp8": 8, "mxfp8_e5m2": 15, "mxfp6": 2, "mxfp6_e3m2": 4, "mxfp4": 2, "mxint8": 0}[name]
    want = 2.0 ** (math.frexp(float(np.float32(x)))[1] - 1 - largest_exponent)
    assert float(power_of_two_scale(jnp.float32(x), fmt, floor=True)) == want


def test_exact_at_the_boundary():
    fmt = get_format("mxfp4")
    at = power_of_two_scale(jnp.asarray([6.0, np.nextafter(np.float32(6), np.float32(7))], jnp.float32), fmt)
    assert at.tolist() == [1.0, 2.0]


def test_not_finite_is_nan():
    scale = power_of_two_scale(jnp.asarray([jnp.inf, jnp.nan], jnp.float32), get_format("mxfp8"))
    assert np.isnan(scale.astype(jnp.float8_e8m0fnu).astype(jnp.float32)).all()


@given(x=st.floats(2.0**-6, 448, width=32))
def test_rounding_a_scale_up_never_makes_it_smaller(x):
    up = float(round_scale(jnp.float32(x), jnp.dtype(jnp.float8_e4m3fn), up=True))
    near = float(round_scale(jnp.float32(x), jnp.dtype(jnp.float8_e4m3fn), up=False))
    assert x <= up <= x * 1.125 + 1e-9
    assert abs(near - x) <= abs(up - x)
