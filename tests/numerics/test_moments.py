"""The maps of optimizer moments: bitsandbytes' dynamic map, and the linear map without zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo._config import Config
from octavo.numerics import DynamicFormat, PositiveFormat

DYNAMIC = [DynamicFormat(bits, unsigned) for bits in (8, 4) for unsigned in (False, True)]
FORMATS = [*DYNAMIC, PositiveFormat(8), PositiveFormat(4)]
by_name = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)


def create_dynamic_map(signed, max_exponent_bits, total_bits):
    """bitsandbytes.functional.create_dynamic_map in NumPy."""
    data, non_sign_bits = [], total_bits - 1
    for i in range(max_exponent_bits):
        items = 2 ** (i + non_sign_bits - max_exponent_bits + (not signed)) + 1
        boundaries = np.linspace(0.1, 1, items)
        means = 10.0 ** (i - max_exponent_bits + 1) * (boundaries[:-1] + boundaries[1:]) / 2
        data += [*means, *(-means if signed else [])]
    return np.sort([*data, 0.0, 1.0])


def samples(fmt):
    """Magnitudes from 1e-9 to 1 that are spread evenly on a logarithmic and on a linear scale."""
    rng = np.random.default_rng(0)
    x = np.concatenate([10 ** rng.uniform(-9, 0, 20000), rng.uniform(0, 1, 20000), [0.0, 1.0]]).astype(np.float32)
    return x * rng.choice([-1, 1], x.shape).astype(np.float32) if fmt.signed else x


@pytest.mark.parametrize("fmt", DYNAMIC, ids=lambda fmt: fmt.name)
def test_the_dynamic_map_is_that_of_bitsandbytes(fmt):
    table = create_dynamic_map(not fmt.unsigned, fmt.bits - 1, fmt.bits)
    assert len(table) == 2**fmt.bits == len(set(table))
    np.testing.assert_allclose(fmt.grid(), table, rtol=1e-12)
    assert (table[-1], np.sum(table < 0)) == (1.0, 0 if fmt.unsigned else 2 ** (fmt.bits - 1) - 1)


@by_name
def test_a_code_is_the_index_of_its_value(fmt):
    codes = jnp.arange(2**fmt.bits).astype(fmt.storage)
    values = jax.jit(fmt.decode)(codes)
    again, through = jax.jit(lambda v, c: (fmt.encode(v), fmt.from_bits(fmt.to_bits(c))))(values, codes)
    np.testing.assert_allclose(values, fmt.grid(), rtol=2e-6)
    np.testing.assert_array_equal(np.asarray(again, np.int32), np.arange(2**fmt.bits))
    np.testing.assert_array_equal(np.asarray(through, np.int32), np.arange(2**fmt.bits))


@by_name
def test_rounding_is_to_the_nearest_value(fmt):
    x, grid = samples(fmt), fmt.grid()
    if fmt.has_zero and not fmt.signed:
        assert np.all((np.asarray(jax.jit(fmt.encode)(x)) == 0) == (x == 0))
        x = x[x > grid[1] / 2]
    nearest = np.min(np.abs(x[:, None].astype(np.float64) - grid), axis=1)
    error = np.abs(np.asarray(jax.jit(fmt.round)(x)) - x.astype(np.float64))
    assert np.all(error <= nearest + 1e-6 * np.abs(x))


def test_the_error_of_the_dynamic_map_is_bounded_in_each_decade():
    """Half the spacing of a decade, and near its upper end half the gap to the next one."""
    for fmt in (DynamicFormat(8), DynamicFormat(8, unsigned=True)):
        x = np.geomspace(1e-6, 1, 50000).astype(np.float32)
        decade = np.ceil(np.log10(x.astype(np.float64))).astype(int)
        spacing = 0.9 * 10.0**decade / 2.0 ** (decade + fmt.bits - 2 + fmt.unsigned)
        error = np.abs(np.asarray(jax.jit(fmt.round)(x)) - x)
        assert np.all(error <= 3 * spacing)
        assert np.mean(error <= 0.501 * spacing) > 0.8


@by_name
def test_stochastic_rounding_has_no_bias(fmt):
    low, high = np.sort(fmt.grid()[np.abs(fmt.grid()) > 1e-3])[[len(fmt.grid()) // 3, len(fmt.grid()) // 3 + 1]]
    x, draws = low + 0.3 * (high - low), 10**4
    noise = np.random.default_rng(0).uniform(size=draws).astype(np.float32)
    values = np.asarray(jax.jit(fmt.round)(jnp.full(draws, x, jnp.float32), noise), np.float64)
    assert set(np.round(values, 6)) <= {np.round(low, 6), np.round(high, 6)}
    assert abs(values.mean() - x) < 3 * values.std() / draws**0.5


@by_name
def test_formats_convert_to_json(fmt):
    assert Config.from_json(fmt.to_json()) == fmt


def test_unknown_widths_raise():
    with pytest.raises(ValueError, match="2 to 8 bits, got 9"):
        DynamicFormat(9)
    with pytest.raises(ValueError, match="1 to 8 bits, got 0"):
        PositiveFormat(0)
