"""The contract: every registered format x granularity x input dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import Quantizer, formats
from octavo.numerics import BlockFormat
from tests.reference import quantize_dequantize

SHAPE = (6, 80)
FORMATS = sorted(formats())
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
GRANULARITIES = {
    "tensor": {},
    "row": {"channelwise_axes": (0,)},
    "column": {"channelwise_axes": (-1,)},
    "tile": {"channelwise_axes": (0,), "tiled_axes": {1: 16}},
    "square": {"tiled_axes": {0: 2, 1: 40}},
    "padded": {"channelwise_axes": (0,), "tiled_axes": {1: 32}},
    "fraction": {"channelwise_axes": (0,), "tiled_axes": {1: 1 / 4}},
}
BLOCK_GRANULARITIES = {
    "row": {},
    "column": {"tiled_axes": {0: None}},
    "square": {"tiled_axes": {0: None, 1: None}},
}
CASES = [
    (name, granularity)
    for name in FORMATS
    for granularity in (BLOCK_GRANULARITIES if formats()[name].tile else GRANULARITIES)
]
every = pytest.mark.parametrize(("name", "granularity"), CASES)
dtypes = pytest.mark.parametrize("dtype", DTYPES)
# The nearest-value test runs over everything; what is not about values is tested where groups differ in kind.
SOME = [(n, g) for n, g in CASES if g in ("tensor", "padded") or (formats()[n].tile and g in ("row", "square"))]
cases = pytest.mark.parametrize(("name", "granularity"), SOME)
few = pytest.mark.parametrize(
    ("name", "granularity", "dtype"),
    [(n, g, d) for n, g in SOME for d in DTYPES if d == "float32" or g in ("tensor", "row")],
)
# One format of each kind, where every kind behaves as its class does.
KIND_OF = ["int8", "int4", "int1", "uint8", "float8_e4m3fn", "float4_e2m1fn", "float6_e2m3fn", "nf4", "mxint8", "nvfp4"]


@functools.cache
def quantizer(name, granularity, **how):
    fmt = formats()[name]
    grain = dict((BLOCK_GRANULARITIES if fmt.tile else GRANULARITIES)[granularity])
    if fmt.tile and "tiled_axes" in grain:
        grain["tiled_axes"] = dict.fromkeys(grain["tiled_axes"], fmt.tile)
    how.setdefault("calibration", "absmax" if fmt.signed else "minmax")
    return Quantizer(name, **grain, **how)


@functools.cache
def compiled(how):
    return jax.jit(how.quantize), jax.jit(lambda q: q.dequantize())


@functools.cache
def compiled_round_trip(how):
    return jax.jit(lambda x: how.quantize(x).dequantize())


def round_trip(how, x):
    return np.asarray(compiled_round_trip(how)(x), np.float64)


def data(seed, dtype="float32", kind="normal"):
    rng = np.random.default_rng(seed)
    x = {
        "normal": lambda: rng.normal(size=SHAPE),
        "heavy": lambda: rng.standard_t(2, size=SHAPE),
        "positive": lambda: rng.uniform(0, 1, size=SHAPE),
        "sparse": lambda: rng.normal(size=SHAPE) * (rng.uniform(size=SHAPE) < 0.1),
        "steps": lambda: rng.integers(-8, 8, size=SHAPE).astype(float),
    }[kind]()
    return jnp.asarray(x, DTYPES[dtype])


KINDS = st.sampled_from(["normal", "heavy", "positive", "sparse", "steps"])


@pytest.mark.sampled(132)
@every
@dtypes
@settings(max_examples=5)
@given(seed=st.integers(0, 1000), kind=KINDS)
def test_values_are_the_nearest_representable_ones(name, granularity, dtype, seed, kind):
    how = quantizer(name, granularity)
    x = data(seed, dtype, kind)
    got = round_trip(how, x)
    stored = "bfloat16" if dtype == "bfloat16" else "float32"
    sizes = how.tiles(SHAPE).sizes
    want, scale = quantize_dequantize(x, how.qtype, sizes, scale_dtype=stored, asymmetric=not formats()[name].signed)
    exact = np.asarray(x, np.float64)
    # A value may fall on the other side of a midpoint by float32's rounding of the division; then both are as near.
    slack = 2.0**-20 * (np.abs(exact) + np.abs(want)) + 2.0**-18 * scale
    # The dequantized value is rounded to the input's dtype once.
    slack += {"float32": 0, "bfloat16": 2.0**-8, "float16": 2.0**-10}[dtype] * np.abs(want)
    np.testing.assert_array_less(np.abs(got - exact) - np.abs(want - exact), slack + 1e-37)


@pytest.mark.sampled(28)
@every
def test_a_power_of_two_changes_no_code(name, granularity):
    how = quantizer(name, granularity)
    x = data(7)
    quantize, _ = compiled(how)
    codes = np.asarray(quantize(x).qvalue)
    for power in (-99, -60, 60, 99):  # 1.6e-30 to 6.3e29
        np.testing.assert_array_equal(quantize(x * 2.0**power).qvalue, codes)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("dtype", "magnitudes"),
    [
        ("float32", [1e-30, 1e-20, 1e-5, 1e5, 1e20, 1e30]),
        ("bfloat16", [2e-36, 1e-30, 1e-5, 1e5, 1e30, 3.3e38]),
        ("float16", [6e-5, 1e-3, 1.0, 1e3, 6.5e4]),
    ],
)
def test_the_relative_error_is_kept_at_every_magnitude(name, dtype, magnitudes):
    how = quantizer(name, "row")
    # The largest magnitude is reached on both sides, so that the whole range of the dtype is used.
    x = np.random.default_rng(3).uniform(-1, 1, SHAPE)
    x[:, 0], x[:, 1] = 1.0, -1.0

    def error(magnitude):
        exact = np.asarray((x * magnitude).astype(DTYPES[dtype]), np.float64)
        got = round_trip(how, jnp.asarray(exact, DTYPES[dtype]))
        assert np.isfinite(got).all()
        return np.sqrt(np.mean((got / magnitude - exact / magnitude) ** 2))

    reference = error(1.0 if dtype != "float16" else 16.0)
    for magnitude in magnitudes:
        # A power-of-two scale is up to twice the ideal one, so the error varies by up to two between magnitudes.
        limit = 2.05 if isinstance(how.qtype, BlockFormat) else 1.05
        floor = {"float32": 3e-7, "bfloat16": 2e-3, "float16": 3e-4}[dtype]
        assert error(magnitude) <= limit * reference + floor, magnitude


@pytest.mark.sampled(28)
@few
def test_zeros_stay_zero(name, granularity, dtype):
    how = quantizer(name, granularity)
    np.testing.assert_array_equal(round_trip(how, jnp.zeros(SHAPE, DTYPES[dtype])), 0)
    x = data(5, dtype).at[2].set(0)
    if granularity in ("row", "padded"):
        np.testing.assert_array_equal(round_trip(how, x)[2], 0)


@pytest.mark.sampled(44)
@cases
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_non_finite_value_shows_and_stays_in_its_group(name, granularity, bad):
    how = quantizer(name, granularity)
    x = data(6)
    poisoned = x.at[3, 20].set(bad)
    got = round_trip(how, poisoned)
    assert not np.isfinite(got[3, 20])
    sizes = how.tiles(SHAPE).sizes
    group = tuple(slice(i // s * s, i // s * s + s) for i, s in zip((3, 20), sizes, strict=True))
    # Nothing in the group is a number that happens to be finite but wrong, and nothing outside has changed.
    outside = np.ones(SHAPE, bool)
    outside[group] = False
    if not (isinstance(how.qtype, BlockFormat) and how.qtype.outer):
        np.testing.assert_array_equal(got[outside], round_trip(how, x)[outside])
    assert np.isfinite(got[outside]).all()


@pytest.mark.sampled(84)
@pytest.mark.parametrize("name", KIND_OF)
@pytest.mark.parametrize(
    "method", ["fixed", "constant,3", "percentile,99", "mse,5", "snr", "rms,3", "absmean", "given"]
)
def test_a_non_finite_value_shows_under_every_calibration(name, method):
    given = method == "given"
    if given:
        how = quantizer(name, "row")
    elif formats()[name].signed:
        how = quantizer(name, "row", calibration="fixed,3" if method == "fixed" else method)
    else:
        how = quantizer(name, "row", calibration="fixed,-1,3")
    x = data(6)
    bounds = how.measure(x) if given else None
    for bad in (np.inf, np.nan):
        got = np.asarray(how.quantize(x.at[3, 20].set(bad), bounds=bounds).dequantize())
        assert not np.isfinite(got[3, 20])


@cases
@pytest.mark.sampled(8)
def test_a_second_quantization_with_the_same_bounds_changes_nothing(name, granularity):
    how = quantizer(name, granularity)
    x = data(8)

    @jax.jit
    def twice(x):
        q = how.quantize(x)
        return q.qvalue, how.quantize(q.dequantize(), bounds=how.measure(x)).qvalue

    np.testing.assert_array_equal(*twice(x))


@cases
@pytest.mark.sampled(8)
def test_negation_negates(name, granularity):
    how = quantizer(name, granularity)
    fmt = how.qtype
    grid = fmt.grid()
    x = data(9)
    quantize, _ = compiled(how)
    codes, opposite = (np.asarray(fmt.decode(quantize(v).qvalue))[: SHAPE[0], : SHAPE[1]] for v in (x, -x))
    if not np.array_equal(grid, -grid[::-1]) and not np.array_equal(grid[1:], -grid[:0:-1]):
        # A lopsided grid (nf4, unsigned) has no mirror image, but errs as little on both sides.
        error, other = (np.abs(round_trip(how, v) - np.asarray(v)).mean() for v in (x, -x))
        assert other <= 1.2 * error
        return
    # The one exception is the lowest code of an integer type, which has no counterpart: -128.
    ends = ((codes == fmt.smallest) | (opposite == fmt.smallest)) & (fmt.smallest != -fmt.largest)
    np.testing.assert_array_equal(codes[~ends], -opposite[~ends])
    assert np.all(np.abs(codes + opposite)[ends] <= 1)


@pytest.mark.sampled(28)
@few
def test_jit_equals_eager(name, granularity, dtype):
    how = quantizer(name, granularity)
    x = data(10, dtype)
    eager, jitted = how.quantize(x), compiled(how)[0](x)
    jax.tree.map(np.testing.assert_array_equal, eager, jitted)
    np.testing.assert_array_equal(eager.dequantize(), compiled(how)[1](jitted))
    assert eager.dtype == eager.dequantize().dtype == DTYPES[dtype]
    assert eager.shape == SHAPE


@pytest.mark.sampled(28)
@cases
def test_vmap_equals_a_loop(name, granularity):
    how = quantizer(name, granularity)
    batch = jnp.stack([data(i) for i in range(3)])
    quantize, dequantize = compiled(how)
    mapped = jax.jit(jax.vmap(how.quantize))(batch)
    assert mapped.shape == (3, *SHAPE)
    values = jax.jit(jax.vmap(lambda q: q.dequantize()))(mapped)
    for i in range(3):
        one = quantize(batch[i])
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, i=i: x[i], mapped), one)
        np.testing.assert_array_equal(values[i], dequantize(one))


@cases
@pytest.mark.sampled(8)
def test_packing_is_exact_and_small(name, granularity):
    q = compiled(quantizer(name, granularity))[0](data(11))
    packed, back, values = jax.jit(lambda q: (q.pack(), q.pack().unpack(), q.pack().dequantize()))(q)
    np.testing.assert_array_equal(values, jax.jit(lambda q: q.dequantize())(q))
    jax.tree.map(np.testing.assert_array_equal, back, q)
    bits = q.qtype.bits
    assert packed.qvalue.nbytes == q.qvalue.size * bits / 8
    assert packed.shape == q.shape


@pytest.mark.parametrize(
    ("name", "dtype", "bits"),
    [(n, "float32", 24) for n in FORMATS] + [(n, d, b) for n in KIND_OF for d, b in [("float32", 8), ("bfloat16", 24)]],
)
@pytest.mark.sampled(8)
def test_stochastic_rounding_has_no_bias_end_to_end(name, dtype, bits):
    how = quantizer(name, "row", rounding=f"stochastic,{bits}")
    x = jnp.asarray(np.random.default_rng(4).uniform(-1, 1, (3, 32)), DTYPES[dtype])
    draws = 4000
    keys = jax.random.split(jax.random.key(0), draws)
    # Values are averaged in float32: rounding them to the input's dtype is not what is tested.
    one = jax.jit(jax.vmap(lambda key: how.quantize(x, key=key).dequantize(jnp.float32)))
    got = np.asarray(one(keys), np.float64)
    error = np.abs(got.mean(axis=0) - np.asarray(x, np.float64))
    # The steps of the grid that each value lies between, in units of the value.
    q = how.quantize(x, key=keys[0])
    scale = np.asarray(q.scale, np.float64) * (1.0 if q.outer_scale is None else np.asarray(q.outer_scale))
    scale = np.repeat(scale, 32 // scale.shape[1], axis=1)
    zero_point = 0.0 if q.zero_point is None else np.asarray(q.zero_point, np.float64)
    grid, code = how.qtype.grid(), np.asarray(x, np.float64) / scale + zero_point
    above = np.clip(np.searchsorted(grid, code), 1, len(grid) - 1)
    step, fraction = grid[above] - grid[above - 1], (code - grid[above - 1]) / (grid[above] - grid[above - 1])
    assert np.all((fraction > -1e-4) & (fraction < 1 + 1e-4))  # nothing saturates, so nothing is biased
    spread = np.sqrt(np.maximum(fraction * (1 - fraction), 0) / draws) + 1 / draws
    assert np.all(error <= step * scale * (5 * spread + (bits == 8) / 512) + 1e-6)
