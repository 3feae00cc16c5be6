"""`jax.export`: exported programs run, on CPUs and with a symbolic batch, and compute what the jitted ones do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import octavo
from octavo import kernels
from tests.arrays import normal

INT8 = octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
PARAMS = {"w": normal(0, 64, 32)}
X = normal(1, 4, 64)
ANY = jax.ShapeDtypeStruct((export.symbolic_shape("b")[0], 64), jnp.float32)


def predict(params, x):
    return x @ params["w"]


def same_when_exported(fn, *args, shapes=None, tolerance=0.0):
    """Exports a function, with other shapes if given, and compares its results for `args` with those of jit."""
    exported = export.export(jax.jit(fn))(*(args if shapes is None else shapes))
    got, want = exported.call(*args), jax.jit(fn)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


def value_and_grad(rule):
    low = octavo.quantized(predict, rule)
    return jax.value_and_grad(lambda params, x: jnp.sum(low(params, x) ** 2))


def test_a_training_step_is_exported_on_cpus():
    same_when_exported(value_and_grad(INT8), PARAMS, X)


@pytest.mark.parametrize("rule", [INT8, "mxfp8"], ids=str)
def test_a_training_step_is_exported_for_any_batch(rule):
    same_when_exported(value_and_grad(rule), PARAMS, X, shapes=(PARAMS, ANY))


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("rule", ["deepseek_fp8", "int4", "qat_int8"])
def test_every_platform_and_recipe_takes_a_symbolic_batch(rule, platform):
    exported = export.export(jax.jit(value_and_grad(rule)), platforms=[platform])(PARAMS, ANY)
    assert exported.in_avals[-1].shape == ANY.shape


@pytest.mark.parametrize(
    "how", [("int8", (0,), None), ("int8", (), {1: 16}), ("nvfp4", (), None), ("int4", (), None)], ids=str
)
def test_quantize_takes_a_symbolic_batch(how):
    qtype, channels, tiles = how

    def round_trip(x):
        return octavo.quantize(x, qtype, channelwise_axes=channels, tiled_axes=tiles).dequantize()

    same_when_exported(round_trip, X, shapes=(ANY,))


@pytest.mark.parametrize("how", [("int8", None), ("int8", {0: 32}), ("nvfp4", {0: 16}), ("int4", None)], ids=str)
def test_a_dot_with_a_qarray_and_a_served_model_take_a_symbolic_batch(how):
    qtype, tiles = how
    q = octavo.quantize(PARAMS["w"], qtype, channelwise_axes=() if qtype == "nvfp4" else (1,), tiled_axes=tiles)
    served = octavo.served(predict, octavo.QuantizationRule(weight_qtype=qtype))
    both = lambda q, x: (octavo.dot(x, q), served({"w": q.pack()}, x))  # noqa: E731
    same_when_exported(both, q, X, shapes=(q, ANY))


@pytest.mark.skipif(not kernels.available(), reason=kernels.status())
def test_an_exported_program_has_no_custom_call_of_the_cpu_kernels():
    q = octavo.quantize(normal(2, 512, 256), "int8", channelwise_axes=(1,))
    x = normal(3, 4, 512)
    rows = octavo.quantize(x, "int8", channelwise_axes=(0,))
    assert "octavo_" in jax.jit(octavo.dot).lower(x, q).as_text()
    same_when_exported(octavo.dot, rows, q)
    same_when_exported(octavo.dot, x, q, tolerance=1e-3)  # float sums in another order
    levels = octavo.quantize(jnp.eye(512, 256), "int4_double", tiled_axes={0: octavo.get_format("int4_double").tile})
    same_when_exported(octavo.dot, x, levels.pack(0), tolerance=1e-3)


@pytest.mark.parametrize(("subscripts", "last"), [("bi,io,bo->bo", (8, 4)), ("bi,io,zo->bo", (1, 4))])
def test_an_einsum_of_three_operands_takes_a_symbolic_batch(subscripts, last):
    weight, x = octavo.quantize(jnp.ones((64, 4)), "int8", channelwise_axes=(1,)), jnp.ones((8, 64))
    scale = jnp.arange(float(np.prod(last))).reshape(last)
    program = jax.jit(lambda x, scale: octavo.einsum(subscripts, x, weight, scale))
    shape = (ANY.shape[0] if last[0] == 8 else 1, 4)
    exported = export.export(program)(ANY, jax.ShapeDtypeStruct(shape, jnp.float32))
    np.testing.assert_array_equal(exported.call(x, scale), program(x, scale))
