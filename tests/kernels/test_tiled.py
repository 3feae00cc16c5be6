"""The matmul of int8 rows and quantized matrices against float64, in every instruction set of this machine."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from octavo import kernels

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.status())

UNIT = 2.0**-24


class Case:
    """Operands drawn from a seed, and their product in float64 with a bound on the error of a float32 sum."""

    def __init__(self, seed, *, packed, group=None, row_group=None, levels=""):
        rng = np.random.default_rng(seed)
        group, row_group = group or int(rng.choice([4, 32, 64])), row_group or int(rng.choice([4, 32, 64]))
        depth = max(group, row_group) * int(rng.integers(1, 5))
        rows, columns = int(rng.integers(1, 19)), int(rng.integers(1, 150))
        self.x = rng.integers(-127, 128, (rows, depth)).astype(np.int8)
        self.x_scale = np.exp(rng.standard_normal((rows, depth // row_group))).astype(np.float32)
        shape = depth // group, columns
        scale_dtype = (
            ml_dtypes.float8_e3m4 if levels == "bytes" else [np.float32, np.float16, ml_dtypes.bfloat16][seed % 3]
        )
        self.scale = np.exp(rng.standard_normal(shape) / 2).astype(scale_dtype)
        self.zero = self.outer = None
        if levels:
            zero = rng.uniform(-8, 8, shape).astype(ml_dtypes.float8_e3m4 if levels == "bytes" else np.float32)
            self.zero = zero
        if levels == "bytes":
            self.outer = np.exp(rng.standard_normal(columns)).astype(np.float32)
        if packed:
            self.codes = rng.integers(0, 256, (depth // 2, columns)).astype(np.uint8)
            halves = np.stack([self.codes & 15, self.codes >> 4], 1).reshape(depth, columns)
            values = np.asarray(kernels.INT4)[halves]
        else:
            self.codes = rng.integers(-128, 128, (depth, columns)).astype(np.int8)
            values = self.codes.astype(np.float64)
        if self.zero is not None:
            values = values - np.repeat(self.zero.astype(np.float64), group, axis=0)
        weight = values * np.repeat(self.scale.astype(np.float64), group, axis=0)
        weight = weight if self.outer is None else weight * self.outer
        x = self.x * np.repeat(self.x_scale.astype(np.float64), row_group, axis=1)
        self.wanted = x @ weight
        # Sums of codes and their zero points are separate terms.
        size = np.abs(values) + (
            0 if self.zero is None else 2 * np.repeat(np.abs(self.zero).astype(np.float64), group, 0)
        )
        scales = np.repeat(self.scale.astype(np.float64), group, axis=0) * (1 if self.outer is None else self.outer)
        self.bound = (depth + 8) * UNIT * (np.abs(x) @ (size * scales))

    @property
    def operands(self):
        arrays = (self.x, self.x_scale, self.codes, self.scale, self.zero, self.outer)
        return tuple(None if a is None else jnp.asarray(a) for a in arrays)

    def check(self, got):
        assert got.shape == self.wanted.shape
        assert np.all(np.abs(np.asarray(got) - self.wanted) <= self.bound)


@pytest.mark.parametrize("isa", kernels.versions())
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("levels", ["", "floats", "bytes"])
def test_against_float64(isa, packed, levels):
    for seed in range(6):
        case = Case(seed, packed=packed, levels=levels)
        case.check(kernels.tiled_matmul(*case.operands, isa=isa))


def test_threads_and_rows_change_no_bit():
    case = Case(1, packed=True, group=64, row_group=32)
    x, x_scale, *weights = case.operands
    one = np.asarray(kernels.tiled_matmul(x, x_scale, *weights, threads=1))
    np.testing.assert_array_equal(kernels.tiled_matmul(x, x_scale, *weights, threads=3), one)
    np.testing.assert_array_equal(kernels.tiled_matmul(x[:1], x_scale[:1], *weights), one[:1])


def test_integers_are_exact_at_their_extremes():
    """Sums of 64 products of the extreme codes; the scale of one is exact."""
    ones = jnp.ones((1, 1))
    for code, w in ((-128, -128), (127, -128), (-128, 127)):
        got = kernels.tiled_matmul(jnp.full((1, 64), code, jnp.int8), ones, jnp.full((64, 1), w, jnp.int8), ones)
        assert got.tolist() == [[64.0 * code * w]]
    packed = jnp.full((32, 1), 0x87, jnp.uint8)  # 7 and -8
    got = kernels.tiled_matmul(jnp.full((1, 64), -128, jnp.int8), ones, packed, ones)
    assert got.tolist() == [[-128.0 * 32 * (7 - 8)]]


def test_vmap_and_export():
    case = Case(2, packed=False, group=32, row_group=64)
    x, x_scale, codes, scale, _, _ = case.operands
    batched = jax.vmap(kernels.tiled_matmul, in_axes=(0, 0, None, None))(x[:, None], x_scale[:, None], codes, scale)
    case.check(batched[:, 0])
    arguments = x, x_scale, codes, scale
    exported = jax.export.export(jax.jit(kernels.tiled_matmul))(*arguments)
    assert "custom_call" not in exported.mlir_module()
    case.check(exported.call(*arguments))


def test_operands_that_do_not_fit():
    x, codes, scale = jnp.ones((2, 24), jnp.int8), jnp.ones((24, 5), jnp.int8), jnp.ones((1, 5))
    for x_groups, groups in ((8, 2), (2, 3)):
        with pytest.raises(Exception, match="one group is a multiple of the other, and both are of 4"):
            kernels.tiled_matmul(x, jnp.ones((2, x_groups)), codes, jnp.ones((groups, 5))).block_until_ready()
    with pytest.raises(Exception, match=r"scale \[2, 5\] does not fit x \[2, 24\]"):
        kernels.tiled_matmul(x, jnp.ones((2, 5)), codes, scale).block_until_ready()
