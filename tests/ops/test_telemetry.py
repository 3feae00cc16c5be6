"""Sums over an operand and its codes, against the same thing written in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo.ops.telemetry import SUMS, fit
from tests.arrays import normal


def db(sums):
    return 10 * np.log10(float(sums["signal"]) / float(sums["noise"]))


def by_hand(x, q, scale):
    """The same sums, for a symmetric format whose scale is given for every value."""
    x, back, scale = (np.asarray(a, np.float64) for a in (x, q.dequantize(jnp.float32), scale))
    there, end = x != 0, max(q.qtype.bound, q.qtype.largest)
    start = q.qtype.smallest - (end - q.qtype.largest)  # signed integers have one code more below zero
    return {
        "count": there.sum(),
        "saturated": ((x > end * scale * (1 + 1e-6)) | (x < start * scale * (1 + 1e-6))).sum(),
        "underflowed": (there & (back == 0)).sum(),
        "signal": (x**2).sum(),
        "noise": ((x - back) ** 2).sum(),
        "scale": (scale * there).sum(),
        "largest_scale": (scale * there).max(),
    }


@pytest.mark.parametrize(
    ("how", "repeats"),
    [
        (octavo.Quantizer("int8", channelwise_axes=(0,)), (1, 40)),
        (octavo.Quantizer("int4", calibration="fixed,-1,1"), (6, 40)),
        (octavo.Quantizer("float8_e5m2", channelwise_axes=(0, 1)), (1, 1)),
        (octavo.Quantizer("float8_e4m3fn", tiled_axes={0: 3, 1: 8}), (3, 8)),
        (octavo.Quantizer("int8", channelwise_axes=(0,), tiled_axes={1: 16}), (1, 16)),  # the last tile is padded
        (octavo.Quantizer("mxfp4"), (1, 32)),
    ],
)
def test_sums_are_those_of_numpy(how, repeats):
    x = normal(0, 6, 40) * jnp.asarray([1.0, 0.0, 3.0, 1e-3, 2.0, 1.0])[:, None]
    q = how.quantize(x)
    scale = np.repeat(np.repeat(np.asarray(q.scale, np.float32), repeats[0], 0), repeats[1], 1)[:, :40]
    got = jax.jit(fit)(x, q)
    assert set(got) == set(SUMS)
    for name, wanted in by_hand(x, q, scale).items():
        np.testing.assert_allclose(got[name], wanted, rtol=1e-5, err_msg=name)


def test_both_levels_of_scales_count():
    x = normal(0, 4, 32)
    q = octavo.quantize(x, "nvfp4")
    scale = np.repeat(np.asarray(q.scale, np.float32), 16, 1) * np.asarray(q.outer_scale)
    np.testing.assert_allclose(fit(x, q)["scale"], scale.sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("std", "wanted", "within"),
    [
        (1.0, 31.5, 0.5),  # normal numbers of e4m3
        (1e-3, 11.0, 0.5),  # few of its subnormal ones are left
    ],
)
def test_float8_with_a_fixed_range(std, wanted, within):
    x = normal(0, 256, 1024, std=std)
    sums = fit(x, octavo.quantize(x, "float8_e4m3fn", calibration_method="fixed,-224,224"))
    assert abs(db(sums) - wanted) < within
    assert int(sums["saturated"]) == 0
    # The smallest value is 2^-9, the scale one half: what lies below half of that becomes zero.
    wanted = np.mean(np.abs(np.asarray(x)) < 2.0**-11)
    assert abs(float(sums["underflowed"] / sums["count"]) - wanted) < 1e-3


def test_int8_per_channel_of_long_rows():
    x = normal(0, 16, 8192)
    assert abs(db(fit(x, octavo.quantize(x, "int8", channelwise_axes=(0,)))) - 41) < 0.5


@pytest.mark.parametrize("qtype", ["int8", "int4", "float8_e4m3fn"])
def test_values_beyond_a_fixed_range_saturate(qtype):
    x = normal(0, 64, 1024)
    sums = fit(x, octavo.quantize(x, qtype, calibration_method="fixed,-0.1,0.1"))
    # Signed integers have one code more below zero.
    low = {"int8": 128.5 / 127.5, "int4": 8.5 / 7.5}.get(qtype, 1.0)
    x = np.asarray(x)
    assert int(sums["saturated"]) == np.sum((x > 0.1) | (x < -0.1 * low))
    assert 0.9 < float(sums["saturated"] / sums["count"]) < 0.93


@pytest.mark.parametrize("qtype", ["int8", "int4", "float8_e4m3fn", "float8_e5m2", "mxfp8", "mxint8", "nvfp4"])
def test_nothing_saturates_in_its_own_range(qtype):
    @jax.jit
    def saturated(x):
        every = [x.astype(dtype) for dtype in (jnp.bfloat16, jnp.float16, jnp.float32)]
        return [fit(x, octavo.quantize(x, qtype))["saturated"] for x in every]

    assert [int(n) for n in saturated(normal(0, 32, 256))] == [0, 0, 0]


def test_ocp_scales_saturate():
    """Rounded down to a power of two, a scale leaves the largest values of some blocks beyond the format's end."""
    fmt = octavo.get_format("mxfp8").replace(name="ocp", scale_rounding="floor")
    x = normal(0, 32, 256)
    share = fit(x, octavo.quantize(x, fmt))
    assert 0 < float(share["saturated"] / share["count"]) < 0.02


def test_a_zero_point_is_part_of_the_range():
    x = jax.random.uniform(jax.random.key(0), (64, 64), minval=2.0, maxval=6.0)
    own = fit(x, octavo.quantize(x, "uint8", calibration_method="minmax"))
    assert int(own["saturated"]) == int(own["underflowed"]) == 0
    fixed = fit(x, octavo.quantize(x, "uint8", calibration_method="fixed,0,4"))
    assert abs(float(fixed["saturated"] / fixed["count"]) - 0.5) < 0.02


def test_packed_codes_are_the_same():
    x = normal(0, 8, 32)
    q = octavo.quantize(x, "int4", channelwise_axes=(0,))
    jax.tree.map(np.testing.assert_array_equal, fit(x, q), fit(x, q.pack()))


def test_nan_shows():
    x = normal(0, 4, 32).at[0, 0].set(jnp.nan)
    sums = fit(x, octavo.quantize(x, "int8"))
    assert np.isnan(sums["signal"])
    assert np.isnan(sums["noise"])
