"""Products with vectors and with arrays that have no elements, in every recipe."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo import DotConfig
from octavo.rules import dot_config
from tests.arrays import normal
from tests.cases import REPRESENTATIVE, slow_except

RECIPES = [name for name in octavo.recipes() if name != "intmp"]
CASES = slow_except(REPRESENTATIVE, RECIPES)
# Integers, and blocks whose gradients stay in float.
TWO = slow_except(("int8", "nvfp4"), REPRESENTATIVE)


def step(recipe, x, w):
    """The result and both gradients of one product."""
    low = octavo.quantized(lambda params, x: x @ params["w"], recipe)
    state = low.init({"w": w}, x)
    run = low.stateful(state, key=jax.random.key(0))
    out, vjp = jax.vjp(lambda w, x: run({"w": w}, x)[0], w, x)
    return out, *vjp(jnp.ones_like(out))


def config_of(recipe):
    return dot_config(octavo.recipe(recipe, exclude=None)[-1], lhs_weight=False, rhs_weight=True)


def residual(recipe, vector):
    """A vector as gradients use it: the original one, or what the forward made of it."""
    config = config_of(recipe)
    if config.dlhs.residual == "original":
        return vector
    return config.fwd.lhs.quantizer(1, contracting=(0,)).quantize(vector).dequantize()


def is_block(recipe):
    """Whether the gradients of a recipe are in a block format, which an outer product leaves in float."""
    config = config_of(recipe)
    return any(o is not None and o.qtype.tile is not None for o in (config.fwd.lhs, config.dlhs.lhs))


@pytest.mark.parametrize("recipe", TWO)
def test_a_vector_is_a_matrix_of_one_column(recipe):
    matrix, vector = normal(0, 16, 64), normal(1, 64)
    run = jax.jit(functools.partial(step, recipe))
    (out, dw, dx), (wanted, column, outer) = run(matrix, vector), run(matrix, vector[:, None])
    np.testing.assert_array_equal(out, wanted[:, 0])
    np.testing.assert_array_equal(dw, column[:, 0])
    np.testing.assert_array_equal(
        dx, jnp.broadcast_to(residual(recipe, vector), (16, 64)) if is_block(recipe) else outer
    )


@pytest.mark.parametrize("recipe", TWO)
def test_gradients_of_single_examples(recipe):
    """`vmap(grad)`: each example is a product of a vector with the weight, as each row of a batch is."""
    x, w = normal(0, 3, 64), normal(1, 64, 16)
    run = jax.jit(jax.vmap(functools.partial(step, recipe), (0, None)))
    out, dw, dx = run(x, w)
    rows, _, drows = run(jnp.repeat(x[:, None], 16, axis=1), w)
    own = jnp.stack([residual(recipe, row) for row in x])
    # The order of summation differs between a vector and a matrix.
    np.testing.assert_allclose(out, rows[:, 0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, drows[:, 0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(
        dw, jnp.broadcast_to(own[:, :, None], dw.shape) if is_block(recipe) else run(x[:, None], w)[1]
    )


@pytest.mark.parametrize("recipe", CASES)
@pytest.mark.parametrize("shapes", [((0, 64), (64, 16)), ((16, 0), (0, 16))], ids=["no rows", "nothing to contract"])
def test_arrays_without_elements(recipe, shapes):
    x, w = (jnp.zeros(shape) for shape in shapes)
    out, dw, dx = jax.jit(functools.partial(step, recipe))(x, w)
    np.testing.assert_array_equal(out, jnp.zeros((x.shape[0], 16)))
    np.testing.assert_array_equal(dw, jnp.zeros(w.shape))
    assert dx.shape == x.shape


EMPTY = {
    "ab,bc->ac": ((0, 64), (64, 4)),
    "abc,cd->abd": ((2, 0, 64), (64, 3)),
    "abc,acd->abd": ((0, 2, 64), (0, 64, 3)),
    "ab,cb->ca": ((4, 0), (3, 0)),
}


@pytest.mark.parametrize(("subscripts", "qtype"), [*((s, "int8") for s in EMPTY), ("ab,bc->ac", "nvfp4")])
def test_einsum_with_an_axis_of_size_zero(subscripts, qtype):
    config, operands = DotConfig.qt(qtype), [jnp.ones(shape) for shape in EMPTY[subscripts]]
    run = lambda a, b: octavo.einsum(subscripts, a, b, config=config)  # noqa: E731
    np.testing.assert_array_equal(jax.jit(run)(*operands), np.einsum(subscripts, *operands))
    gradients = jax.jit(jax.grad(lambda a, b: run(a, b).sum(), argnums=(0, 1)))(*operands)
    assert tuple(g.shape for g in gradients) == EMPTY[subscripts]
    with pytest.raises(ValueError, match="index 'b' has sizes"):
        octavo.einsum("ab,bc->ac", jnp.ones((2, 3)), jnp.ones((0, 4)), config=config)


def test_the_outer_product_of_a_float_array_and_a_qarray():
    x, q = jnp.arange(1.0, 5), octavo.quantize(jnp.arange(1.0, 9), "int8")
    empty = jnp.zeros(0)
    cases = [
        ("i,j->ij", (x, q)),
        ("i,j->ji", (q, x)),
        ("i,j->ij", (q, q)),
        ("i,j->ij", (empty, q)),
        ("i,j->ji", (q, empty)),
    ]
    for subscripts, operands in cases:
        floats = [o.dequantize() if isinstance(o, octavo.QArray) else o for o in operands]
        got = octavo.einsum(subscripts, *operands)
        np.testing.assert_allclose(got, jnp.einsum(subscripts, *floats), rtol=1e-6)


@pytest.mark.parametrize("name", octavo.formats())
def test_quantizing_nothing(name):
    asymmetric = {"calibration_method": "minmax"} if name.startswith("uint") else {}
    q = octavo.quantize(jnp.zeros((4, 0)), name, **asymmetric)
    assert q.dequantize().shape == (4, 0)


def test_integers_accumulate_in_int32():
    """1000 x 127 x 127 is far beyond int8, in which JAX's own default sums."""
    x, w = jnp.full((1, 1000), 127, jnp.int8), jnp.full((1000, 1), 127, jnp.int8)
    sizes, image = jnp.array([1], jnp.int32), x[:, :, None]
    results = {
        "dot": octavo.dot(x, w),
        "dot_general": octavo.dot_general(x, w, (((1,), (0,)), ((), ()))),
        "einsum": octavo.einsum("ab,bc->ac", x, w),
        "ragged_dot": octavo.ragged_dot(x, w[None], sizes),
        "conv": octavo.conv_general_dilated(
            image, w[:, :, None], (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
        ),
    }
    for name, result in results.items():
        assert (result.dtype, int(result.sum())) == (jnp.int32, 16_129_000), name
