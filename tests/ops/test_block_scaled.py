"""Block-scaled dots: `lax.scaled_dot` computes what the dot of dequantized operands does, and is what GPUs run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo.ops import DotConfig, Matmul, Operand
from tests.arrays import normal
from tests.cases import slow_except

NUMBERS = (((2,), (0,)), ((), ()))


def square(qtype):
    """Square blocks of weights, as in te_nvfp4 but rounded to nearest."""
    block, weight = Operand(qtype), Operand(qtype, square=True)
    dlhs, drhs = Matmul(block, weight, residual="original"), Matmul(block, block, residual="original")
    return DotConfig(Matmul(block, weight), dlhs, drhs)


CONFIGS = {name: DotConfig.qt(name) for name in ("mxfp8", "mxfp4", "nvfp4")} | {"square": square("nvfp4")}


def step(config, lowering):
    def loss(x, w):
        dot = octavo.dot_general(x, w, NUMBERS, config=config.replace(lowering=lowering))
        return jnp.sum(jnp.sin(dot)), dot

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


@pytest.fixture(scope="module")
def operands():
    return normal(0, 2, 32, 64), normal(1, 64, 96)


@pytest.mark.parametrize("name", slow_except(("mxfp8", "square"), CONFIGS))
def test_equal_to_the_emulation_in_all_three_matmuls(name, operands):
    scaled, plain = (step(CONFIGS[name], lowering)(*operands) for lowering in ("scaled", "plain"))
    for ours, reference in zip(jax.tree.leaves(scaled), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(ours, reference, rtol=0, atol=2e-6 * float(jnp.max(jnp.abs(reference))))


@pytest.mark.parametrize("name", CONFIGS)
def test_all_three_matmuls_are_block_scaled_on_gpus_only(name, operands):
    traced = step(CONFIGS[name], "auto").trace(*operands)
    texts = (traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "tpu"))
    assert [text.count('composite "xla.scaled_dot"') for text in texts] == [3, 0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DotConfig.qt("int8"), "it multiplies two operands in block formats"),
        (DotConfig.qt("mxint8"), "no block-scaled dot of mxint8"),
        (DotConfig.weight_only("mxfp8"), "it multiplies two operands in block formats"),
    ],
)
def test_forced_where_it_does_not_apply(config, message, operands):
    with pytest.raises(ValueError, match=f"lowering='scaled': .*{message}"):
        octavo.dot_general(*operands, NUMBERS, config=config.replace(lowering="scaled"))


@pytest.mark.slow
@pytest.mark.compiler("cuda")
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_the_matmuls_of_a_b200(name, operands):
    from octavo.hlo import compile_for, count_types, get_accelerator, read_matmuls

    element = {"mxfp8": "f8e4m3fn", "nvfp4": "f4e2m1fn"}[name]
    shapes = [jax.ShapeDtypeStruct((2, 256, 512), jnp.bfloat16), jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)]
    matmuls = read_matmuls(compile_for(get_accelerator("b200"), step(CONFIGS[name], "auto"), *shapes).as_text())
    assert count_types(matmuls) == {f"{element} x {element} -> f32": 3}
