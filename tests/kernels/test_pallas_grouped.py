"""The grouped kernels, interpreted, against NumPy: bits for integers, and nothing leaks from one group to another."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from octavo.kernels import pallas
from octavo.kernels.pallas.blocks import block_dot
from octavo.ops.grouped import Rows, rows_by_groups, rows_by_rows

M, K, N, G = 100, 300, 200, 5
F8, G8 = jnp.float8_e4m3fn, jnp.float8_e5m2
SIZES = [
    [20, 0, 33, 30, 7],
    [0, 0, 0, 0, 0],
    [100, 0, 0, 0, 0],
    [0, 0, 0, 0, 100],
    [0, 0, 1, 0, 0],
    [32, 32, 32, 4, 0],
    [1, 1, 1, 1, 1],
    [31, 2, 30, 2, 35],
]
KERNELS = {
    "tpu": (
        functools.partial(pallas.gmm, tiling=(32, 128, 128), interpret=True),
        functools.partial(pallas.tgmm, tiling=(32, 128, 128), interpret=True),
    ),
    "gpu": (
        functools.partial(pallas.gpu_gmm, tiling=(32, 64, 64), interpret=True),
        functools.partial(pallas.gpu_tgmm, tiling=(32, 64, 64), interpret=True),
    ),
}
both = pytest.mark.parametrize("where", KERNELS)


def draws():
    rng = np.random.default_rng(0)
    for _ in range(12):
        cuts = np.sort(rng.integers(0, M + 1, G))
        yield np.diff(cuts, prepend=0).tolist()


def random(shape, dtype, seed):
    rng = np.random.default_rng(seed)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return jnp.asarray(rng.integers(int(info.min), int(info.max) + 1, shape), jnp.int8).astype(dtype)
    return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)


def f64(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def rows_of(sizes):
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def by_groups(x, w, sizes):
    out = np.zeros((x.shape[0], w.shape[2]))
    for rows, matrix in zip(rows_of(sizes), w, strict=True):
        out[rows] = x[rows] @ matrix
    return out


def by_rows(x, y, sizes):
    return np.stack([x[rows].T @ y[rows] for rows in rows_of(sizes)])


def counts(sizes):
    return jnp.asarray(sizes, jnp.int32)


@both
def test_integers_bit_for_bit(where):
    gmm, tgmm = KERNELS[where]
    x, w, y = random((M, K), jnp.int8, 0), random((G, K, N), jnp.int8, 1), random((M, N), jnp.int8, 2)
    for sizes in [*SIZES, *draws()]:
        out = gmm(x, w, counts(sizes))
        assert out.dtype == jnp.int32
        np.testing.assert_array_equal(out, by_groups(f64(x), f64(w), sizes))
        out = gmm(y, w, counts(sizes), transposed=True)
        np.testing.assert_array_equal(out, by_groups(f64(y), f64(w).swapaxes(1, 2), sizes))
        out = tgmm(x, y, counts(sizes))
        assert out.dtype == jnp.int32
        np.testing.assert_array_equal(out, by_rows(f64(x), f64(y), sizes))


@pytest.mark.slow
@both
@pytest.mark.parametrize(
    "shape", [(1, 64, 30, 3), (3, 96, 40, 8), (33, 130, 129, 2), (64, 256, 128, 1), (200, 40, 520, 4)]
)
def test_other_shapes_bit_for_bit(where, shape):
    m, k, n, g = shape
    gmm, tgmm = (pallas.gmm, pallas.tgmm) if where == "tpu" else (pallas.gpu_gmm, pallas.gpu_tgmm)
    x, w, y = random((m, k), jnp.int8, 0), random((g, k, n), jnp.int8, 1), random((m, n), jnp.int8, 2)
    for sizes in ([m, *[0] * (g - 1)], [*[0] * (g - 1), m], [m // g] * g, [0] * g):
        np.testing.assert_array_equal(gmm(x, w, counts(sizes), interpret=True), by_groups(f64(x), f64(w), sizes))
        np.testing.assert_array_equal(tgmm(x, y, counts(sizes), interpret=True), by_rows(f64(x), f64(y), sizes))


PAIRS = [(jnp.bfloat16, jnp.int8), (F8, G8), (F8, F8), (jnp.float32, jnp.float32), (jnp.bfloat16, jnp.int4)]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("types", PAIRS, ids=lambda p: "x".join(jnp.dtype(d).name for d in p))
@both
def test_floats_with_scales(where, types):
    gmm, tgmm = KERNELS[where]
    turned = jnp.int8 if types[1] == jnp.int4 else types[1]  # whose rows are too few for int4
    x, w, y = random((M, K), types[0], 0), random((G, K, N), types[1], 1), random((M, N), turned, 2)
    rng = np.random.default_rng(3)
    ls, rs, cs, ds = (
        jnp.asarray(rng.uniform(0.5, 2, s), jnp.float32) for s in ((M, 1), (G, 1, N), (G, 1, N), (G, K, 1))
    )
    for sizes in SIZES:
        out = gmm(x, w, counts(sizes), lhs_scale=ls, rhs_scale=rs)
        close(out, by_groups(f64(x) * f64(ls), f64(w) * f64(rs), sizes), by_groups(abs(f64(x)), abs(f64(w)), sizes))
        out = tgmm(x, y, counts(sizes), scales=(cs, ds))
        close(out, by_rows(f64(x), f64(y), sizes) * f64(cs) * f64(ds), by_rows(abs(f64(x)), abs(f64(y)), sizes))


def close(actual, expected, magnitude):
    """Within a few roundings of a float32 sum of that magnitude, scales up to four included."""
    assert actual.dtype == jnp.float32
    assert np.all(np.abs(np.asarray(actual, np.float64) - expected) <= 4 * 2e-6 * magnitude)


@pytest.mark.sampled(2)
@both
def test_epilogue_is_the_reference_bit_for_bit(where):
    gmm, tgmm = KERNELS[where]
    x, w, y = random((M, K), jnp.int8, 0), random((G, K, N), jnp.int8, 1), random((M, N), jnp.int8, 2)
    rng = np.random.default_rng(3)
    ls, rs, ks, cs = (
        jnp.asarray(rng.uniform(0.5, 2, s), jnp.float32) for s in ((M, 1), (G, 1, N), (1, K, 1), (G, 1, N))
    )
    sizes = SIZES[0]
    owner = np.minimum(np.searchsorted(np.cumsum(sizes), np.arange(M), side="right"), G - 1)
    plain = jnp.asarray(by_groups(f64(x), f64(w), sizes), jnp.float32)
    got = gmm(x, w, counts(sizes), lhs_scale=ls, rhs_scale=rs, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(f64(got), f64((plain * ls * rs[owner, 0]).astype(jnp.bfloat16)))
    plain = jnp.asarray(by_rows(f64(x), f64(y), sizes), jnp.float32)
    got = tgmm(x, y, counts(sizes), scales=(ks, cs))
    np.testing.assert_array_equal(got, plain * jnp.broadcast_to(ks, plain.shape) * jnp.broadcast_to(cs, plain.shape))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [F8, jnp.bfloat16])
@both
def test_nothing_leaks(where, dtype):
    gmm, tgmm = KERNELS[where]
    x, w, y = random((M, K), dtype, 0), random((G, K, N), dtype, 1), random((M, N), dtype, 2)
    sizes, rows = SIZES[0], rows_of(SIZES[0])
    clean, turned = gmm(x, w, counts(sizes)), tgmm(x, y, counts(sizes))
    clean, turned = np.asarray(clean), np.asarray(turned)
    tail = slice(sum(sizes), None)

    def spoilt(x, *places):
        x = np.array(x)
        for place in places:
            x[place] = np.nan
        return jnp.asarray(x)

    for bad in range(G):
        left = spoilt(x, rows[bad], tail)
        poisoned = np.asarray(gmm(left, spoilt(w, bad), counts(sizes)))
        outer = np.asarray(tgmm(left, spoilt(y, tail), counts(sizes)))
        assert np.all(np.isnan(poisoned[rows[bad]]))
        assert not np.any(poisoned[tail])
        assert np.all(np.isnan(outer[bad])) or not sizes[bad]
        for other in set(range(G)) - {bad}:
            np.testing.assert_array_equal(poisoned[rows[other]], clean[rows[other]])
            np.testing.assert_array_equal(outer[other], turned[other])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", [jnp.int8, F8])
@pytest.mark.parametrize("transposed", [False, True])
@both
def test_scales_that_change_along_the_depth(where, dtype, transposed):
    gmm = functools.partial(pallas.gmm if where == "tpu" else pallas.gpu_gmm, interpret=True)
    m, k, n, g = 70, 512, 130, 3
    x, w = random((m, k), dtype, 0), random((g, k, n), dtype, 1)
    rng = np.random.default_rng(2)
    ls = jnp.asarray(rng.uniform(0.5, 2, (m, 4)), jnp.float32)
    rs = jnp.asarray(rng.uniform(0.5, 2, (g, 2, n)), jnp.float32)
    sizes = [30, 0, 25]
    values = f64(x) * np.repeat(f64(ls), 128, 1), f64(w) * np.repeat(f64(rs), 256, 1)
    matrix, scale = (w.swapaxes(1, 2), rs.swapaxes(1, 2)) if transposed else (w, rs)
    out = gmm(x, matrix, counts(sizes), lhs_scale=ls, rhs_scale=scale, transposed=transposed)
    close(out, by_groups(*values, sizes), by_groups(abs(values[0]), abs(values[1]), sizes))


def test_integers_are_exact_in_floats():
    x, y = random((8, 3000), jnp.int8, 0), jnp.full((3000, 16), -128, jnp.int8)
    x = x.at[0].set(-128)
    got = block_dot(x, y, (1, 0), wide=jnp.dtype(jnp.bfloat16), precision=None)
    np.testing.assert_array_equal(got, f64(x) @ f64(y))


def test_empty_operands():
    sizes = jnp.zeros((2,), jnp.int32)
    for gmm, tgmm in ((pallas.gmm, pallas.tgmm), (pallas.gpu_gmm, pallas.gpu_tgmm)):
        assert gmm(jnp.zeros((0, 4)), jnp.zeros((2, 4, 3)), sizes).shape == (0, 3)
        assert tgmm(jnp.zeros((0, 4)), jnp.zeros((0, 3)), sizes).shape == (2, 4, 3)


ERRORS = {
    "float16": (lambda: pallas.gmm(jnp.zeros((2, 4), "float16"), jnp.zeros((1, 4, 3)), counts([2])), "gmm: .*float16"),
    "shapes": (lambda: pallas.gmm(jnp.zeros((2, 4)), jnp.zeros((1, 5, 3)), counts([2])), r"\[m, k\] and \[g, k, n\]"),
    "gpu shapes": (lambda: pallas.gpu_gmm(jnp.zeros((2, 4)), jnp.zeros((1, 5, 3)), counts([2])), "gpu_gmm: operands"),
    "tiles": (
        lambda: pallas.gmm(jnp.zeros((2, 128)), jnp.zeros((1, 128, 3)), counts([2]), lhs_scale=jnp.ones((2, 2))),
        "multiples of 128 along k, not 2",
    ),
    "nest": (
        lambda: pallas.gmm(
            jnp.zeros((2, 768)), jnp.zeros((1, 768, 3)), counts([2]), lhs_scale=jnp.ones((2, 3)),
            rhs_scale=jnp.ones((1, 2, 3)),
        ),
        "do not nest: 3 and 2",
    ),
    "rows": (lambda: pallas.tgmm(jnp.zeros((2, 4)), jnp.zeros((3, 4)), counts([2])), r"\[m, k\] and \[m, n\]"),
    "tgmm types": (lambda: pallas.tgmm(jnp.zeros((2, 4), jnp.int16), jnp.zeros((2, 4)), counts([2])), "lhs of int16"),
    "gpu rows": (lambda: pallas.gpu_tgmm(jnp.zeros((2, 4)), jnp.zeros((3, 4)), counts([2])), "gpu_tgmm: operands"),
    "scale": (
        lambda: pallas.tgmm(jnp.zeros((2, 4)), jnp.zeros((2, 3)), counts([2]), scales=[jnp.ones((1, 4, 3))]),
        "one of the last two 1",
    ),
    "blocks": (
        lambda: pallas.gpu_gmm(jnp.zeros((2, 4)), jnp.zeros((1, 4, 3)), counts([2]), tiling=(64, 48, 64)),
        r"powers of two from 16; try \(64, 64, 128\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    call, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
def test_under_vmap_and_shard_map():
    x, w, y = random((4, 32, 16), jnp.int8, 0), random((3, 16, 24), jnp.int8, 1), random((4, 32, 24), jnp.int8, 2)
    sizes = jnp.asarray([[10, 0, 22], [0, 0, 0], [32, 0, 0], [1, 2, 3]], jnp.int32)

    def both(x, y, sizes):
        rows, how = Rows(x.shape[0], sizes), {"precision": None, "lowering": "pallas"}
        return rows_by_groups(x, w, rows, contract=1, **how), rows_by_rows(x, y, rows, **how)

    expected = [
        (by_groups(f64(a), f64(w), list(s)), by_rows(f64(a), f64(b), list(s)))
        for a, b, s in zip(x, y, sizes, strict=True)
    ]
    for i, out in enumerate(jax.jit(jax.vmap(both))(x, y, sizes)):
        np.testing.assert_array_equal(out, np.stack([e[i] for e in expected]))
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    one = lambda x, y, sizes: [out[None] for out in both(x[0], y[0], sizes[0])]  # noqa: E731
    # jax 0.12 interprets a kernel whose grid is steered by varying numbers only without these checks.
    mapped = jax.shard_map(one, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    for i, out in enumerate(jax.jit(mapped)(x, y, sizes)):
        np.testing.assert_array_equal(out, np.stack([e[i] for e in expected]))
