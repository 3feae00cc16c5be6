"""Sums over devices in low precision: close to the sum, in few bytes, and with feedback right on average."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from octavo.distributed import quantized_psum, quantized_psum_scatter
from tests.arrays import normal

MESH = Mesh(np.array(jax.devices()), ("data",))
N = MESH.size


@functools.cache
def sums(qtype):
    def one(x, error):
        total, lost = quantized_psum(x[0], "data", qtype, error=error[0])
        return total, lost[None]

    return jax.jit(jax.shard_map(one, mesh=MESH, in_specs=P("data"), out_specs=(P(), P("data")), check_vma=False))


def summed(x, error=None, qtype="int8"):
    """The sum over devices of the rows of x, and the rows that were lost."""
    return sums(qtype)(x, jnp.zeros_like(x) if error is None else error)


def rows(*shape, seed=0):
    return normal(seed, N, *shape)


@pytest.mark.parametrize("shape", [(256 * 8,), (1,), (64, 33)])
def test_the_sum_is_close_and_its_error_is_known(shape):
    x = rows(*shape)
    total, lost = summed(x)
    assert total.shape == shape
    assert lost.shape == x.shape
    # What arrived and what was lost are the sum, but for the rounding of float32.
    assert jnp.allclose(total + lost.sum(0), x.sum(0), atol=1e-5)
    # Half a step of each block and device, and half a step of the sum.
    bound = jnp.abs(x).max() / 254 * N + jnp.abs(x.sum(0)).max() * 1.02 / 254
    assert 0 < jnp.abs(total - x.sum(0)).max() < bound


@pytest.mark.slow
def test_every_device_has_the_same_sum():
    def one(x):
        return quantized_psum(x[0], "data")[0][None]

    all_of_them = jax.shard_map(one, mesh=MESH, in_specs=P("data"), out_specs=P("data"), check_vma=False)(rows(100))
    assert jnp.array_equal(all_of_them, jnp.broadcast_to(all_of_them[:1], all_of_them.shape))


def test_error_feedback_is_added_to_the_next_gradient():
    x = rows(300)
    with_feedback, without, error = 0, 0, None
    for _ in range(12):
        total, error = summed(x, error)
        with_feedback, without = with_feedback + total, without + summed(x)[0]
    exact = 12 * x.sum(0)
    # Ever the same error adds up without feedback; with it, only the last one is missing.
    assert jnp.abs(with_feedback - exact).max() < 1.5 * jnp.abs(summed(x)[0] - x.sum(0)).max() * N
    assert jnp.abs(with_feedback - exact).max() < jnp.abs(without - exact).max() / 3


@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_eight_bits_are_sent(qtype):
    x = jax.device_put(rows(1 << 16), NamedSharding(MESH, P("data")))
    split = jax.shard_map(
        lambda x: quantized_psum(x[0], "data", qtype)[0], mesh=MESH, in_specs=P("data"), out_specs=P(), check_vma=False
    )
    text = jax.jit(split).lower(x).compile().as_text()
    sent = re.findall(r"= \(?(\w+)\[([\d,]+)\].* (?:all-to-all|all-gather)\(", text)
    sizes = {kind: sum(np.prod([int(n) for n in dims.split(",")]) for k, dims in sent if k == kind) for kind, _ in sent}
    codes = "s8" if qtype == "int8" else "u8"
    assert set(sizes) == {codes, "f32"}
    assert sizes["f32"] * 200 < sizes[codes]


@pytest.mark.parametrize(("shape", "axis"), [((4096,), 0), ((3, 16, 5), 1)])
def test_the_part_of_a_sum_is_that_of_the_whole(shape, axis):
    x, spec = rows(*shape), P(*(None,) * axis, "data")

    def one(x):
        part, lost = quantized_psum_scatter(x[0], "data", scatter_dimension=axis)
        return part, lost[None]

    split = jax.shard_map(one, mesh=MESH, in_specs=P("data"), out_specs=(spec, P("data")), check_vma=False)
    parts, lost = jax.jit(split)(x)
    assert 0 < jnp.abs(parts - x.sum(0)).max() < jnp.abs(x).max() / 254 * N
    assert jnp.allclose(parts + lost.sum(0), x.sum(0), atol=1e-5)


def test_parts_that_are_not_equal_raise():
    split = jax.shard_map(
        lambda x: quantized_psum_scatter(x[0], "data")[0], mesh=MESH, in_specs=P("data"), out_specs=P("data")
    )
    with pytest.raises(ValueError, match=r"axis 0 of an array \(12,\) has no 8 equal shards: use quantized_psum"):
        jax.eval_shape(split, rows(12))


def test_what_is_not_finite_is_seen_everywhere_it_was():
    total, _ = summed(rows(300).at[3, 7].set(jnp.nan))
    assert jnp.isnan(total[7])


def test_integers_raise():
    with pytest.raises(TypeError, match=r"takes floats, got int32: use jax\.lax\.psum"):
        summed(jnp.ones((N, 4), jnp.int32))
