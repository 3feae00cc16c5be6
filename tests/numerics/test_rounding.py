"""Stochastic rounding is unbiased for every format, in every bucket, the last one included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.numerics import Eden, Nearest, Rounding, Stochastic, formats, get_format, get_rounding, round_to_grid

ALL = sorted(formats())
DRAWS = 20_000


@functools.cache
def noise(bits):
    return Stochastic(bits=bits).noise(jax.random.key(1), (DRAWS, 40))


@pytest.mark.parametrize("name", ALL)
def test_mean_of_stochastic_rounding_is_the_value(name):
    fmt = formats()[name]
    rng = np.random.default_rng(0)
    grid = fmt.grid() if fmt.bits <= 8 else np.arange(-40.0, 41.0)
    place = rng.integers(0, len(grid) - 1, 40)
    fraction = rng.uniform(size=40)
    x = np.asarray(grid[place] + fraction * (grid[place + 1] - grid[place]), np.float32)
    low, high = grid[place], grid[place + 1]
    rounded = jax.jit(lambda x, noise: fmt.round(jnp.broadcast_to(x, noise.shape), noise))
    for bits, bias in ((24, 0), (8, 2.0**-9)):
        got = np.asarray(rounded(x, noise(bits)), np.float64)
        assert np.all((got == low) | (got == high))
        # A mean of DRAWS Bernoulli draws; 5 standard errors, and float32's resolution of x within a step.
        error = np.abs(got.mean(axis=0) - x) / (high - low)
        spread = np.sqrt(np.maximum(fraction * (1 - fraction), 1e-4) / DRAWS)
        assert np.all(error <= bias + 5 * spread + 2.0**-22 * np.abs(x) / (high - low))


@given(st.integers(0, 255), st.floats(0, 1, width=32, exclude_max=True))
def test_eight_bit_noise_has_a_bias_of_at_most_a_512th_of_a_step(code, fraction):
    fmt = get_format("int16")
    noise = (jnp.arange(256, dtype=jnp.float32) + 0.5) / 256  # every value that eight bits of noise can take
    x = np.float32(code + fraction)
    mean = np.mean(np.asarray(fmt.round(jnp.full(256, x), noise), np.float64))
    assert abs(mean - x) <= 1 / 512 + 1e-12


def test_noise_is_shared_along_chosen_axes():
    rounding = Stochastic(shared_axes=(0, -1))
    assert rounding.noise(jax.random.key(0), (3, 4, 5)).shape == (1, 4, 1)
    assert Stochastic().noise(jax.random.key(0), (3, 4)).dtype == jnp.float32


def test_noise_is_in_the_half_open_unit_interval():
    for bits in (8, 16, 24):
        noise = np.asarray(Stochastic(bits=bits).noise(jax.random.key(0), (100_000,)))
        assert noise.min() >= 0
        assert noise.max() < 1
        assert abs(noise.mean() - 0.5) < 0.005


def test_roundings_by_name():
    assert get_rounding("nearest") == get_rounding(None) == Nearest()
    assert get_rounding("stochastic, 8") == Stochastic(bits=8)
    with pytest.raises(ValueError, match="use 'nearest', 'stochastic'"):
        get_rounding("up")
    with pytest.raises(ValueError, match="8, 16 or 24 bits"):
        Stochastic(bits=7)
    with pytest.raises(ValueError, match="needs a random key"):
        Stochastic().noise(None, (3,))


@given(st.floats(2.0**-20, 2.0**20, width=32))
def test_rounding_up_to_a_float_grid(x):
    got = float(round_to_grid(jnp.float32(x), mantissa_bits=3, min_exponent=-6, up=True))
    assert got >= x
    step = max(2.0 ** (np.floor(np.log2(x)) - 3), 2.0**-9)
    assert got - x < step


def test_a_stochastic_rounding_of_ones_own_is_not_to_nearest():
    """Scaled to the last code and a half, the ends of the range would be biased."""

    class Mine(Rounding):
        stochastic = True

        def noise(self, key, shape):
            return jax.random.uniform(key, shape)

    assert [Mine().nearest, Nearest().nearest, Stochastic().nearest, Eden().nearest] == [False, True, False, True]
