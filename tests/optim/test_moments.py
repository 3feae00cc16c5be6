"""Moments in few bits: blocks, error bounds, and the range expansion against a NumPy reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.numerics import FloatFormat, get_format
from octavo.optim import MOMENTS, ExpandedMoment, dequantize_state
from octavo.optim.moment import block_shape, quantize_like
from tests.arrays import normal

ALL = pytest.mark.parametrize("name", MOMENTS)


def values(shape, *, unsigned=False, seed=0):
    """Moments of a range of six decades, as Adam's are."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 10 ** rng.uniform(-3, 0, shape)
    return jnp.asarray(x**2 if unsigned else x, jnp.float32)


def blocks(x, block):
    """A matrix as blocks [blocks, values], in NumPy."""
    x = np.asarray(x, np.float64)
    (rows, columns), (r, c) = x.shape, block
    return x.reshape(rows // r, r, columns // c, c).swapaxes(1, 2).reshape(-1, r * c)


def reference(x, grid):
    """The nearest values of a grid, scaled by the largest value of each block; only zero is rounded to zero in v."""
    largest = np.take_along_axis(x, np.argmax(np.abs(x), axis=1, keepdims=True), axis=1)
    largest = largest if -grid[0] < grid[-1] else np.abs(largest)
    scaled = x / largest * grid[-1]
    index = np.argmin(np.abs(scaled[..., None] - grid), axis=-1)
    index = np.maximum(index, x > 0) if grid[0] == 0 else index
    return grid[index] / grid[-1] * largest


def expanded_reference(x, grid):
    """COAT: the same on sign(x) |x / max|^k."""
    magnitude = np.abs(x)
    largest, least = magnitude.max(axis=1, keepdims=True), magnitude.min(axis=1, keepdims=True)
    positive = grid[grid > 0]
    k = np.floor(8 * np.log2(positive[-1] / positive[0]) / np.log2(largest / least)) / 8
    y = np.sign(x) * (magnitude / largest) ** k
    y = grid[np.argmin(np.abs(y[..., None] * grid[-1] - grid), axis=-1)] / grid[-1]
    return np.sign(y) * np.abs(y) ** (1 / k) * largest


@ALL
@pytest.mark.parametrize("unsigned", [False, True])
def test_moments_equal_the_reference(name, unsigned):
    fmt, x = MOMENTS[name], values((32, 64), unsigned=unsigned)
    moment = jax.jit(lambda x: fmt.quantize(x, unsigned=unsigned))(x)
    block = block_shape(x.shape, fmt.block_size)
    grid = (fmt.unsigned if unsigned else fmt.signed).grid()
    expected = (expanded_reference if fmt.expand else reference)(blocks(x, block), grid)
    found = blocks(moment.dequantize(), block)
    close = np.isclose(found, expected, rtol=2e-5, atol=1e-12)
    assert close.mean() > 0.995  # at a tie of two values float32 may take the other one
    spacing = 0.3 if fmt.signed.bits == 4 or fmt.expand else 0.12
    assert np.all(np.abs(found - blocks(x, block)) <= spacing * np.abs(blocks(x, block)).max(axis=1, keepdims=True))


@ALL
def test_the_largest_value_of_a_block_and_zero_are_exact(name):
    x = values((32, 64), unsigned=True)
    quantize = jax.jit(MOMENTS[name].quantize, static_argnames="unsigned")
    moment = quantize(x)
    block = block_shape(x.shape, MOMENTS[name].block_size)
    np.testing.assert_allclose(blocks(moment.dequantize(), block).max(1), blocks(x, block).max(1), rtol=1e-6)
    for unsigned in (False, True):
        zeros = quantize(jnp.zeros((8, 16)), unsigned=unsigned)
        np.testing.assert_array_equal(zeros.dequantize(), 0.0)


@ALL
def test_quantizing_like_a_moment_gives_that_moment(name):
    x = values((32, 64))
    moment = jax.jit(MOMENTS[name].quantize)(x)
    again = quantize_like(x, jax.eval_shape(lambda: moment))
    assert jax.tree.structure(again) == jax.tree.structure(moment)
    jax.tree.map(np.testing.assert_array_equal, again, moment)
    # Values of the map are codes again, up to the rounding of an expanded range.
    if not isinstance(moment, ExpandedMoment):
        twice = quantize_like(moment.dequantize(), moment)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), twice, moment)


def test_bytes_per_value():
    sizes = {name: jax.jit(fmt.quantize)(jnp.zeros((512, 512))).nbytes / 512**2 for name, fmt in MOMENTS.items()}
    assert sizes == {"dynamic8": 1 + 4 / 256, "linear8": 1 + 4 / 256, "dynamic4": 0.5 + 4 / 128, "float8": 1 + 5 / 128}


@pytest.mark.parametrize(
    ("shape", "block"),
    [((4, 2048, 512), (1, 4, 64)), ((4096,), (256,)), ((3, 320, 1280), (1, 1, 160)), ((7, 251), (1, 251)), ((), ())],
)
def test_blocks_divide_the_shards_of_every_axis(shape, block):
    assert block_shape(shape, 256) == block


def test_an_odd_axis_is_not_packed():
    moment = MOMENTS["dynamic4"].quantize(values((64, 65)))
    assert moment.packed is None
    assert moment.dequantize().shape == (64, 65)


def test_codes_of_float8_are_those_of_its_dtype():
    fmt = MOMENTS["float8"].signed
    assert isinstance(fmt, FloatFormat)
    x = jnp.linspace(-448.0, 448.0, 9999)
    native = get_format("float8_e4m3fn")
    np.testing.assert_array_equal(fmt.encode(x), native.to_bits(native.encode(x)))


def test_expansion_shrinks_the_error_of_moments():
    """The range of a block is two to three decades, half of that of float8 on a logarithmic scale."""
    x = normal(0, 64, 128) * 0.01
    plain = MOMENTS["float8"].replace(expand=False)
    relative = [
        float(jnp.mean(jnp.abs(fmt.quantize(x).dequantize() - x) / jnp.abs(x))) for fmt in (MOMENTS["float8"], plain)
    ]
    assert relative[0] < relative[1] / 1.4


def test_a_pytree_of_moments_is_dequantized():
    state = {"m": MOMENTS["dynamic8"].quantize(values((8, 16))), "count": jnp.int32(3)}
    assert [x.dtype.name for x in jax.tree.leaves(dequantize_state(state))] == ["int32", "float32"]
