"""The float8 matmuls of H100, by its compiler: codes go in, and no pass over a result multiplies it by scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo.hlo import count_types, devices, get_accelerator, read_matmuls
from octavo.hlo.text import parse
from octavo.rules import dot_config
from tests.arrays import normal

NUMBERS = (((1,), (0,)), ((), ()))
TYPES = {"f8e4m3fn x f8e4m3fn -> f32": 1, "f8e4m3fn x f8e5m2 -> f32": 1, "f8e5m2 x f8e4m3fn -> f32": 1}


def config(name):
    return dot_config(octavo.recipe(name, exclude=None)[-1], lhs_weight=False, rhs_weight=True)


def gradients(config):
    """The gradients of a layer with bfloat16 activations and float32 weights, and the new state of ranges."""

    def loss(x, w, scaling):
        out = octavo.dot_general(x, w.astype(x.dtype), NUMBERS, config=config, scaling=scaling)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    return jax.grad(loss, argnums=(0, 1, 2))


def compile_layer(config, **options):
    x, w = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((1024, 2048), jnp.float32)
    scaling = jax.eval_shape(lambda: octavo.ops.init_scaling(config, x, w, NUMBERS))
    h100 = jax.sharding.SingleDeviceSharding(devices(get_accelerator("h100"))[0])
    lowered = jax.jit(gradients(config), in_shardings=h100, out_shardings=h100).lower(x, w, scaling)
    return lowered.compile(compiler_options=options).as_text()


# XLA has no epilogue for the scales of channels, and multiplies those of a gradient that is masked where it is masked.
APART = {
    "te_fp8_currentscaling": set(),
    "te_fp8_delayedscaling": {"f32[1024,2048]"},
    "fp8_full": {"f32[4096,2048]", "f32[4096,1024]", "f32[1024,2048]"},
}


@pytest.mark.slow
@pytest.mark.compiler("cuda")
@pytest.mark.parametrize("name", APART)
def test_each_matmul_is_one_of_codes_with_its_scale_in_the_epilogue(name):
    text = compile_layer(config(name))
    assert count_types(read_matmuls(text)) == TYPES
    module, apart = parse(text), set()
    for line in module.computations[module.entry]:
        opcodes = {each.opcode for name in line.called("calls") for each in module.computations[name]}
        if "dot" in opcodes and "multiply" not in opcodes:
            apart.add(str(line.shapes[0]))
    assert apart <= APART[name]


@pytest.mark.slow
@pytest.mark.compiler("cuda")
def test_cublas_multiplies_by_the_scale():
    text = compile_layer(config("te_fp8_currentscaling"), xla_gpu_enable_triton_gemm=False)
    assert count_types(read_matmuls(text)) == {f"{types} (__cublas$lt$matmul$f8)": 1 for types in TYPES}
    module = parse(text)
    lines = module.computations[module.entry]
    results = {f"f32[{sizes}]" for sizes in ("4096,2048", "4096,1024", "1024,2048")}
    made = {line.name for line in lines if line.opcode == "get-tuple-element" and str(line.shapes[0]) in results}
    readers = [line for line in lines if line.opcode == "fusion" and made & set(line.operands)]
    inside = [each.opcode for line in readers for each in module.computations[line.called("calls")[0]]]
    assert readers
    assert "cosine" in inside
    assert inside.count("multiply") == 1  # the cotangent by its scale


def test_scales_are_multiplied_one_by_one_where_cublas_is_not():
    """On CPUs the result is the same as by one multiplication after the other, without vmap and with it."""
    x, w = normal(0, 3, 8, 16), normal(1, 16, 4)
    run = lambda x: octavo.dot_general(x, w, NUMBERS, config=config("te_fp8_currentscaling"))  # noqa: E731
    np.testing.assert_array_equal(jax.jit(jax.vmap(run))(x), jnp.stack([run(each) for each in x]))


def test_the_gradient_of_scales():
    codes = [octavo.quantize(normal(n, 8, 8), "float8_e4m3fn") for n in (0, 1)]
    assert all(q.scale.size == 1 for q in codes)

    def dot(*scales):
        return jnp.sum(octavo.dot(*(q._replace(scale=s) for q, s in zip(codes, scales, strict=True))))

    scales = [q.scale for q in codes]
    for gradient, scale in zip(jax.grad(dot, argnums=(0, 1))(*scales), scales, strict=True):
        np.testing.assert_allclose(gradient, dot(*scales) / scale, rtol=1e-5)
