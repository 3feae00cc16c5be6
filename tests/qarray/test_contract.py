"""The contract of every registered format and granularity.

One compiled program per case quantizes a stack of inputs (random, negated, scaled by powers of two, zero, not finite)
and gives codes, scales, values and packed bytes; NumPy checks all properties on its results.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo import Quantizer, formats
from octavo.numerics import BlockFormat
from tests.cases import slow_except
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
# One format of each kind, where every kind behaves as its class does.
KIND_OF = ["int8", "int4", "int1", "uint8", "float8_e4m3fn", "float4_e2m1fn", "float6_e2m3fn", "nf4", "mxint8", "nvfp4"]


def thorough(name):
    """The groups with which everything is checked."""
    return ("square", "row") if formats()[name].tile else ("tensor", "padded")


MAGNITUDES = {
    "float32": [1.0, 1e-30, 1e-20, 1e-5, 1e5, 1e20, 1e30],
    "bfloat16": [1.0, 2e-36, 1e-30, 1e-5, 1e5, 1e30, 3.3e38],
    "float16": [16.0, 6e-5, 1e-3, 1.0, 1e3, 6.5e4],
}
POWERS = (-99, -60, 60, 99)  # 1.6e-30 to 6.3e29
NOT_FINITE = (np.inf, -np.inf, np.nan)


@functools.cache
def quantizer(name, granularity, **options):
    fmt = formats()[name]
    grain = dict((BLOCK_GRANULARITIES if fmt.tile else GRANULARITIES)[granularity])
    if fmt.tile and "tiled_axes" in grain:
        grain["tiled_axes"] = dict.fromkeys(grain["tiled_axes"], fmt.tile)
    options.setdefault("calibration", "absmax" if fmt.signed else "minmax")
    return Quantizer(name, **grain, **options)


def normal(seed):
    return np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)


@functools.cache
def inputs(dtype):
    """All inputs of a program by name, as one array of the dtype for each."""
    rng = np.random.default_rng(0)
    distributions = {
        "normal": rng.normal(size=SHAPE),
        "heavy": rng.standard_t(2, size=SHAPE),
        "positive": rng.uniform(0, 1, size=SHAPE),
        "sparse": rng.normal(size=SHAPE) * (rng.uniform(size=SHAPE) < 0.1),
        "steps": rng.integers(-8, 8, size=SHAPE).astype(float),
    }
    x = normal(6)
    arrays = {**distributions, "x": x, "-x": -x, "zeros": np.zeros(SHAPE), "zero row": x.copy()}
    arrays["zero row"][2] = 0
    # The largest magnitude is reached on both sides, so that the whole range of the dtype is used.
    even = np.random.default_rng(3).uniform(-1, 1, SHAPE)
    even[:, 0], even[:, 1] = 1.0, -1.0
    arrays |= {f"magnitude {m}": even * m for m in MAGNITUDES[dtype]}
    if dtype == "float32":
        arrays |= {f"2**{p}": x * np.float32(2.0**p) for p in POWERS}
        for bad in NOT_FINITE:
            arrays[str(bad)] = x.copy()
            arrays[str(bad)][3, 20] = bad
    return {name: np.asarray(value).astype(DTYPES[dtype]) for name, value in arrays.items()}


def program(quantizer, thorough):
    """What the checks look at, of one input."""

    def run(x):
        q = quantizer.quantize(x)
        values = q.dequantize()
        if not thorough:
            return {"codes": q.qvalue, "values": values}
        packed = q.pack()
        again = quantizer.quantize(values, bounds=quantizer.measure(x))
        return {
            "codes": q.qvalue,
            "numbers": q.qtype.decode(q.qvalue),
            "values": values,
            "packed": packed.qvalue,
            "unpacked": packed.unpack().qvalue,
            "packed values": packed.dequantize(),
            "again": again.qvalue,
        }

    return run


def check_values_are_the_nearest_representable_ones(quantizer, dtype, x, found):
    stored = "bfloat16" if dtype == "bfloat16" else "float32"
    sizes = quantizer.tiles(SHAPE).sizes
    fmt = quantizer.qtype
    want, scale = quantize_dequantize(x, fmt, sizes, scale_dtype=stored, asymmetric=not fmt.signed)
    exact = np.asarray(x, np.float64)
    # A value may fall on the other side of a midpoint by float32's rounding of the division; then both are as near.
    slack = 2.0**-20 * (np.abs(exact) + np.abs(want)) + 2.0**-18 * scale
    # The dequantized value is rounded to the input's dtype once.
    slack += {"float32": 0, "bfloat16": 2.0**-8, "float16": 2.0**-10}[dtype] * np.abs(want)
    got = np.asarray(found["values"], np.float64)
    np.testing.assert_array_less(np.abs(got - exact) - np.abs(want - exact), slack + 1e-37)


def check_zeros_stay_zero(granularity, found):
    np.testing.assert_array_equal(np.asarray(found["zeros"]["values"], np.float32), 0)
    if granularity in ("row", "padded"):
        np.testing.assert_array_equal(np.asarray(found["zero row"]["values"], np.float32)[2], 0)


def check_the_relative_error_is_kept_at_every_magnitude(quantizer, dtype, arrays, found):
    def error(magnitude):
        name = f"magnitude {magnitude}"
        got = np.asarray(found[name]["values"], np.float64)
        assert np.isfinite(got).all()
        return np.sqrt(np.mean((got / magnitude - np.asarray(arrays[name], np.float64) / magnitude) ** 2))

    reference, *others = map(error, MAGNITUDES[dtype])
    # A power-of-two scale is up to twice the ideal one, so the error varies by up to two between magnitudes.
    limit = 2.05 if isinstance(quantizer.qtype, BlockFormat) else 1.05
    floor = {"float32": 3e-7, "bfloat16": 2e-3, "float16": 3e-4}[dtype]
    assert max(others) <= limit * reference + floor


def check_packing_is_exact_and_small(quantizer, found):
    for one in found.values():
        np.testing.assert_array_equal(one["packed values"], one["values"])
        assert one["unpacked"].dtype == one["codes"].dtype
        assert one["unpacked"].tobytes() == one["codes"].tobytes()  # NaN included
        assert one["packed"].nbytes == one["codes"].size * quantizer.qtype.bits / 8


def check_a_second_quantization_with_the_same_bounds_changes_nothing(found):
    np.testing.assert_array_equal(found["x"]["again"], found["x"]["codes"])


def check_a_power_of_two_changes_no_code(found):
    for power in POWERS:
        np.testing.assert_array_equal(found[f"2**{power}"]["codes"], found["x"]["codes"])


def check_a_non_finite_value_shows_and_stays_in_its_group(quantizer, found):
    sizes = quantizer.tiles(SHAPE).sizes
    group = tuple(slice(i // s * s, i // s * s + s) for i, s in zip((3, 20), sizes, strict=True))
    outside = np.ones(SHAPE, bool)
    outside[group] = False
    for bad in NOT_FINITE:
        got = found[str(bad)]["values"]
        assert not np.isfinite(got[3, 20])
        # Nothing in the group is a number that happens to be finite but wrong, and nothing outside has changed.
        if not (isinstance(quantizer.qtype, BlockFormat) and quantizer.qtype.outer):
            np.testing.assert_array_equal(got[outside], found["x"]["values"][outside])
        assert np.isfinite(got[outside]).all()


def check_negation_negates(quantizer, arrays, found):
    fmt = quantizer.qtype
    grid = fmt.grid()
    numbers, opposite = (found[name]["numbers"][: SHAPE[0], : SHAPE[1]] for name in ("x", "-x"))
    if not np.array_equal(grid, -grid[::-1]) and not np.array_equal(grid[1:], -grid[:0:-1]):
        # A lopsided grid (nf4, unsigned) has no mirror image, but errs as little on both sides.
        error, other = (np.abs(found[name]["values"] - arrays[name]).mean() for name in ("x", "-x"))
        assert other <= 1.2 * error
        return
    # The one exception is the lowest code of an integer type, which has no counterpart: -128.
    ends = ((numbers == fmt.smallest) | (opposite == fmt.smallest)) & (fmt.smallest != -fmt.largest)
    np.testing.assert_array_equal(numbers[~ends], -opposite[~ends])
    assert np.all(np.abs(numbers + opposite)[ends] <= 1)


def check_contract(name, granularity, dtype):
    how, arrays = quantizer(name, granularity), inputs(dtype)
    # What is not about values is checked for two kinds of groups.
    is_thorough = dtype == "float32" and granularity in thorough(name)
    stacked = jax.device_get(jax.jit(jax.vmap(program(how, is_thorough)))(np.stack(list(arrays.values()))))
    found = {name: {k: v[i] for k, v in stacked.items()} for i, name in enumerate(arrays)}
    assert stacked["values"].shape[1:] == SHAPE
    assert stacked["values"].dtype == DTYPES[dtype]
    for kind in ("normal", "heavy", "positive", "sparse", "steps"):
        check_values_are_the_nearest_representable_ones(how, dtype, arrays[kind], found[kind])
    check_zeros_stay_zero(granularity, found)
    if granularity in ("row", "padded"):
        check_the_relative_error_is_kept_at_every_magnitude(how, dtype, arrays, found)
    if dtype == "float32":
        check_a_power_of_two_changes_no_code(found)
        check_a_non_finite_value_shows_and_stays_in_its_group(how, found)
    if is_thorough:
        check_packing_is_exact_and_small(how, found)
        check_a_second_quantization_with_the_same_bounds_changes_nothing(found)
        check_negation_negates(how, arrays, found)


# Groups are formed before values are rounded: every format with some kinds of groups, one of each kind with all.
@pytest.mark.parametrize(
    ("name", "granularity"),
    slow_except([(n, g) for n, g in CASES if n in KIND_OF or g == thorough(n)[-1]], CASES),
)
def test_contract(name, granularity):
    check_contract(name, granularity, "float32")


# The scale's dtype follows the input's, in the same way for all groups.
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("name", "granularity"), slow_except([(n, "row") for n in KIND_OF], [(n, "row") for n in FORMATS])
)
def test_contract_of_half_precision_inputs(name, granularity, dtype):
    check_contract(name, granularity, dtype)


@pytest.mark.parametrize(
    ("name", "granularity"),
    slow_except(
        [("int8", "tensor"), ("nvfp4", "row")],
        [(n, g) for n in KIND_OF for g in (("row", "square") if formats()[n].tile else ("tensor", "padded", "row"))],
    ),
)
def test_eager_jit_vmap_and_a_loop_give_the_same_bits(name, granularity):
    how = quantizer(name, granularity)
    quantize = lambda x: (q := how.quantize(x), q.dequantize())  # noqa: E731
    batch = jnp.stack([normal(seed) for seed in range(3)])
    jitted, mapped = jax.jit(quantize), jax.jit(jax.vmap(quantize))(batch)
    assert mapped[0].shape == (3, *SHAPE)
    for i in range(3):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, i=i: x[i], mapped), jitted(batch[i]))
    eager = quantize(batch[0])
    jax.tree.map(np.testing.assert_array_equal, eager, jitted(batch[0]))
    with jax.disable_jit():
        jax.tree.map(np.testing.assert_array_equal, quantize(batch[0]), eager)
    assert eager[0].shape == SHAPE
    assert eager[0].dtype == eager[1].dtype == jnp.float32


METHODS = ["fixed,3", "constant,3", "percentile,99", "mse,5", "snr", "rms,3", "absmean", "given"]


@pytest.mark.parametrize(
    ("name", "method"),
    slow_except(
        [*(("int8", m) for m in METHODS), ("float8_e4m3fn", "mse,5"), ("nvfp4", "given"), ("uint8", "fixed,-1,3")],
        [(n, m) for n in KIND_OF for m in (METHODS if formats()[n].signed else ["fixed,-1,3", "given"])],
    ),
)
def test_a_non_finite_value_shows_under_every_calibration(name, method):
    given = method == "given"
    how = quantizer(name, "row") if given else quantizer(name, "row", calibration=method)
    x = normal(6)

    @jax.jit
    @jax.vmap
    def values(bad):
        bounds = how.measure(jnp.asarray(x)) if given else None
        return how.quantize(jnp.asarray(x).at[3, 20].set(bad), bounds=bounds).dequantize()

    assert not np.isfinite(values(jnp.asarray([np.inf, np.nan]))[:, 3, 20]).any()


@pytest.mark.parametrize(
    ("name", "dtype", "bits"),
    slow_except(
        [*((n, "float32", 24) for n in KIND_OF), ("int8", "float32", 8), ("int8", "bfloat16", 24)],
        [(n, "float32", 24) for n in FORMATS]
        + [(n, d, b) for n in KIND_OF for d, b in [("float32", 8), ("bfloat16", 24)]],
    ),
)
def test_stochastic_rounding_has_no_bias_end_to_end(name, dtype, bits):
    how = quantizer(name, "row", rounding=f"stochastic,{bits}")
    x = jnp.asarray(np.random.default_rng(4).uniform(-1, 1, (3, 32)), DTYPES[dtype])
    draws = 4000
    keys = jax.random.split(jax.random.key(0), draws)

    # Values are averaged in float32: rounding them to the input's dtype is not what is tested.
    @jax.jit
    @jax.vmap
    def draw(key):
        q = how.quantize(x, key=key)
        return q, q.dequantize(jnp.float32)

    drawn, values = draw(keys)
    error = np.abs(np.asarray(values, np.float64).mean(axis=0) - np.asarray(x, np.float64))
    # The steps of the grid that each value lies between, in units of the value.
    q = jax.tree.map(lambda x: np.asarray(x[0], np.float64), (drawn.scale, drawn.outer_scale, drawn.zero_point))
    scale, outer, zero_point = q
    scale = scale * (1.0 if outer is None else outer)
    scale = np.repeat(scale, 32 // scale.shape[1], axis=1)
    grid, code = how.qtype.grid(), np.asarray(x, np.float64) / scale + (0.0 if zero_point is None else zero_point)
    above = np.clip(np.searchsorted(grid, code), 1, len(grid) - 1)
    step, fraction = grid[above] - grid[above - 1], (code - grid[above - 1]) / (grid[above] - grid[above - 1])
    assert np.all((fraction > -1e-4) & (fraction < 1 + 1e-4))  # nothing saturates, so nothing is biased
    spread = np.sqrt(np.maximum(fraction * (1 - fraction), 0) / draws) + 1 / draws
    assert np.all(error <= step * scale * (5 * spread + (bits == 8) / 512) + 1e-6)
