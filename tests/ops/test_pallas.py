"""lowering="pallas": the same products as any other lowering, interpreted here, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo import DotConfig, Operand
from octavo.ops import lowering_of, lowerings
from octavo.ops.dims import Dims
from octavo.ops.multiply import multiply
from octavo.ops.ragged import gmm, ragged_dot, tgmm

M, K, N, G = 48, 32, 24, 4
SIZES = [[3, 29, 0, 10], [0, 0, 0, 0], [0, 48, 0, 0], [12, 12, 12, 12]]
CONFIGS = {
    "int8": DotConfig.qt("int8"),
    "fp8": DotConfig.qt("float8_e4m3fn", bwd="float8_e5m2"),
    "weight_only": DotConfig.weight_only("int8"),
    "int4": DotConfig.weight_only("int4"),
    "tensor": DotConfig.qt("int8", per_tensor=True),
}


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@functools.partial(jax.jit, static_argnames="config")
def step(x, w, sizes, ct, config):
    out, pull = jax.vjp(lambda x, w: ragged_dot(x, w, sizes, config=config), x, w)
    return out, *pull(ct)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_dots_agree_in_values_and_both_gradients(name):
    x, w, ct = random(M, K), random(G, K, N, seed=1), random(M, N, seed=2)
    for sizes in SIZES:
        x = x.at[sum(sizes) :].set(jnp.nan)  # rows of no group
        args = x, w, jnp.asarray(sizes, jnp.int32), ct
        plain, kernel = (step(*args, CONFIGS[name].replace(lowering=how)) for how in ("plain", "pallas"))
        for a, b in zip(plain, kernel, strict=True):
            if name in ("int8", "tensor"):
                np.testing.assert_array_equal(a, b)
            else:
                np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * max(1, np.abs(a).max()))


@pytest.mark.slow
def test_scales_in_tiles_along_the_contraction():
    config = DotConfig.qt("float8_e4m3fn", tile=128)
    x, w, ct = random(M, 256), random(G, 256, N, seed=1), random(M, N, seed=2)
    args = x, w, jnp.asarray(SIZES[0], jnp.int32), ct
    plain, kernel = (step(*args, config.replace(lowering=how)) for how in ("plain", "pallas"))
    for a, b in zip(plain, kernel, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(a).max())


@functools.partial(jax.jit, static_argnames="config")
def dense_step(x, w, ct, config):
    apply = lambda x, w: octavo.dot_general(x, w, (((2,), (0,)), ((), ())), config=config)  # noqa: E731
    out, pull = jax.vjp(apply, x, w)
    return apply(x, w), out, *pull(ct)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "fp8", "weight_only", "tiles"])
def test_dense_dots_agree_in_values_and_both_gradients(name):
    config = DotConfig.qt("float8_e4m3fn", tile=128) if name == "tiles" else CONFIGS[name]
    depth = 256 if name == "tiles" else 40
    x, w, ct = random(2, 64, depth), random(depth, 128, seed=1), random(2, 64, 128, seed=2)
    plain, kernel = (dense_step(x, w, ct, config.replace(lowering=how)) for how in ("plain", "pallas"))
    for a, b in zip(plain, kernel, strict=True):
        if name == "int8":
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(a).max())


def test_what_is_not_differentiated_quantizes_in_the_kernel():
    config = DotConfig.qt("int8").replace(lowering="pallas")
    x, w = random(2, 9, 40), random(40, 24, seed=1)
    apply = lambda x, w: octavo.dot_general(x, w, (((2,), (0,)), ((), ())), config=config)  # noqa: E731
    assert "octavo_matmul" in str(jax.make_jaxpr(apply)(x, w))
    gradient = jax.make_jaxpr(jax.grad(lambda x: apply(x, w).sum()))(x)
    assert "octavo_matmul" not in str(gradient)
    plain = octavo.dot_general(x, w, (((2,), (0,)), ((), ())), config=config.replace(lowering="plain"))
    np.testing.assert_array_equal(jax.jit(apply)(x, w), plain)
    assert (
        lowering_of(config, *map(octavo.quantize, (x, w), ("int8",) * 2), (((2,), (0,)), ((), ())))
        == "int8 x int8, Pallas kernel"
    )


@pytest.mark.slow
def test_weights_as_codes_have_the_gradients_of_the_plain_product():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x, sizes = random(M, K), jnp.asarray(SIZES[0], jnp.int32)
    q = octavo.quantize(random(G, K, N, seed=1), "int8", channelwise_axes=(0, 2))

    def loss(x, scale):
        return jnp.sum(ragged_dot(x, q._replace(scale=scale), sizes) ** 2)

    plain = jax.jit(jax.grad(loss, (0, 1)))(x, q.scale)
    # Inside of shard_map the kernel is there for TPUs, and its gradients are those of what runs here.
    everywhere = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(jax.grad(loss, (0, 1)), mesh=mesh, in_specs=everywhere, out_specs=everywhere)
    for a, b in zip(plain, jax.jit(mapped)(x, q.scale), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_flops_of_kernels_are_counted():
    config = DotConfig.qt("int8").replace(lowering="pallas")
    x, w, sizes = random(M, K), random(G, K, N, seed=1), jnp.asarray(SIZES[0], jnp.int32)
    loss = lambda x, w: ragged_dot(x, w, sizes, config=config).sum()  # noqa: E731
    found = octavo.verify(jax.grad(loss, (0, 1)), x, w)
    assert not found.opaque
    assert [p.flops for p in found.products] == [2 * M * K * N] * len(found.products)
    assert found.share("native") == 1


def test_names_and_refusals():
    assert "pallas" in lowerings()
    x, w, sizes = random(M, K), random(G, K, N), jnp.asarray(SIZES[0], jnp.int32)
    with pytest.raises(ValueError, match="did you mean 'pallas'"):
        ragged_dot(x, w, sizes, config=DotConfig.qt("int8").replace(lowering="palas"))
    q = octavo.quantize(w, "int8", channelwise_axes=(0, 2))
    with pytest.raises(ValueError, match="lowering='pallas': the kernel has no batch axes; lowering='auto' takes"):
        multiply(random(G, 8, K), q, Dims(3, 3, (2,), (1,), (0,), (0,)), dtype=jnp.float32, lowering="pallas")
    asymmetric = octavo.Quantizer("int8", channelwise_axes=(1,), calibration="minmax").quantize(w[0])
    with pytest.raises(ValueError, match="without zero points"):
        multiply(x, asymmetric, Dims(2, 2, (1,), (0,)), dtype=jnp.float32, lowering="pallas")
    tiled = octavo.quantize(w[0], "int8", channelwise_axes=(1,), tiled_axes={0: 16})
    with pytest.raises(ValueError, match="multiples of 128 along k, not 2"):
        multiply(x, tiled, Dims(2, 2, (1,), (0,)), dtype=jnp.float32, lowering="pallas")
    how = {"dtype": jnp.float32, "lowering": "pallas", "accumulator": "bfloat16"}
    with pytest.raises(ValueError, match="accumulates in float32"):
        multiply(x, octavo.quantize(w[0], "int8"), Dims(2, 2, (1,), (0,)), **how)
    half = DotConfig(fwd=octavo.Matmul(None, Operand("int8", dequant="input"))).replace(lowering="pallas")
    with pytest.raises(ValueError, match="not an lhs of float16"):
        ragged_dot(x.astype(jnp.float16), w.astype(jnp.float16), sizes, config=half)


def test_gmm_and_tgmm_take_codes_where_they_run_today():
    x, w, sizes = random(M, K), random(G, K, N, seed=1), jnp.asarray(SIZES[0], jnp.int32)
    q, y = octavo.quantize(w, "int8", channelwise_axes=(0, 2)), random(M, N, seed=2)
    assert "octavo_gmm" not in str(jax.make_jaxpr(gmm)(x, q, sizes))
    assert "octavo_tgmm" not in str(jax.make_jaxpr(lambda x: tgmm(x, y, sizes, rows_first=True))(x))
