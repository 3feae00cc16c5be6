"""What is computed on one platform only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo.qarray.arithmetic import on_cpu
from tests.arrays import normal


def lowered(fn, *args, platform):
    return jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(("platform", "value"), [("cpu", "true"), ("tpu", "false"), ("cuda", "false")])
def test_on_cpu_is_a_constant_after_lowering(platform, value):
    assert f"dense<{value}> : tensor<i1>" in lowered(on_cpu, platform=platform)


def test_on_cpu_under_transformations():
    assert bool(on_cpu())
    assert bool(jax.jit(on_cpu)()) == (jax.default_backend() == "cpu")
    assert jax.vmap(lambda x: x + on_cpu().astype(x.dtype))(jnp.zeros(3)).tolist() == [1, 1, 1]


@pytest.mark.parametrize(("width", "count"), [(64, 1), (32, 1), (16, 0)])
def test_the_gradient_of_a_wide_weight_has_its_layout_on_tpus(width, count):
    x, w = jnp.ones((16, 32)), jnp.ones((32, width))
    config = octavo.DotConfig.qt("int8")

    def loss(w):
        return jnp.sum(octavo.dot_general(x, w, (((1,), (0,)), ((), ())), config=config))

    assert lowered(jax.grad(loss), w, platform="tpu").count("@LayoutConstraint") == count
    assert "@LayoutConstraint" not in lowered(jax.grad(loss), w, platform="cuda")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_range_is_reduced_in_the_dtype_of_the_values(dtype):
    """A reduction of widened values would be a pass of its own on TPUs."""
    x = normal(0, 8, 256).astype(dtype)
    quantizer = octavo.Quantizer("int8", channelwise_axes=(0,))
    text = jax.jit(quantizer.quantize).trace(x).lower(lowering_platforms=("tpu",)).as_text()
    kind = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    assert f"applies stablehlo.maximum across dimensions = [1] : (tensor<8x256x{kind}>" in text
    bounds, wide = quantizer.measure(x)["absmax"], quantizer.measure(x.astype(jnp.float32))["absmax"]
    assert bounds.dtype == wide.dtype == jnp.float32
    np.testing.assert_array_equal(bounds, wide)


def test_an_eager_call_is_one_program(caplog):
    x = jnp.asarray(np.arange(3 * 34, dtype=np.float32).reshape(3, 34))
    with jax.log_compiles():
        octavo.quantize(x, "nvfp4").pack().dequantize()
    compiled = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Compiling")]
    assert len(compiled) == 3, compiled
