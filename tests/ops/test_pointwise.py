"""Lookup, softmax, norms and sums in low precision, against plain references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo import Quantizer, fake_quant, ops

pytestmark = pytest.mark.sampled(6)

ROWS = Quantizer("int8", channelwise_axes=(0,))


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def same(a, b):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))  # NaN equals NaN


# Lookup.

TABLE = normal(0, 12, 16)
IDS = jnp.asarray([[0, 3, 3], [11, -1, 40]])


def taken(table, ids=IDS):
    return jnp.take(table, ids, axis=0, mode="fill")


@pytest.mark.parametrize(
    "how",
    [
        ROWS,
        Quantizer("int4"),
        Quantizer("int4", channelwise_axes=(0,), tiled_axes={1: 6}),
        Quantizer("int4", tiled_axes={0: 5, 1: 4}),
        Quantizer("int8", channelwise_axes=(0,), calibration="minmax"),
        Quantizer("mxfp4"),
        Quantizer("nvfp4"),
    ],
    ids=str,
)
def test_rows_of_a_table_are_those_of_the_whole_table_rounded(how):
    table = TABLE if how.qtype.tile is None else normal(0, 12, 32)

    @jax.jit
    def found(table):
        q = how.quantize(table)
        outs = [ops.embedding_lookup(table, IDS, quantizer=how)]
        return taken(q.dequantize()), outs + [ops.embedding_lookup(codes, IDS) for codes in (q, q.pack())]

    wanted, outs = found(table)
    assert np.isnan(wanted[1, 2]).all()
    assert not np.isnan(wanted[:, :2]).any()
    for out in outs:
        same(out, wanted)


def test_a_table_of_one_row_is_not_poisoned_by_rows_that_do_not_exist():
    row = TABLE[:1]
    out = ops.embedding_lookup(row, jnp.asarray([0, 7]), quantizer="int8")
    same(out[0], fake_quant(row, "int8")[0])
    assert np.isnan(out[1]).all()
    halves = Quantizer("int8", tiled_axes={0: 0.5})
    ids = jnp.asarray([0, 1, 1, 0])
    same(ops.embedding_lookup(TABLE[:2], ids, quantizer=halves), taken(fake_quant(TABLE[:2], halves), ids))


def test_lookups_without_jit():
    table = Quantizer("int4", channelwise_axes=(0,), tiled_axes={1: 6}).quantize(TABLE).pack()
    same(jax.jit(ops.embedding_lookup)(table, IDS), ops.embedding_lookup(table, IDS))


def test_only_rows_that_are_looked_up_are_dequantized():
    table = jax.eval_shape(ROWS.quantize, jax.ShapeDtypeStruct((5000, 16), jnp.float32))
    jaxpr = jax.make_jaxpr(ops.embedding_lookup)(table, IDS)
    floats = [v.aval for e in jaxpr.eqns for v in e.outvars if jnp.issubdtype(v.aval.dtype, jnp.floating)]
    assert floats
    assert all(a.size < 5000 for a in floats)


@pytest.mark.parametrize("how", [ROWS, Quantizer("int8"), Quantizer("int8", calibration="fixed,1"), None], ids=str)
def test_the_gradient_of_a_lookup_is_added_to_the_rows(how):
    g = normal(1, 2, 3, 16)
    ids = jnp.asarray([[0, 3, 3], [11, -1, 3]])

    def loss(lookup):
        return lambda table: jnp.sum(g * lookup(table))

    reference = loss(lambda t: taken(t if how is None else fake_quant(t, how), ids))
    grad = jax.grad(loss(lambda t: ops.embedding_lookup(t, ids, quantizer=how)))(TABLE)
    np.testing.assert_allclose(grad, jax.grad(reference)(TABLE), rtol=1e-6)
    if how is ROWS:
        by_hand = np.zeros((12, 16), np.float32)
        np.add.at(by_hand, np.asarray(ids).reshape(-1), np.asarray(g).reshape(-1, 16))
        np.testing.assert_allclose(grad, by_hand, rtol=1e-6)


def test_a_row_that_does_not_exist_has_no_gradient():
    grad = jax.grad(lambda t: ops.embedding_lookup(t, jnp.asarray([2, 99]), quantizer=ROWS)[0].sum())(TABLE)
    same(grad, jnp.zeros((12, 16)).at[2].set(1.0))


def test_lookups_map_keep_bfloat16_and_take_a_key():
    many = jnp.stack([TABLE, 2 * TABLE]).astype(jnp.bfloat16)
    one = jax.jit(lambda t: ops.embedding_lookup(t, IDS, quantizer=ROWS))
    same(jax.vmap(one)(many), jnp.stack([one(t) for t in many]))
    how = Quantizer("int4", channelwise_axes=(0,), rounding="stochastic")
    rows = ops.embedding_lookup(TABLE, jnp.asarray([3, 3]), quantizer=how, key=jax.random.key(0))
    same(rows[0], rows[1])  # one table, rounded once
    same(ops.embedding_lookup(jnp.zeros((2, 4)), jnp.asarray(1), quantizer=ROWS), jnp.zeros(4))


def test_a_lookup_says_what_it_wants():
    with pytest.raises(TypeError, match="looked up by integers, got ids of dtype float32"):
        ops.embedding_lookup(TABLE, jnp.ones(3))
    with pytest.raises(TypeError, match="quantized already: leave the quantizer out"):
        ops.embedding_lookup(ROWS.quantize(TABLE), IDS, quantizer=ROWS)
    with pytest.raises(ValueError, match="a table has rows"):
        ops.embedding_lookup(jnp.asarray(1.0), IDS)


# Softmax.


@pytest.mark.parametrize(("axis", "dtype"), [(-1, jnp.float32), ((0, 1), jnp.float32), (0, jnp.bfloat16)])
def test_probabilities_are_those_of_softmax_in_steps_of_one_255th(axis, dtype):
    x = 4 * normal(2, 6, 40, dtype=dtype)
    wanted = jnp.round(jax.nn.softmax(x.astype(jnp.float32), axis=axis) * 255) / 255
    for fmt in ("uint8", "int8", Quantizer("uint8", calibration="fixed,0,1")):
        p = ops.softmax(x, axis, quantizer=fmt)
        assert p.dtype == dtype
        np.testing.assert_allclose(p.astype(jnp.float32), wanted, rtol=1e-2 if dtype == jnp.bfloat16 else 1e-6)
    same(jax.jit(lambda x: ops.softmax(x, axis, quantizer="uint8"))(x), ops.softmax(x, axis, quantizer="uint8"))


def test_probabilities_in_float8_are_within_its_precision():
    x = 4 * normal(2, 6, 40)
    p, exact = ops.softmax(x, quantizer="fp8"), jax.nn.softmax(x)
    same(p, fake_quant(exact, Quantizer("fp8", calibration="fixed,1")))
    large = exact > 1e-3
    assert (jnp.abs(p - exact)[large] <= exact[large] / 16 + 1e-7).all()
    assert ops.softmax(jnp.asarray([0.0, -jnp.inf]), quantizer="fp8").tolist() == [1.0, 0.0]


def test_sums_of_probabilities_are_within_half_a_step_each():
    p = ops.softmax(3 * normal(3, 50, 20), quantizer="uint8")
    off = jnp.abs(p.sum(axis=-1) - 1)
    assert 0 < off.max() <= 20 / 2 / 255


def test_large_small_and_missing_logits():
    p = ops.softmax(jnp.asarray([[1e30, 1e30], [-1e30, 0.0], [-jnp.inf, -jnp.inf], [jnp.nan, 0.0]]), quantizer="uint8")
    np.testing.assert_allclose(p[0], [1 / 2] * 2, atol=0.51 / 255)
    np.testing.assert_allclose(p[1], [0, 1])
    same(p[2], jnp.zeros(2))
    assert np.isnan(p[3]).all()
    same(ops.softmax(jnp.zeros((3, 0)), quantizer="uint8"), jnp.zeros((3, 0)))


def test_masked_logits_have_no_probability_and_no_gradient():
    x = normal(4, 3, 8).at[0, 7].set(jnp.nan)
    where = jnp.arange(8)[None] < jnp.asarray([5, 8, 0])[:, None]
    p = ops.softmax(x, quantizer="uint8", where=where)
    same(p[0, :5], ops.softmax(x[0, :5], quantizer="uint8"))
    same(p[0, 5:], jnp.zeros(3))
    same(p[2], jnp.zeros(8))
    grad = jax.jit(jax.grad(lambda x: (ops.softmax(x, quantizer="uint8", where=where) ** 2).sum()))(x)
    same(grad[2], jnp.zeros(8))
    same(grad[0, 5:], jnp.zeros(3))
    assert np.isfinite(grad).all()


def test_the_gradient_of_a_softmax_is_taken_at_the_rounded_probabilities():
    x, g = normal(5, 4, 10), normal(6, 4, 10)
    both = lambda x: jax.vjp(lambda x: ops.softmax(x, quantizer="int4"), x)  # noqa: E731
    p, grad = jax.jit(lambda x: (both(x)[0], both(x)[1](g)[0]))(x)
    np.testing.assert_allclose(grad, p * (g - (p * g).sum(axis=-1, keepdims=True)), rtol=1e-4, atol=1e-6)
    fine = jax.jit(jax.grad(lambda x: jnp.sum(g * ops.softmax(x, quantizer="int16"))))(x)
    np.testing.assert_allclose(fine, jax.jit(jax.grad(lambda x: jnp.sum(g * jax.nn.softmax(x))))(x), atol=1e-3)
    one = jax.jit(lambda row: ops.softmax(row, quantizer="int4"))
    same(jax.vmap(one)(x), jnp.stack([one(row) for row in x]))


def test_a_softmax_of_a_qarray_and_with_a_key():
    q = ROWS.quantize(normal(7, 4, 6))
    same(ops.softmax(q, quantizer="uint8"), ops.softmax(q.dequantize(), quantizer="uint8"))
    how = Quantizer("uint4", calibration="fixed,0,1", rounding="stochastic")
    draw = jax.jit(jax.vmap(lambda key: ops.softmax(q, quantizer=how, key=key)))
    draws = draw(jax.random.split(jax.random.key(0), 1000))
    np.testing.assert_allclose(draws.mean(axis=0), jax.nn.softmax(q.dequantize()), atol=1e-2)


def test_a_softmax_says_what_it_wants():
    with pytest.raises(ValueError, match=r"the range of a softmax is known.*calibration='fixed,0,1'"):
        ops.softmax(jnp.ones(3), quantizer=Quantizer("int8"))
    with pytest.raises(ValueError, match="needs a format with a zero, which binary has not"):
        ops.softmax(jnp.ones(3), quantizer="binary")


# Norms.


def float_norm(x, scale, bias, axis, *, centred):
    x = x.astype(jnp.float32)
    x = x - jnp.mean(x, axis=axis, keepdims=True) if centred else x
    return x / jnp.sqrt(jnp.mean(x**2, axis=axis, keepdims=True) + 1e-6) * scale + bias


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("how", [None, "int8", Quantizer("fp8", channelwise_axes=(0,))], ids=str)
def test_norms_are_those_of_float32_rounded_last(dtype, how):
    x = (3 * normal(8, 6, 32) + 1).astype(dtype)
    scale, bias = normal(9, 32, dtype=dtype), normal(10, 32, dtype=dtype)
    wide = [a.astype(jnp.float32).reshape(1, 32) for a in (scale, bias)]

    def rounded(y):
        return y.astype(dtype) if how is None else fake_quant(y, how).astype(dtype)

    tolerance = {"rtol": 1e-5, "atol": 1e-5} if how is None else {"rtol": 0.08, "atol": 0.05}
    for out, wanted in (
        (ops.layer_norm(x, scale, bias, quantizer=how), rounded(float_norm(x, *wide, -1, centred=True))),
        (ops.rms_norm(x, scale, quantizer=how), rounded(float_norm(x, wide[0], jnp.zeros((1, 1)), -1, centred=False))),
    ):
        assert out.dtype == dtype
        a, b = (np.asarray(y, np.float32) for y in (out, wanted))
        np.testing.assert_allclose(a, b, **tolerance)
        assert np.mean(np.isclose(a, b, rtol=1e-5)) > 0.95  # a rounding apart where float32 differs in its last bit


def test_gradients_of_norms_pass_straight_through():
    x, scale, bias, g = normal(8, 6, 32), normal(9, 32), normal(10, 32), normal(11, 6, 32)
    gain = Quantizer("int4")

    def reference(x, scale, bias):
        wide = fake_quant(scale, gain).reshape(1, 32), bias.reshape(1, 32)
        return jnp.sum(g * fake_quant(float_norm(x, *wide, -1, centred=True), "int8"))

    def loss(x, scale, bias):
        return jnp.sum(g * ops.layer_norm(x, scale, bias, quantizer="int8", scale_quantizer=gain))

    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, scale, bias)
    for a, b in zip(grads, jax.grad(reference, argnums=(0, 1, 2))(x, scale, bias), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


def test_norms_along_several_axes_of_zeros_and_mapped():
    x, scale = normal(12, 3, 4, 5), normal(13, 3, 5)
    out = ops.layer_norm(x, scale, axis=(-1, 0), quantizer="int16")
    wanted = float_norm(x, scale.reshape(3, 1, 5), jnp.zeros((1, 1, 1)), (0, 2), centred=True)
    np.testing.assert_allclose(out, wanted, atol=2e-4)
    same(ops.rms_norm(jnp.zeros((2, 4)), quantizer="int8"), jnp.zeros((2, 4)))
    same(ops.layer_norm(jnp.full((2, 4), 7.0), quantizer="int8"), jnp.zeros((2, 4)))
    one = jax.jit(lambda a: ops.rms_norm(a, quantizer="int8"))
    same(jax.vmap(one)(x), jnp.stack([one(a) for a in x]))


def test_norms_take_qarrays():
    q, gain = ROWS.quantize(normal(8, 6, 32)), octavo.quantize(normal(9, 32), "int8")
    same(ops.rms_norm(q, gain, quantizer="int8"), ops.rms_norm(q.dequantize(), gain.dequantize(), quantizer="int8"))


def test_norms_say_what_they_want():
    x = jnp.ones((2, 4))
    with pytest.raises(ValueError, match=r"the scale of a norm along axes \(1,\) of \(2, 4\) has shape \(4,\), got"):
        ops.rms_norm(x, jnp.ones(2))
    with pytest.raises(ValueError, match="the bias of a norm"):
        ops.layer_norm(x, jnp.ones(4), jnp.ones((1, 4)))
    with pytest.raises(ValueError, match="scale_quantizer rounds the scale, but there is none"):
        ops.layer_norm(x, scale_quantizer="int8")
    with pytest.raises(TypeError, match="leave scale_quantizer out"):
        ops.rms_norm(x, octavo.quantize(jnp.ones(4), "int8"), scale_quantizer="int8")
    with pytest.raises(ValueError, match=r"axis 2 is out of range for an array of shape \(2, 4\)"):
        ops.rms_norm(x, axis=2)


# Sums.


@pytest.mark.parametrize(
    ("how", "axis"),
    [
        (Quantizer("int8", channelwise_axes=(0,)), (1, 2)),
        (Quantizer("int4", channelwise_axes=(0, 2)), 1),
        (Quantizer("uint8", channelwise_axes=(1,), calibration="minmax"), (0, -1)),
        (Quantizer("int4", tiled_axes={2: 5}), (0, 1)),
        (Quantizer("binary", channelwise_axes=(0,)), -1),
        (Quantizer("int1", channelwise_axes=(0,)), 2),
    ],
    ids=str,
)
def test_a_sum_is_that_of_the_codes_scaled_once(how, axis):
    x = normal(14, 4, 6, 17)

    @jax.jit
    def sums(x):
        q, kept = how.quantize(x), {"keepdims": True}
        outs = [ops.quantized_sum(q, axis, **kept), ops.quantized_sum(q.pack(), axis, **kept)]
        return q, [*outs, ops.quantized_sum(x, axis, quantizer=how, **kept)], ops.quantized_sum(x, axis, quantizer=how)

    q, outs, squeezed = sums(x)
    axes = tuple(a % 3 for a in (axis if isinstance(axis, tuple) else (axis,)))
    codes = np.asarray(q.qtype.decode(q.qvalue), np.float64)
    codes = codes if q.zero_point is None else codes - np.asarray(q.zero_point, np.float64)
    total = np.sum(codes, axis=axes, keepdims=True)
    tile = [max(1, n // s) for n, s in zip(total.shape, q.scale.shape, strict=True)]
    scale = np.asarray(q.scale)
    for a, n in enumerate(tile):
        scale = np.repeat(scale, n, axis=a) if scale.shape[a] > 1 else scale
    wanted = (total.astype(np.float32) * scale)[..., :17]
    for out in outs:
        np.testing.assert_allclose(out, wanted, rtol=1e-7)
    np.testing.assert_allclose(outs[0], q.dequantize().sum(axis=axes, keepdims=True), rtol=1e-4, atol=1e-4)
    same(squeezed, jnp.squeeze(outs[0], axes))


@pytest.mark.parametrize("calibration", ["absmax", "fixed,1"])
def test_the_gradient_of_a_sum_passes_where_values_are_in_range(calibration):
    x, g = normal(15, 4, 10), normal(16, 4)
    how = Quantizer("int8", calibration=calibration)
    grad = jax.grad(lambda x: jnp.sum(g * ops.quantized_sum(x, 1, quantizer=how)))(x)
    same(grad, jax.grad(lambda x: jnp.sum(g * fake_quant(x, how).sum(axis=1)))(x))


def test_sums_map_keep_bfloat16_and_zeros():
    x = normal(17, 3, 8, dtype=jnp.bfloat16)
    out = ops.quantized_sum(x, 1, quantizer=ROWS)
    assert out.dtype == jnp.bfloat16
    rows = [ops.quantized_sum(row, 0, quantizer="int8") for row in x]
    same(out, jnp.stack(rows))
    same(jax.vmap(lambda row: ops.quantized_sum(row, 0, quantizer="int8"))(x), out)
    same(ops.quantized_sum(jnp.zeros((2, 3)), (0, 1), quantizer="int8"), jnp.asarray(0.0))
    same(ops.quantized_sum(jnp.zeros((2, 0)), 1, quantizer="int8"), jnp.zeros(2))


def test_sums_say_what_they_want():
    x = jnp.ones((2, 64))
    with pytest.raises(ValueError, match="share a scale, but along axis 0 there are 2: take the summed axes out of"):
        ops.quantized_sum(x, (0, 1), quantizer=ROWS)
    with pytest.raises(ValueError, match="along axis 1 there are 4"):
        ops.quantized_sum(x, 1, quantizer=Quantizer("int8", tiled_axes={1: 16}))
    with pytest.raises(ValueError, match="integer codes are summed; those of float8_e4m3fn are not"):
        ops.quantized_sum(x, 1, quantizer="fp8")
    with pytest.raises(TypeError, match="a float array is summed by a quantizer"):
        ops.quantized_sum(x, 1)
    with pytest.raises(TypeError, match="quantized already"):
        ops.quantized_sum(ROWS.quantize(x), 1, quantizer=ROWS)
    with pytest.raises(ValueError, match="axis 2 is out of range for an array of rank 2"):
        ops.quantized_sum(x, 2, quantizer="int8")
    many = jax.ShapeDtypeStruct((2**24,), jnp.float32)
    with pytest.raises(ValueError, match=r"a sum of 16777216 int8 codes may leave int32.*fewer than 16777216 values"):
        jax.eval_shape(lambda x: ops.quantized_sum(x, 0, quantizer="int8"), many)
    fewer = jax.ShapeDtypeStruct((2**24 - 1,), jnp.float32)
    assert jax.eval_shape(lambda x: ops.quantized_sum(x, 0, quantizer="int8"), fewer).shape == ()
