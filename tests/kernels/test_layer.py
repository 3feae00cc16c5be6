"""A whole layer in the kernel against the same in plain JAX, in every instruction set that this machine has."""

import functools
import inspect

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from octavo import kernels
from octavo.kernels import CacheScales, LayerWeights, Matrix, decode_layer, decode_layer_reference

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.status())

INT4 = tuple(map(float, (*range(8), *range(-8, 0))))
SCALES = (np.float32, ml_dtypes.bfloat16, np.float16)


def layer(
    seed, *, rows=2, size=48, kv_heads=2, shared=2, dim=16, time=40, hidden=56, extras=False, packed=None, levels=False
):
    """Operands of one layer, drawn from a seed."""
    rng = np.random.default_rng(seed)

    def floats(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    def matrix(depth, columns):
        groups = int(rng.choice([g for g in (1, 2, 4, 8) if depth % (2 * g) == 0] or [1]))
        scale = np.exp(0.3 * rng.standard_normal((groups, columns))) / depth**0.5
        is_packed = rng.integers(2) if packed is None else packed
        if is_packed:
            codes = rng.integers(0, 256, (-(-depth // 2), columns)).astype(np.uint8)
            if levels:
                small, zero = (jnp.asarray(rng.uniform(*r, scale.shape), jnp.float8_e3m4) for r in ((1, 9), (-4, 4)))
                return Matrix(jnp.asarray(codes), small, INT4, zero, jnp.asarray(scale[0] / 20, jnp.float32))
            return Matrix(jnp.asarray(codes), jnp.asarray((scale / 4).astype(SCALES[seed % 3])), INT4)
        codes = rng.integers(-128, 128, (depth, columns)).astype(np.int8)
        return Matrix(jnp.asarray(codes), jnp.asarray((scale / 70).astype(SCALES[seed % 3])))

    heads = kv_heads * shared
    mixed, angle = (heads + 2 * kv_heads) * dim, rng.uniform(-3, 3, (rows, dim // 2))
    weights = LayerWeights(
        floats(size), matrix(size, mixed), matrix(heads * dim, size), floats(size), matrix(size, 2 * hidden),
        matrix(hidden, size), *((floats(mixed), floats(dim), floats(dim)) if extras else ()),
    )  # fmt: skip
    positions = jnp.asarray(rng.integers(0, time, rows), jnp.int32)
    turned = (jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))
    cache = floats(rows, kv_heads, dim, time), floats(rows, kv_heads, time, dim)
    return (floats(rows, size), *turned, positions, *cache, weights), {"heads": heads, "epsilon": 1e-5, "limit": time}


def in_int8(args):
    """The same operands with a cache of codes."""
    rng = np.random.default_rng(7)
    *rest, keys, values, weights = args
    codes = [jnp.asarray(rng.integers(-127, 128, x.shape), jnp.int8) for x in (keys, values)]
    shapes = (*keys.shape[:2], 1, keys.shape[3]), (*values.shape[:3], 1)
    scales = CacheScales(*(jnp.asarray(rng.uniform(0.5, 1.5, shape) / 70, jnp.float32) for shape in shapes))
    return (*rest, *codes, weights), scales


def jitted(function, args, how, *, scales=None, **options):
    """The function with tables, which are no arrays, in place."""
    tables = [m.table if isinstance(m, Matrix) else None for m in args[6]]

    def call(*operands):
        whole = [m._replace(table=t) if isinstance(m, Matrix) else m for m, t in zip(operands[6], tables, strict=True)]
        return function(*operands[:6], LayerWeights(*whole), *operands[7:], **how)

    bare = LayerWeights(*(m._replace(table=None) if isinstance(m, Matrix) else m for m in args[6]))
    return functools.partial(jax.jit(call, **options), *args[:6], bare, *(() if scales is None else (scales,)))


def plain(args, how):
    return jitted(decode_layer_reference, args, how)()


def check(got, wanted):
    """Some thousand sums and products, each rounded to float32: a hundred units of the largest value at most."""
    for name, a, b in zip(("x", "keys", "values"), got[:3], wanted[:3], strict=True):
        scale = np.abs(b).max()
        np.testing.assert_allclose(a, b, rtol=0, atol=100 * 2.0**-24 * scale, err_msg=name)


def shapes(seed):
    rng = np.random.default_rng(seed)
    return {
        "rows": int(rng.integers(1, 11)),
        "size": int(rng.integers(1, 300)),
        "kv_heads": int(rng.integers(1, 4)),
        "shared": int(rng.integers(1, 4)),
        "dim": 2 * int(rng.integers(1, 40)),
        "time": int(rng.integers(1, 150)),
        "hidden": int(rng.integers(1, 300)),
        "extras": bool(rng.integers(2)),
    }


@pytest.mark.parametrize("isa", kernels.versions())
def test_a_layer_is_the_plain_one(isa):
    args, how = layer(0, extras=True)
    check(decode_layer(*args, **how, isa=isa), plain(args, how))


@pytest.mark.slow
def test_scales_of_two_levels():
    args, how = layer(0, packed=True, levels=True)
    check(jitted(decode_layer, args, how)(), plain(args, how))


@pytest.mark.parametrize("seed", range(14))
def test_any_shape(seed):
    args, how = layer(seed, **shapes(seed))

    def every(*args, **how):
        low = [decode_layer(*args, **how, isa=isa, threads=seed % 5) for isa in kernels.versions()]
        return decode_layer_reference(*args, **how), low

    wanted, low = jitted(every, args, how)()
    for got in low:
        check(got, wanted)


@pytest.mark.parametrize("packed", [False, True])
def test_threads_and_other_rows_do_not_change_a_bit(packed):
    args, how = layer(1, rows=5, size=320, hidden=400, time=70, packed=packed)
    one = decode_layer(*args, **how, threads=1)
    for threads in (0, 2, 3, 16):
        for a, b in zip(one[:3], decode_layer(*args, **how, threads=threads)[:3], strict=True):
            np.testing.assert_array_equal(a, b)
    alone = decode_layer(*(x[2:3] for x in args[:6]), args[6], **how)
    for a, b in zip(one[:3], alone[:3], strict=True):
        np.testing.assert_array_equal(a[2:3], b)


@pytest.mark.parametrize("seed", range(4))
def test_a_cache_in_int8(seed):
    args, how = layer(seed, **shapes(seed))
    args, scales = in_int8(args)

    def every(*args, **how):
        low = [decode_layer(*args, **how, isa=isa, threads=seed % 3) for isa in kernels.versions()]
        return decode_layer_reference(*args, **how), low

    wanted, low = jitted(every, args, how, scales=scales)()
    for x, keys, values, made in low:
        for a, b in zip((keys, values), wanted[1:3], strict=True):
            # Where float32 sums differ, a code next to a tie may be the other one.
            assert np.mean(np.asarray(a) != np.asarray(b)) < 1e-3
            assert np.max(np.abs(np.asarray(a, np.int32) - np.asarray(b))) <= 1
        for a, b in zip(made, wanted[3], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
        # Such a code moves the result by a 254th of a key or a value.
        np.testing.assert_allclose(x, wanted[0], rtol=0, atol=2e-3 * np.abs(wanted[0]).max())


def test_an_int8_cache_is_written_in_place_and_read_as_it_was_written():
    args, how = layer(5)
    args, scales = in_int8(args)
    run = jitted(decode_layer, args, how, scales=scales, donate_argnums=(4, 5, 7))
    before = [x.unsafe_buffer_pointer() for x in (*args[4:6], *scales)]
    _, keys, values, made = run()
    assert [x.unsafe_buffer_pointer() for x in (keys, values, *made)] == before
    args, scales = in_int8(layer(5)[0])
    wrong = CacheScales(scales.keys, jnp.ones((1, 1, 1, 1)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="int8 have a scale for each head and position"):
        jax.block_until_ready(inspect.unwrap(decode_layer)(*args, wrong, **how))


@pytest.mark.parametrize("packed", [False, True])
def test_several_tokens_of_a_slot_are_those_of_one_after_the_other(packed):
    (x, cos, sin, _, keys, values, weights), how = layer(7, rows=6, size=320, hidden=400, time=70, packed=packed)
    keys, values = keys[:2], values[:2]
    positions = jnp.asarray([0, 1, 2, 40, 41, 42], jnp.int32)
    want = [None] * 6
    one = keys + 0, values + 0
    for i in range(3):
        rows = np.asarray([i, 3 + i])
        y, *one, _ = decode_layer(x[rows], cos[rows], sin[rows], positions[rows], *one, weights, **how)
        want[i], want[3 + i] = y
    every = x, cos, sin, positions, keys, values, weights
    for threads in (1, 3):
        for a, b in zip(decode_layer(*every, **how, threads=threads)[:3], (jnp.stack(want), *one), strict=True):
            np.testing.assert_array_equal(a, b)
    check(decode_layer(*every, **how), plain(every, how))


def test_nothing_is_written_beyond_the_limit():
    args, how = layer(3, rows=2, time=20)
    args = (*args[:3], jnp.asarray([19, 20], jnp.int32), *(x[:1] for x in args[4:6]), args[6])
    got = decode_layer(*args, **how)
    assert bool(jnp.isfinite(got[0][0]).all() & jnp.isnan(got[0][1]).all())
    alone = decode_layer(*(x[:1] for x in args[:6]), args[6], **how)
    for a, b in zip((got[0][:1], *got[1:3]), alone[:3], strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(got[1:3], plain(args, how)[1:3], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_entries_beyond_a_position_have_no_influence():
    args, how = layer(2, rows=1, time=30)
    x, cos, sin, _, keys, values, weights = args
    position = jnp.asarray([11], jnp.int32)
    want = decode_layer(x, cos, sin, position, keys, values, weights, **how)[0]
    keys, values = keys.at[..., 11:].set(jnp.nan), values.at[:, :, 11:].set(jnp.inf)
    got, keys, values, _ = decode_layer(x, cos, sin, position, keys, values, weights, **how)
    np.testing.assert_array_equal(got, want)
    assert bool(jnp.isfinite(keys[..., :12]).all() & jnp.isfinite(values[:, :, :12]).all())


def test_a_position_beyond_the_limit_is_nan_and_no_other_row_s():
    args, how = layer(3, rows=2, time=20)
    args = (*args[:3], jnp.asarray([20, 4], jnp.int32), *args[4:])
    got = decode_layer(*args, **how)
    assert bool(jnp.isnan(got[0][0]).all() & jnp.isfinite(got[0][1]).all())
    np.testing.assert_array_equal(got[1][1], decode_layer(*(x[1:] for x in args[:6]), args[6], **how)[1][0])


def test_large_activations_do_not_overflow_the_gate():
    args, how = layer(4, rows=1)
    weights = args[6]._replace(norm_mid=args[6].norm_mid * 1e3)
    args = (*args[:6], weights)
    check(decode_layer(*args, **how), plain(args, how))


def test_the_cache_is_written_in_place():
    args, how = layer(5)
    run = jitted(decode_layer, args, how, donate_argnums=(4, 5))
    before = [x.unsafe_buffer_pointer() for x in args[4:6]]
    _, keys, values, _ = run()
    assert [keys.unsafe_buffer_pointer(), values.unsafe_buffer_pointer()] == before


WRONG = {
    "no such instructions": (lambda a: a, {"isa": "mmx"}, "this processor has no mmx"),
    "x": (lambda a: (a[0].astype(jnp.bfloat16), *a[1:]), {}, "x is a matrix of float32"),
    "heads": (lambda a: a, {"heads": 3}, "heads are of even size, and share keys evenly"),
    "values": (lambda a: (*a[:5], a[5][:, :, :-1], a[6]), {}, r"keys \[2, 2, 16, 40\] and values \[2, 2, 39, 16\]"),
    "angles": (lambda a: (a[0], a[1][:, :-1], *a[2:]), {}, "there is an angle for each pair"),
    "positions": (lambda a: (*a[:3], a[3][:1], *a[4:]), {}, "there is a position for each row"),
    "slots": (
        lambda a: (*(x[:1] for x in a[:4]), *a[4:]),
        {},
        "slots have the same number of new tokens",
    ),
    "norm": (lambda a: (*a[:6], a[6]._replace(norm_in=a[6].norm_in[:-1])), {}, "norms have a value for each of x"),
    "bias": (lambda a: (*a[:6], a[6]._replace(bias=a[6].norm_in)), {}, "a bias is for all heads, a norm for one"),
    "matrix": (lambda a: (*a[:6], a[6]._replace(out=a[6].wi)), {}, "does not fit codes"),
    "matrices": (lambda a: (*a[:6], a[6]._replace(query_key_value=a[6].wi)), {}, "the matrices do not fit together"),
}


@pytest.mark.parametrize("what", WRONG)
def test_operands_that_do_not_fit_are_an_error(what):
    change, how, message = WRONG[what]
    args, known = layer(6, packed=False)
    unchecked = inspect.unwrap(decode_layer)  # the kernel looks for itself
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(unchecked(*change(args), **(known | how)))
