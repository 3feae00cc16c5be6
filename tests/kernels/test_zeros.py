"""Zeros that take no memory until they are written are zeros, also where memory is used again."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from octavo import kernels


@pytest.mark.parametrize("shape", [(0,), (3,), (5, 1000), (2, 3, 1 << 18)])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, ml_dtypes.float8_e4m3fn])
def test_they_are_zeros(shape, dtype):
    for _ in range(2):
        ones = jnp.ones(shape, dtype) + jnp.ones(shape, dtype)  # leaves memory that is not zero
        ones.block_until_ready()
        del ones
        made = kernels.zeros(shape, dtype)
        assert made.shape == shape
        assert made.dtype == dtype
        assert not np.asarray(made).view(np.uint8).any()


@pytest.mark.skipif(not kernels.available(), reason=kernels.status())
def test_memory_is_taken_when_it_is_written():
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    try:
        before = resident()
    except OSError:
        pytest.skip("the system does not tell how much memory is resident")
    kernels.zeros((1 << 26,), np.int8).block_until_ready()
    before, made = resident(), kernels.zeros((1 << 28,), np.int8)
    made.block_until_ready()
    assert resident() - before < 1 << 26
    with kernels.disabled():
        assert not np.asarray(kernels.zeros((9,), np.int8)).any()
