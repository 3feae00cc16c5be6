"""The kernels against float64, in every instruction set that this machine has."""

import functools
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from octavo import kernels
from octavo.numerics import get_format
from tests.cases import slow_except

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.status())

TABLES = {
    "int4": tuple(map(float, (*range(8), *range(-8, 0)))),
    "nf4": tuple(map(float, get_format("nf4").grid())),
    "fp4": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
}
SCALES = (np.float32, ml_dtypes.bfloat16, np.float16)
UNIT = 2.0**-24


class Case:
    """Operands drawn from a seed, and their product in float64 with a bound on the error of a float32 sum."""

    def __init__(self, seed, *, table=None, transposed=False, rows=None, depth=None, columns=None, group=None):
        rng = np.random.default_rng(seed)
        group = group or int(rng.choice([16, 32, 64, 128, 0, 0]))
        depth = depth or (group * int(rng.integers(1, 4)) if group else int(rng.integers(1, 200)))
        rows, columns = rows or int(rng.integers(1, 18)), columns or int(rng.integers(1, 150))
        self.options = {"table": table, "transposed": transposed}
        self.x = rng.standard_normal((rows, depth)).astype(np.float32)
        scale = np.exp(rng.standard_normal((depth // group if group else 1, columns))).astype(SCALES[seed % 3])
        if table is None:
            self.codes = rng.integers(-128, 128, (depth, columns)).astype(np.int8)
            values = self.codes.astype(np.float64)
        else:
            self.codes = rng.integers(0, 256, (-(-depth // 2), columns)).astype(np.uint8)
            places = np.stack([self.codes & 15, self.codes >> 4], 1).reshape(-1, columns)[:depth]
            values = np.asarray(table, np.float32).astype(np.float64)[places]
        weight = values * np.repeat(scale.astype(np.float64), depth // len(scale), axis=0)
        self.wanted = self.x.astype(np.float64) @ weight
        self.bound = (depth + 4) * UNIT * (np.abs(self.x).astype(np.float64) @ np.abs(weight))
        self.scale = scale
        if transposed:
            self.codes, self.scale = np.ascontiguousarray(self.codes.T), np.ascontiguousarray(scale.T)

    @property
    def operands(self):
        return tuple(map(jnp.asarray, (self.x, self.codes, self.scale)))

    def run(self, **how):
        return np.asarray(kernels.matvec(*self.operands, **self.options, **how))

    def check(self, got):
        assert got.shape == self.wanted.shape
        worst = np.max(np.abs(got - self.wanted) - self.bound)
        assert worst <= 0, f"beyond the bound by {worst}, x {self.x.shape}, codes {self.codes.shape}"


@pytest.mark.parametrize("isa", kernels.versions())
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", slow_except([None, "int4"], [None, "int4", "nf4", "fp4"]))
def test_any_shape_is_within_the_rounding_of_its_sum(name, transposed, isa):
    for seed in range(4):
        case = Case(seed + 100 * len(name or ""), table=TABLES.get(name), transposed=transposed)
        case.check(case.run(isa=isa))


@pytest.mark.slow
@pytest.mark.parametrize("isa", kernels.versions())
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", [None, "int4", "nf4", "fp4"])
def test_many_shapes_are_within_the_rounding_of_their_sum(name, transposed, isa):
    for seed in range(1000, 1020):
        case = Case(seed, table=TABLES.get(name), transposed=transposed)
        case.check(case.run(isa=isa, threads=seed % 4))


def e3m4(rng, *shape):
    """Any finite numbers, subnormal ones among them."""
    codes = rng.choice([code for code in range(256) if code & 0x70 != 0x70], shape)
    return codes.astype(np.uint8).view(ml_dtypes.float8_e3m4)


@pytest.mark.parametrize("isa", kernels.versions())
@pytest.mark.parametrize("rows", [1, 5])
def test_scales_of_two_levels(isa, rows):
    case, rng = Case(3, table=TABLES["int4"], rows=rows, depth=192, columns=75, group=64), np.random.default_rng(0)
    scale, zero = e3m4(rng, 3, 75), e3m4(rng, 3, 75)
    outer = np.exp(rng.standard_normal(75)).astype(np.float32)
    wide = [np.repeat(part.astype(np.float64), 64, axis=0) for part in (scale, zero)]
    places = np.stack([case.codes & 15, case.codes >> 4], 1).reshape(-1, 75)
    weight = (np.asarray(TABLES["int4"])[places] - wide[1]) * wide[0] * outer
    case.wanted = case.x.astype(np.float64) @ weight
    size = (8 + np.abs(wide[1])) * np.abs(wide[0]) * outer
    case.bound = 200 * UNIT * (np.abs(case.x).astype(np.float64) @ size)
    levels = [jnp.asarray(part) for part in (scale, zero, outer)]
    case.check(np.asarray(kernels.matvec(*case.operands[:2], *levels, table=TABLES["int4"], isa=isa)))
    case.check(np.asarray(kernels.reference(*case.operands[:2], *levels, table=TABLES["int4"])))
    one = [*levels[:2], jnp.ones(1) / 3]
    many = [*levels[:2], jnp.ones(75) / 3]
    got = [kernels.matvec(*case.operands[:2], *parts, table=TABLES["int4"], isa=isa) for parts in (one, many)]
    np.testing.assert_array_equal(*got)
    scale[1, 7] = np.nan
    got = kernels.matvec(*case.operands[:2], jnp.asarray(scale), *levels[1:], table=TABLES["int4"], isa=isa)
    assert np.argwhere(np.isnan(got)[0]).tolist() == [[7]]


@pytest.mark.parametrize("isa", kernels.versions())
@pytest.mark.parametrize("name", [None, "int4"])
def test_zero_points_in_float32(isa, name):
    for rows in (1, 5):
        table = TABLES.get(name)
        case, rng = Case(3, table=table, rows=rows, depth=192, columns=75, group=64), np.random.default_rng(0)
        scale = np.exp(rng.standard_normal((3, 75))).astype(np.float16)
        zero = rng.uniform(-16, 16, (3, 75)).astype(np.float32)
        wide = [np.repeat(part.astype(np.float64), 64, axis=0) for part in (scale, zero)]
        values = case.codes.astype(np.float64)
        if table is not None:
            values = np.asarray(table)[np.stack([case.codes & 15, case.codes >> 4], 1).reshape(-1, 75)]
        case.wanted = case.x.astype(np.float64) @ ((values - wide[1]) * wide[0])
        case.bound = 200 * UNIT * (np.abs(case.x).astype(np.float64) @ ((np.abs(values) + 16) * wide[0]))
        operands = (*case.operands[:2], jnp.asarray(scale), jnp.asarray(zero))
        case.check(np.asarray(kernels.matvec(*operands, table=table, isa=isa)))
        case.check(np.asarray(kernels.reference(*operands, table=table)))


@pytest.mark.parametrize("rows", slow_except((1, 4, 17), range(1, 18)))
def test_any_number_of_rows(rows):
    for transposed in (False, True):
        case = Case(rows, table=TABLES["int4"], transposed=transposed, rows=rows, depth=64, columns=83, group=32)
        case.check(case.run())


@pytest.mark.parametrize("isa", kernels.versions())
@pytest.mark.parametrize("transposed", [False, True])
def test_integers_are_those_of_xla(transposed, isa):
    rng = np.random.default_rng(0)
    for rows, depth, columns in ((1, 129, 77), (3, 64, 64), (8, 31, 9), (17, 1, 1), (5, 200, 130)):
        x = rng.integers(-128, 128, (rows, depth)).astype(np.int8)
        w = rng.integers(-128, 128, (columns, depth) if transposed else (depth, columns)).astype(np.int8)
        got = kernels.int_matvec(jnp.asarray(x), jnp.asarray(w), transposed=transposed, isa=isa, threads=2)
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, x.astype(np.int32) @ (w.T if transposed else w).astype(np.int32))


@pytest.mark.parametrize("isa", kernels.versions())
def test_integer_sums_wrap_around_as_xla_s_do(isa):
    depth = 140_000  # 2**31 / 128**2 is 131072
    x, w = jnp.full((1, depth), -128, jnp.int8), jnp.full((depth, 20), -128, jnp.int8)
    wanted = int(np.asarray(depth * 128**2).astype(np.int32))
    assert wanted < 0
    assert set(kernels.int_matvec(x, w, isa=isa)[0].tolist()) == {wanted}
    assert set(kernels.int_matvec(x, w.T, transposed=True, isa=isa)[0].tolist()) == {wanted}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("table", [None, TABLES["nf4"]])
def test_threads_do_not_change_a_bit(table, transposed):
    case = Case(3, table=table, transposed=transposed, rows=3, depth=192, columns=1000, group=32)
    one = case.run(threads=1)
    for threads in (0, 2, 3, 8):
        np.testing.assert_array_equal(case.run(threads=threads), one)


def test_products_from_many_threads_at_once_all_end():
    case = Case(4, table=TABLES["int4"], rows=1, depth=256, columns=2048, group=32)
    fn = jax.jit(functools.partial(kernels.matvec, **case.options, threads=8))
    wrong = []

    def work():
        for _ in range(20):
            got = np.asarray(fn(*case.operands))
            if np.any(np.abs(got - case.wanted) > case.bound):
                wrong.append(got)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert not any(worker.is_alive() for worker in workers)
    assert wrong == []


def test_vmap_over_rows_is_one_call_and_over_matrices_a_loop():
    case = Case(5, rows=6, depth=64, columns=40)
    x, codes, scale = case.operands
    rows = jax.vmap(lambda x: kernels.matvec(x, codes, scale))(x.reshape(3, 2, 64))
    case.check(np.asarray(rows).reshape(6, 40))
    assert "scan" not in str(jax.make_jaxpr(jax.vmap(lambda x: kernels.matvec(x, codes, scale)))(x.reshape(3, 2, 64)))
    cases = [Case(seed, rows=2, depth=64, columns=40, group=32) for seed in (6, 9)]
    stacked = [jnp.stack(parts) for parts in zip(*(c.operands for c in cases), strict=True)]
    for got, each in zip(jax.vmap(kernels.matvec)(*stacked), cases, strict=True):
        each.check(np.asarray(got))


def test_scan_over_layers():
    cases = [Case(seed, rows=2, depth=64, columns=64, group=32) for seed in (7, 10)]
    codes, scale = (jnp.stack([c.operands[i] for c in cases]) for i in (1, 2))

    def layer(x, weights):
        y = kernels.matvec(x, *weights)
        return y / jnp.max(jnp.abs(y)), y

    x = cases[0].operands[0]
    _, found = jax.jit(lambda x: jax.lax.scan(layer, x, (codes, scale)))(x)
    cases[0].check(np.asarray(found[0]))
    second = kernels.matvec(found[0] / jnp.max(jnp.abs(found[0])), codes[1], scale[1])
    np.testing.assert_allclose(found[1], second, rtol=1e-5, atol=1e-4)


def test_the_reference_is_what_the_kernel_computes():
    for transposed in (False, True):
        case = Case(8, table=TABLES["fp4"], transposed=transposed, depth=33, group=None)
        case.check(np.asarray(kernels.reference(*case.operands, **case.options)))


def test_nothing_and_not_finite():
    empty = kernels.matvec(jnp.zeros((2, 0)), jnp.zeros((0, 5), jnp.int8), jnp.ones((1, 5)))
    np.testing.assert_array_equal(empty, np.zeros((2, 5)))
    assert kernels.matvec(jnp.zeros((2, 4)), jnp.zeros((4, 0), jnp.int8), jnp.ones((1, 0))).shape == (2, 0)
    x = jnp.ones((2, 40)).at[0, 3].set(jnp.nan)
    got = kernels.matvec(x, jnp.ones((40, 20), jnp.int8), jnp.ones((1, 20)))
    assert np.isnan(got[0]).all()
    assert np.isfinite(got[1]).all()


X, W, S = (2, 8), (8, 6), (1, 6)
BAD = {
    "depth": (((2, 9), W, S), {}, r"x \[2, 9\] does not fit codes \[8, 6\]"),
    "packed depth": ((X, (8, 6, np.uint8), S), {"table": TABLES["int4"]}, r"does not fit codes \[8, 6\]"),
    "scale columns": ((X, W, (1, 5)), {}, r"scale \[1, 5\] does not fit codes \[8, 6\]"),
    "scale groups": ((X, W, (3, 6)), {}, r"scale \[3, 6\] does not fit codes \[8, 6\]"),
    "scale of nothing": ((X, W, (0, 6)), {}, r"scale \[0, 6\] does not fit"),
    "transposed": ((X, W, (8, 1)), {"transposed": True}, r"x \[2, 8\] does not fit codes \[8, 6\]"),
    "odd groups": (((2, 6), (3, 6, np.uint8), (2, 6)), {"table": TABLES["int4"]}, "groups of packed codes are even"),
    "table": ((X, (4, 6, np.uint8), S), {"table": (1.0, 2.0)}, "a table has 16 values, got 2"),
    "codes": ((X, (8, 6, np.uint8), S), {}, "8-bit codes are int8, packed ones uint8"),
    "rows": (((2, 8, ml_dtypes.bfloat16), W, S), {}, "x and the product are float32"),
    "scale": ((X, W, (1, 6, ml_dtypes.float8_e4m3fn)), {}, "scales are float32, bfloat16 or float16"),
    "isa": ((X, W, S), {"isa": "mmx"}, "this processor has no mmx"),
}


def array(shape, default):
    dims, dtype = (shape[:2], shape[2]) if len(shape) == 3 else (shape, default)
    return jnp.zeros(dims, dtype)


@pytest.mark.parametrize("what", BAD)
def test_operands_that_do_not_fit_are_an_error(what):
    shapes, how, message = BAD[what]
    operands = [array(shape, dtype) for shape, dtype in zip(shapes, (np.float32, np.int8, np.float32), strict=True)]
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        kernels.matvec(*operands, **how).block_until_ready()


def test_zero_points_that_do_not_fit_are_an_error():
    x, w, scale = jnp.zeros((2, 8)), jnp.zeros((8, 6), jnp.int8), jnp.ones((2, 6))
    for zero, transposed, message in (
        (jnp.ones((2, 6), jnp.bfloat16), False, "there is a float32 zero point for each scale"),
        (jnp.ones((6, 2)), True, r"zero points are for matrices \[K, N\]"),
    ):
        operands = (x, w.T, scale.T) if transposed else (x, w, scale)
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            kernels.matvec(*operands, zero, transposed=transposed).block_until_ready()


def test_integers_that_do_not_fit_are_an_error():
    x, w = jnp.zeros((2, 8), jnp.int8), jnp.zeros((9, 6), jnp.int8)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"x \[2, 8\] does not fit \[9, 6\]"):
        kernels.int_matvec(x, w).block_until_ready()
    with pytest.raises(jax.errors.JaxRuntimeError, match="the operands are int8 and the product int32"):
        kernels.int_matvec(x.astype(jnp.uint8), w[:8]).block_until_ready()
