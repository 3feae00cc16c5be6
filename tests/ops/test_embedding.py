"""Lookups of rows in low precision, against plain references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo import Quantizer, fake_quant, ops

ROWS = Quantizer("int8", channelwise_axes=(0,))


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype))


def same(a, b):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))  # NaN equals NaN


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
