"""Remembered ranges: pure, explicit, combined across devices and microbatches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from octavo import Quantizer
from octavo.calibration import AmaxHistory, Ema, RunningMean

SERIES = np.random.default_rng(0).uniform(1, 3, size=(7, 2, 1)).astype(np.float32)
ABSMAX = {"absmax": jnp.zeros((2, 1))}


def feed(tracker, series, like=ABSMAX):
    state = tracker.init(like)
    for value in series:
        state = tracker.update(state, {"absmax": jnp.asarray(value)})
    return state


def test_running_mean_keeps_count_and_sums():
    state = feed(RunningMean(), SERIES)
    assert set(state) == {"count", "sum_of_absmax"}
    assert state["count"].dtype == jnp.int32
    np.testing.assert_allclose(RunningMean().read(state)["absmax"], SERIES.mean(0), rtol=1e-6)


def test_running_mean_of_a_range():
    tracker, bounds = RunningMean(), {"min": jnp.asarray([-1.0]), "max": jnp.asarray([3.0])}
    state = tracker.update(tracker.update(tracker.init(bounds), bounds), {k: 2 * v for k, v in bounds.items()})
    assert set(state) == {"count", "sum_of_min", "sum_of_max"}
    read = tracker.read(state)
    assert (read["min"].tolist(), read["max"].tolist()) == ([-1.5], [4.5])


def test_ema_has_no_bias_at_the_start():
    tracker = Ema(decay=0.9)
    np.testing.assert_allclose(tracker.read(feed(tracker, SERIES[:1]))["absmax"], SERIES[0], rtol=1e-6)
    weights = 0.9 ** np.arange(7)[::-1]
    want = (SERIES * weights[:, None, None]).sum(0) / weights.sum()
    np.testing.assert_allclose(tracker.read(feed(tracker, SERIES))["absmax"], want, rtol=1e-5)


def test_amax_history_rolls_and_forgets():
    tracker = AmaxHistory(length=3)
    state = feed(tracker, SERIES)
    np.testing.assert_array_equal(state["amax_history"], SERIES[:3:-1])
    np.testing.assert_array_equal(tracker.read(state)["absmax"], SERIES[4:].max(0))
    recent = AmaxHistory(length=3, most_recent=True)
    np.testing.assert_array_equal(recent.read(state)["absmax"], SERIES[-1])


def test_an_initial_range_is_read_until_something_is_measured_and_never_the_present_one():
    tracker, current = AmaxHistory(length=3, initial=8.0), {"absmax": jnp.full((2, 1), 5.0)}
    state = tracker.init(ABSMAX)
    np.testing.assert_array_equal(tracker.read(state)["absmax"], 8.0)
    np.testing.assert_array_equal(jax.jit(tracker.read)(state, current)["absmax"], 8.0)
    np.testing.assert_array_equal(tracker.read(feed(tracker, SERIES[:1]), current)["absmax"], SERIES[0])


@pytest.mark.parametrize("tracker", [RunningMean(), Ema(), AmaxHistory(length=4)])
def test_reading_before_measuring_is_an_error_and_never_a_silent_scale(tracker):
    state = tracker.init(ABSMAX)
    with pytest.raises(ValueError, match="run a calibration step first"):
        tracker.read(state)
    assert np.isnan(jax.jit(tracker.read)(state)["absmax"]).all()
    current = {"absmax": jnp.full((2, 1), 5.0)}
    np.testing.assert_array_equal(tracker.read(state, current)["absmax"], 5.0)
    after = tracker.update(state, {"absmax": jnp.ones((2, 1))})
    np.testing.assert_allclose(tracker.read(after, current)["absmax"], 1.0, rtol=1e-6)


@pytest.mark.parametrize("tracker", [Ema(), AmaxHistory(length=4)])
def test_microbatches_combine_by_maximum(tracker):
    merged = tracker.merge(feed(tracker, SERIES[:1]), feed(tracker, SERIES[1:2]))
    want = feed(tracker, [SERIES[:2].max(0)])
    np.testing.assert_allclose(tracker.read(merged)["absmax"], tracker.read(want)["absmax"], rtol=1e-6)


def test_running_means_of_microbatches_add_up():
    tracker = RunningMean()
    merged = tracker.merge(feed(tracker, SERIES[:3]), feed(tracker, SERIES[3:]))
    np.testing.assert_allclose(tracker.read(merged)["absmax"], SERIES.mean(0), rtol=1e-6)


@pytest.mark.parametrize(
    ("tracker", "over_devices"), [(RunningMean(), np.mean), (Ema(), np.max), (AmaxHistory(length=2), np.max)]
)
def test_devices_agree_after_sync(tracker, over_devices):
    mesh = jax.make_mesh((8,), ("data",))
    local = np.random.default_rng(1).uniform(1, 2, (8, 1)).astype(np.float32)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P())
    def step(x):
        state = tracker.update(tracker.init({"absmax": x}), {"absmax": x})
        return tracker.read(tracker.sync(state, "data"), {"absmax": jax.lax.pmax(x, "data")})["absmax"]

    spread = jax.device_put(local, jax.NamedSharding(mesh, P("data")))
    np.testing.assert_allclose(step(spread)[0], over_devices(local, axis=0), rtol=1e-6)


def test_states_are_pytrees_that_scan():
    tracker = AmaxHistory(length=3)
    state, _ = jax.lax.scan(lambda s, v: (tracker.update(s, {"absmax": v}), None), tracker.init(ABSMAX), SERIES)
    np.testing.assert_array_equal(state["amax_history"], feed(tracker, SERIES)["amax_history"])


def test_static_bounds_quantize():
    how = Quantizer("int8", channelwise_axes=(0,))
    x = jnp.asarray(np.random.default_rng(2).normal(size=(2, 50)), jnp.float32)
    tracker = RunningMean()
    state = tracker.update(tracker.init(how.measure(x)), how.measure(x))
    np.testing.assert_array_equal(how.quantize(x, bounds=tracker.read(state)).qvalue, how.quantize(x).qvalue)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ema(decay=1.0), "below 1"),
        (lambda: AmaxHistory(length=0), "at least one step"),
        (lambda: AmaxHistory(initial=0.0), "positive number"),
        (lambda: AmaxHistory().init({"min": jnp.zeros(1), "max": jnp.ones(1)}), "symmetric"),
    ],
)
def test_bad_trackers_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()
