"""What each calibration measures, over axes, tiles, padding and any magnitude."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo import Quantizer, register_calibration
from octavo._config import Config
from octavo.calibration import (
    AbsMax,
    AbsMean,
    Constant,
    Fixed,
    MinMax,
    Mse,
    Percentile,
    Rms,
    Snr,
    calibrations,
    get_calibration,
)

X = np.random.default_rng(0).standard_t(3, size=(6, 40)).astype(np.float32)
X[2, 5:9] = 0


def measure(method, x=X, fmt="int8", **how):
    return Quantizer(fmt, calibration=method, **how).measure(jnp.asarray(x))


REFERENCE = {
    "absmax": lambda a: np.abs(a).max(),
    "absmax,0.7": lambda a: 0.7 * np.abs(a).max(),
    "rms,3": lambda a: 3 * np.sqrt(np.mean(a**2)),
    "weighted,1.5,0.5,0.25,0,3": lambda a: (
        1.5 * np.abs(a[a != 0]).mean() + 0.5 * np.mean(np.abs(a[a != 0]) ** 3) ** (1 / 3) + 0.25 * np.abs(a).max()
    ),
    "absmean": lambda a: np.abs(a[a != 0]).mean(),
    "absmean,2,3": lambda a: 2 * np.mean(np.abs(a[a != 0]) ** 3) ** (1 / 3),
    "percentile,99": lambda a: np.percentile(np.abs(a), 99),
    "constant,2.5": lambda a: 2.5,
}


@pytest.mark.parametrize("method", REFERENCE)
def test_symmetric_methods_by_row(method):
    got = measure(method, channelwise_axes=(0,))["absmax"]
    want = [[REFERENCE[method](row.astype(np.float64))] for row in X]
    np.testing.assert_allclose(got, want, rtol=2e-6)


@pytest.mark.parametrize("method", REFERENCE)
def test_padding_does_not_count(method):
    got = measure(method, channelwise_axes=(0,), tiled_axes={1: 16})["absmax"]
    assert got.shape == (6, 3)
    want = [[REFERENCE[method](row[k : k + 16].astype(np.float64)) for k in (0, 16, 32)] for row in X]
    np.testing.assert_allclose(got, want, rtol=2e-6)


@pytest.mark.parametrize("method", [m for m in REFERENCE if m != "constant,2.5"])
@pytest.mark.parametrize("power", [-100, 100])
def test_every_magnitude_is_measured_alike(method, power):
    want = np.asarray(measure(method, channelwise_axes=(0,))["absmax"])
    got = np.asarray(measure(method, X * np.float32(2.0**power), channelwise_axes=(0,))["absmax"])
    np.testing.assert_array_equal(got * np.float32(2.0**-power), want)


def test_minmax_holds_zero():
    bounds = measure("minmax", np.asarray([[1.0, 2.0], [-3.0, -2.0], [-1.0, 1.0]], np.float32), channelwise_axes=(0,))
    assert bounds["min"].ravel().tolist() == [0, -3, -1]
    assert bounds["max"].ravel().tolist() == [2, 0, 1]
    wider = measure("minmax,2", np.asarray([[-1.0, 1.0]], np.float32))
    assert (wider["min"].item(), wider["max"].item()) == (-2, 2)


def test_fixed_is_one_range_for_the_tensor():
    assert measure("fixed,4", channelwise_axes=(0,))["absmax"].tolist() == [[4]]
    bounds = measure("fixed,-1,6", channelwise_axes=(0,))
    assert (bounds["min"].tolist(), bounds["max"].tolist()) == ([[-1]], [[6]])
    assert not get_calibration("fixed,-2,2").asymmetric


def test_constant_with_a_bias_is_a_shifted_range():
    bounds = measure("constant,2,0.5", channelwise_axes=(0,))
    assert bounds["min"].shape == (6, 1)
    assert (bounds["min"][0, 0].item(), bounds["max"][0, 0].item()) == (-2.5, 1.5)


@pytest.mark.parametrize(
    ("method", "fmt"), [("mse", "int4"), ("snr", "int2"), ("mse,9,0.5", "nf4"), ("mse", "float4_e2m1fn")]
)
def test_searches_lose_less_than_absmax(method, fmt):
    x, search = jnp.asarray(X), Quantizer(fmt, calibration=method, channelwise_axes=(0,))
    plain = search.replace(calibration="absmax")

    @jax.jit
    def errors(clips):
        def error(bounds):
            return jnp.sum((search.quantize(x, bounds=bounds).dequantize() - x) ** 2, axis=1)

        scaled = lambda clip: {"absmax": clip * plain.measure(x)["absmax"]}  # noqa: E731
        return error(search.measure(x)), jax.vmap(lambda clip: error(scaled(clip)))(clips)

    found, (absmax, *others) = errors(jnp.asarray((1.0, *get_calibration(method).clip_candidates)))
    assert np.all(found <= absmax * (1 + 1e-6))
    # And no candidate does better than the one that was found.
    for other in others:
        assert np.all(found <= other * (1 + 1e-5))


@given(scale=st.sampled_from([1e-28, 1e-10, 1.0, 1e20, 1e30]))
def test_a_search_finds_the_same_clip_at_any_magnitude(scale):
    want = np.asarray(measure("mse", fmt="int4", channelwise_axes=(0,))["absmax"])
    got = np.asarray(measure("mse", X * np.float32(scale), fmt="int4", channelwise_axes=(0,))["absmax"])
    np.testing.assert_allclose(got / np.float32(scale), want, rtol=1e-5)


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("absmax", AbsMax()),
        ("ABSMAX, 0.5", AbsMax(0.5)),
        ("minmax,0.9", MinMax(0.9)),
        ("rms,7", Rms(7.0)),
        ("fixed,3", Fixed(-3.0, 3.0)),
        ("fixed,-1,6", Fixed(-1.0, 6.0)),
        ("absmean,1,2", AbsMean(1.0, 2.0)),
        ("constant,2", Constant(2.0)),
        ("percentile,99.9", Percentile(99.9)),
        ("mse,11", Mse(11)),
        ("snr,0.9,0.8", Snr((0.9, 0.8))),
    ],
)
def test_strings_and_objects_are_the_same(text, typed):
    assert get_calibration(text) == typed
    assert Config.from_json(typed.to_json()) == typed
    assert eval(repr(typed)) == typed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("absmx", "did you mean 'absmax'"),
        ("absmax,high", "must be numbers"),
        ("absmax,-1", "positive number"),
        ("rms", "wrong count of numbers; rms takes factor"),
        ("fixed", "wrong count of numbers"),
        ("fixed,1,2", "holds zero"),
        ("fixed,0,0", "not empty"),
        ("percentile,101", "at most 100"),
        ("mse,1", "at least 2 points"),
        ("absmax,1,2,3", r"absmax takes \[factor\], \[headroom\]"),
        ("constant,1,2", "must hold zero"),
        ("snr,-1", "positive clips"),
        ("", "unknown calibration"),
    ],
)
def test_a_bad_string_raises_when_the_description_is_made(text, message):
    with pytest.raises(ValueError, match=message):
        Quantizer("int8", calibration=text)


@pytest.mark.usefixtures("registries")
def test_a_user_registers_a_calibration():
    register_calibration("test_half", lambda: AbsMax(0.5), replace=True)
    assert "test_half" in calibrations()
    np.testing.assert_allclose(measure("test_half")["absmax"], [[np.abs(X).max() / 2]])
    with pytest.raises(ValueError, match="replace=True"):
        register_calibration("absmax", AbsMax)
    with pytest.raises(ValueError, match="no comma"):
        register_calibration("a,b", AbsMax)
