"""Packing is exact, jittable, and as small as it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.numerics import formats, pack_bits, unpack_bits


@given(bits=st.integers(1, 8), size=st.integers(0, 40), seed=st.integers(0, 99))
def test_unpacking_inverts_packing(bits, size, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, (3, size), np.uint8)
    packed = pack_bits(jnp.asarray(codes), bits)
    assert packed.shape == (3, -(-size * bits // 8))
    np.testing.assert_array_equal(unpack_bits(packed, bits, size), codes)


@pytest.mark.parametrize("axis", [0, 1, 2, -3])
@pytest.mark.parametrize("bits", [2, 3, 4, 6])
def test_packs_along_any_axis_under_jit(axis, bits):
    codes = np.random.default_rng(0).integers(0, 2**bits, (8, 16, 24), np.uint8)
    packed = jax.jit(lambda c: pack_bits(c, bits, axis=axis))(codes)
    assert packed.nbytes * 8 == codes.size * bits
    unpack = jax.jit(lambda p: unpack_bits(p, bits, codes.shape[axis], axis=axis))
    np.testing.assert_array_equal(unpack(packed), codes)


def test_the_stream_is_little_endian():
    assert pack_bits(jnp.asarray([1, 2], jnp.uint8), 4).tolist() == [0x21]
    assert pack_bits(jnp.asarray([0, 1, 2, 3], jnp.uint8), 2).tolist() == [0b11100100]
    codes = np.arange(8, dtype=np.uint8) * 9 % 64
    stream = sum(int(c) << (6 * i) for i, c in enumerate(codes))
    assert pack_bits(jnp.asarray(codes), 6).tolist() == list(stream.to_bytes(6, "little"))


@pytest.mark.parametrize("name", sorted(n for n, f in formats().items() if f.bits <= 8))
def test_every_format_goes_through_bits_and_back(name):
    fmt = formats()[name]

    @jax.jit
    def run(grid):
        bits = fmt.to_bits(fmt.encode(grid))
        back = fmt.from_bits(unpack_bits(pack_bits(bits, fmt.bits), fmt.bits, bits.size))
        return bits, back, fmt.decode(back)

    bits, back, values = run(jnp.asarray(fmt.grid(), jnp.float32))
    assert bits.dtype == jnp.uint8
    assert int(bits.max()) < 2**fmt.bits
    assert back.dtype == fmt.storage
    np.testing.assert_array_equal(values, fmt.grid())
