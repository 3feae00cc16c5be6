"""Histograms of tensors count what the format does to their values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo.qarray import Quantizer
from octavo.qarray.histogram import histogram, sqnr_db


@pytest.mark.parametrize("fmt", ["int8", "int4", "nf4", "float8_e4m3fn", "mxfp4", "nvfp4"])
def test_every_value_is_counted_once_and_the_grid_is_the_format(fmt):
    x = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    q = jax.jit(Quantizer(fmt).quantize)(x)
    found = histogram("w", x, q)
    assert sum(found["counts"]) == found["sampled"] == x.size
    np.testing.assert_array_equal(found["grid"], q.qtype.grid())
    assert found["low"] <= min(found["grid"]) < max(found["grid"]) <= found["high"]


def test_packed_tiles_are_measured_by_their_own_scales():
    x = np.ones((64, 8), np.float32) * np.repeat([1.0, 100.0], 32)[:, None].astype(np.float32)
    q = octavo.quantize(jnp.asarray(x), "int4", channelwise_axes=(1,), tiled_axes={0: 32}).pack(0)
    found = histogram("w", x, q)
    # Each value is the largest of its tile, so all of them are at the end of the format.
    assert found["counts"][-1] == x.size
    assert found["clipped"] == 0
    assert found["granularity"] == "per channel of axis 1, tiles of 32 along axis 0"


def test_what_is_clipped_and_what_becomes_zero():
    x = np.asarray([0.0, 1e-4, 1.0, 4.0, -4.0], np.float32)
    found = histogram("w", x, octavo.quantize(jnp.asarray(x), "int8", calibration_method="fixed,-2,2"))
    assert found["clipped"] == pytest.approx(2 / 4), "of the values other than zero"
    assert found["zeroed"] == pytest.approx(1 / 4)


def test_zero_points_count():
    x = np.linspace(1.0, 3.0, 50, dtype=np.float32)
    found = histogram("w", x, octavo.quantize(jnp.asarray(x), "int8", calibration_method="minmax"))
    assert found["counts"][0] == 0 or found["low"] < 0
    assert found["zeroed"] == 0
    assert sum(count > 0 for count in found["counts"]) > 20, "values spread over the range"


def test_large_tensors_are_sampled():
    x = np.random.default_rng(1).normal(size=(1024, 256)).astype(np.float32)
    found = histogram("w", x, octavo.quantize(jnp.asarray(x), "int8"))
    assert found["sampled"] == sum(found["counts"]) == 1 << 17


def test_signal_to_noise():
    x = np.asarray([3.0, 4.0])
    assert sqnr_db(x, 1.1 * x) == pytest.approx(20.0)
    assert sqnr_db(x, x) is None, "nothing is lost"
    assert sqnr_db(0 * x, x) is None, "there is nothing to lose"
