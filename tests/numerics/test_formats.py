"""Every registered format does what it states: its grid, its rounding, its ends."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo._config import Config
from octavo.numerics import (
    BlockFormat,
    FloatFormat,
    Format,
    IntFormat,
    TableFormat,
    formats,
    get_format,
    register_format,
)
from tests.reference import nearest

ALL = sorted(formats())
NATIVE = [n for n, f in formats().items() if isinstance(f, FloatFormat) and f.dtype]


def near_grid(fmt: Format, rng) -> np.ndarray:
    """Values on the grid, between, at the midpoints and beyond the ends."""
    grid = fmt.grid() if fmt.bits <= 8 else rng.choice(fmt.grid(), 400)
    grid = np.sort(grid)
    middle = (grid[1:] + grid[:-1]) / 2
    inside = rng.uniform(grid[0], grid[-1], 200)
    return np.asarray(np.concatenate([grid, middle, inside, 3 * inside]), np.float32)


@pytest.mark.parametrize("name", ALL)
def test_representable_values_are_kept(name):
    fmt = formats()[name]
    grid = jnp.asarray(fmt.grid(), jnp.float32)
    noise = jnp.asarray([0.0, 0.5, 1 - 2.0**-24])
    stochastic = jax.vmap(lambda noise: fmt.round(grid, jnp.full_like(grid, noise)))
    nearest, drawn, codes = jax.jit(lambda: (fmt.round(grid), stochastic(noise), fmt.encode(grid)))()
    for values in (nearest, *drawn):
        np.testing.assert_array_equal(values, grid)
    assert codes.dtype == fmt.storage
    assert grid[-1] == fmt.largest
    assert grid[0] == fmt.smallest


@pytest.mark.parametrize("name", ALL)
def test_rounds_to_nearest_and_saturates(name):
    fmt = formats()[name]
    x = near_grid(fmt, np.random.default_rng(1))
    beyond = np.asarray([3.0, -3.0], np.float32) * max(fmt.largest, -fmt.smallest)
    got = np.asarray(jax.jit(fmt.round)(np.concatenate([x, beyond])), np.float64)
    np.testing.assert_array_equal(got[-2:], [fmt.largest, fmt.smallest])
    want = nearest(fmt.grid(), np.asarray(x, np.float64))
    # On a tie both neighbours are nearest, so distances are compared.
    np.testing.assert_array_equal(np.abs(got[:-2] - x), np.abs(want - x))


@pytest.mark.parametrize("name", NATIVE)
@given(exponent=st.integers(-20, 20), seed=st.integers(0, 2**31))
def test_native_floats_round_like_ml_dtypes(name, exponent, seed):
    fmt = formats()[name]
    x = np.random.default_rng(seed).normal(size=500).astype(np.float32) * np.float32(2.0**exponent)
    x = np.concatenate([x, near_grid(fmt, np.random.default_rng(seed))])
    want = np.clip(x, -fmt.largest, fmt.largest).astype(getattr(ml_dtypes, name)).astype(np.float32)
    np.testing.assert_array_equal(fmt.round(jnp.asarray(x)), want)


@pytest.mark.parametrize("name", NATIVE)
def test_emulated_floats_agree_with_native_ones_bit_for_bit(name):
    fmt = formats()[name]
    emulated = fmt.replace(dtype=None)
    x = jnp.asarray(near_grid(fmt, np.random.default_rng(2)))
    run = lambda x: [(f.round(x), f.encode(x)) for f in (emulated, fmt)]  # noqa: E731
    (values, codes), (native_values, native_codes) = jax.jit(run)(x)
    np.testing.assert_array_equal(values, native_values)
    if fmt.specials != "fnuz":
        np.testing.assert_array_equal(codes, np.asarray(native_codes).view(np.uint8))


@pytest.mark.parametrize("name", ["float6_e2m3fn", "float6_e3m2fn"])
def test_float6_has_the_bit_patterns_of_ml_dtypes(name):
    fmt = get_format(name)
    x = near_grid(fmt, np.random.default_rng(3))
    want = np.clip(x, -fmt.largest, fmt.largest).astype(getattr(ml_dtypes, name)).view(np.uint8)
    np.testing.assert_array_equal(jax.jit(fmt.encode)(x), want)


@pytest.mark.parametrize(("exponent", "mantissa"), [(1, 2), (2, 0), (3, 1), (4, 2), (5, 4), (6, 3), (5, 10), (7, 0)])
def test_small_floats_of_any_width(exponent, mantissa):
    fmt = get_format(f"e{exponent}m{mantissa}")
    assert fmt.bits == 1 + exponent + mantissa
    assert len(fmt.grid()) == 2**fmt.bits - 1
    x = jnp.asarray(near_grid(fmt, np.random.default_rng(4)))
    got, want = np.asarray(jax.jit(fmt.round)(x), np.float64), nearest(fmt.grid(), np.asarray(x, np.float64))
    np.testing.assert_array_equal(np.abs(got - x), np.abs(want - x))


@pytest.mark.parametrize("name", ["int8", "int4", "float8_e4m3fn", "float6_e3m2fn", "e4m1", "mxint8"])
def test_ties_go_to_even(name):
    fmt = get_format(name)
    grid = fmt.grid()
    middle = np.asarray((grid[1:] + grid[:-1]) / 2, np.float32)
    codes = jax.jit(lambda x: fmt.to_bits(fmt.encode(x)))(middle)
    assert not np.any(np.asarray(codes) & 1)


def test_aqt_bucket_conventions():
    bounds = {
        (p, m): [IntFormat(bits=b, preserve_zero=p, preserve_max=m).bound for b in (8, 4, 2)]
        for p in (True, False)
        for m in (True, False)
    }
    assert bounds[True, False] == [127.5, 7.5, 1.5]
    assert bounds[True, True] == [127, 7, 1]
    assert bounds[False, False] == [128, 8, 2]
    assert bounds[False, True] == [127.5, 7.5, 1.5]
    assert IntFormat(bits=1, preserve_zero=False).bound == 1.0
    assert IntFormat(bits=1, preserve_zero=False, preserve_max=True).bound == 0.5


def test_binary_and_ternary_mean_what_the_papers_mean():
    assert get_format("binary").grid().tolist() == [-1, 1]
    assert get_format("ternary").grid().tolist() == [-1, 0, 1]
    assert get_format("int1").grid().tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("name", ALL)
def test_carrier_holds_every_value_exactly(name):
    fmt = formats()[name]
    np.testing.assert_array_equal(fmt.grid().astype(fmt.carrier).astype(np.float64), fmt.grid())


def test_names_and_dtypes_are_accepted():
    assert get_format(jnp.int8) is get_format("int8") is get_format(np.dtype("int8")) is get_format("INT8 ")
    assert get_format(ml_dtypes.float8_e5m2) is get_format("fp8_e5m2")
    assert get_format("mxfp4,floor").scale_rounding == "floor"


@pytest.mark.parametrize(
    ("qtype", "message"),
    [
        ("int9", "did you mean 'int8'"),
        ("fp8_e4m4", "did you mean 'fp8_e4m3'"),
        ("float32", "not a low-precision format"),
        (jnp.float8_e8m0fnu, "it is the scale of mxfp8"),
        ("mxfp4,ceil", "scale_rounding is one of"),
        ("e9m2", "1 to 8 exponent bits"),
        (3.5, "a name or a dtype"),
    ],
)
def test_unknown_formats_raise_with_near_matches(qtype, message):
    with pytest.raises(ValueError, match=message):
        get_format(qtype)


@pytest.mark.parametrize("name", ALL)
def test_formats_print_as_code_and_round_trip_through_json(name):
    fmt = formats()[name]
    scope = {c.__name__: c for c in (IntFormat, FloatFormat, TableFormat, BlockFormat)}
    assert eval(repr(fmt), scope) == fmt
    assert Config.from_json(fmt.to_json()) == fmt
    assert hash(fmt) == hash(Config.from_json(fmt.to_json()))
    assert fmt.overflow == "saturate"


@pytest.mark.usefixtures("registries")
def test_a_user_registers_a_format():
    fmt = TableFormat(name="test_table", values=(-2.0, -0.5, 0.0, 1.0))
    register_format(fmt, aliases=("test_alias",), replace=True)
    assert get_format("test_alias") is fmt
    with pytest.raises(ValueError, match="replace=True"):
        register_format(fmt)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IntFormat(bits=1), "preserve_zero=False"),
        (lambda: IntFormat(bits=17), "to 16 bits"),
        (lambda: IntFormat(bits=4, signed=False, narrow=True), "no narrow range"),
        (lambda: FloatFormat(exponent_bits=3, mantissa_bits=2, specials="nan"), "specials is one of"),
        (lambda: FloatFormat(exponent_bits=8, mantissa_bits=7), "beyond float32"),
        (lambda: TableFormat(name="t", values=(1.0, 0.0)), "ascending order"),
        (lambda: TableFormat(name="t", values=(0.0, float("inf"))), "not finite"),
        (lambda: BlockFormat(name="b", element=get_format("mxfp4")), "block format itself"),
        (lambda: BlockFormat(name="b", element=get_format("fp4"), tile=1), "at least 2"),
        (
            lambda: BlockFormat(name="b", element=get_format("fp4"), scale_dtype="bfloat16", scale_rounding="floor"),
            "OCP rule",
        ),
    ],
)
def test_impossible_formats_cannot_be_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()
