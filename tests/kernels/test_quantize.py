"""The kernel that quantizes is bit-equal to `Quantizer`, in every instruction set that this machine has."""

import jax.numpy as jnp
import numpy as np
import pytest

from octavo import kernels
from octavo.qarray import Quantizer

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.status())

# The shape, the axes with scales, and the shape of the factor.
CASES = [
    ((33,), (0,), None),
    ((33, 70), (0,), None),
    ((70, 129), (1,), None),
    ((3, 17, 19), (0, 2), (3, 17, 1)),
    ((4, 128, 2, 32), (0, 2, 3), (4, 128, 1, 1)),
    ((4, 9, 8, 32), (0, 1, 2), (1, 1, 1, 32)),
    ((1, 40), (0, 1), (1, 40)),
    ((300, 16), (0,), (300, 16)),
]


def values(shape, seed, special=0.0):
    """Values over many orders of magnitude, with zeros, subnormal and special ones."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(shape) * np.exp(4 * rng.standard_normal(shape))).astype(np.float32)
    x[rng.random(shape) < 0.05] = 0
    x.flat[rng.integers(0, x.size, 4)] = [special, -special, 1e-42, -1e-38]
    x[: shape[0] // 4] *= np.float32(1e-38)
    x[-1] = 0
    return x


def bits(q):
    return np.asarray(q[0]), np.asarray(q[1]).view(np.uint32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bit_equal_to_the_quantizer_on_any_instruction_set_and_threads(case):
    shape, axes, factor = case
    # Not both in one program: XLA's operations lose a NaN beside values above 1e30.
    x = jnp.asarray(values(shape, 0, special=np.nan if len(shape) % 2 else np.inf))
    f = None if factor is None else jnp.asarray(values(factor, 1))
    q = Quantizer("int8", channelwise_axes=axes).quantize(x if f is None else x * f)
    for isa in kernels.versions():
        for threads in (1, 2):
            static = {"scale_shape": q.scale.shape, "unit": 1 / 127.5, "low": -128, "high": 127}
            got = kernels.quantize_absmax(x, f, **static, isa=isa, threads=threads)
            for have, want in zip(bits(got), bits((q.qvalue, q.scale)), strict=True):
                np.testing.assert_array_equal(have, want, err_msg=f"{isa}, {threads} threads")


def test_operands_that_do_not_fit_are_errors():
    x, static = jnp.ones((4, 32)), {"unit": 1.0, "low": -128, "high": 127}
    for scale, dtype, message in (
        ((1, 1), jnp.float32, "there is an axis with scales"),
        ((2, 1), jnp.float32, "do not fit the sizes"),
        ((4, 1), jnp.bfloat16, "values and scales are float32"),
    ):
        with pytest.raises(Exception, match=message):
            kernels.quantize_absmax(x.astype(dtype), scale_shape=scale, **static)
    with pytest.raises(Exception, match="no avx9"):
        kernels.quantize_absmax(x, scale_shape=(4, 1), **static, isa="avx9")


def test_shapes_for_which_it_is_used():
    assert kernels.can_quantize((64, 32), (64, 1), (1, 32))
    assert not kernels.can_quantize((64, 32), (1, 1))  # no axis to distribute
    assert not kernels.can_quantize((64, 8), (64, 1))  # too few adjacent values
    assert not kernels.can_quantize((0, 32), (1, 32))
    assert not kernels.can_quantize((2, 1 << 20), (2, 1))
